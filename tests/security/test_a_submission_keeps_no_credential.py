"""A credential in any text that people send is refused and kept nowhere; what they write otherwise
is their own, and is in its own record alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st

from paceline.client import AccessClient
from paceline.config import Endpoints
from paceline.errors import InvalidInput
from paceline.schemas import (
    AllowPurpose,
    Record,
    ReviewJob,
    StartFlow,
    SubmitJob,
    require_no_secrets,
)
from paceline.text import has_token, without_passwords
from tests.api.conftest import Served, app_client, bearer, call, make_runtime

PLANTED = "canary-5b1e7c09d2"
TOKEN = "hf_" + 3 * "CaNaRy5b1e7c"
CREDENTIALS = (
    f"https://user:{PLANTED}@host/x",
    f"s3://user:{PLANTED}@bucket/x",
    f"https://bucket.host/x?X-Amz-Date=1&X-Amz-Signature={PLANTED}",
    f"see https://account.host/x?sv=2024&sig={PLANTED}#there",
    f"with {TOKEN}",
)
RUN = "run-20260101-000000-abcdef"
JOB = {"model_id": "m", "version": "1", "data_snapshot": "s3://b/data/snapshots/x"}
SWEEP = {"flow": "sweep", "run_id": RUN, "parameters": {}}
ROUTES: dict[str, tuple[type[Record], dict[str, Any], str]] = {
    "/v1/training-jobs": (SubmitJob, JOB, ""),
    "/v1/training-jobs/adopt": (SubmitJob, {"spec": JOB, "run_id": RUN}, "spec"),
    "/v1/training-jobs/tj-0123456789ab/review": (ReviewJob, {"accepted": True}, ""),
    "/v1/data-purposes": (AllowPurpose, {"purpose": "p"}, ""),
    "/flows": (StartFlow, SWEEP, ""),
}


def texts_of(schema: dict[str, Any], whole: dict[str, Any], at: tuple[Any, ...] = ()) -> Any:
    """Yield the path of each value that a text can be, also of what may have any key."""
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    for each in schema.get("anyOf", ()):
        yield from texts_of(each, whole, at)
    if schema.get("type") == "string":
        yield at
    for name, each in schema.get("properties", {}).items():
        yield from texts_of(each, whole, (*at, name))
    for each in (schema.get("items"), *schema.get("prefixItems", ())):
        if each:
            yield from texts_of(each, whole, (*at, 0))
    if schema.get("type") == "object" and schema.get("additionalProperties"):
        yield from ((*at, "any"), (*at, "deep", "er", 0), (*at, None))  # None: the key itself


def planted(body: dict[str, Any], path: tuple[Any, ...], text: str) -> dict[str, Any]:
    """Return ``body`` with ``text`` at ``path``."""
    name, *below = path
    if not below:
        return {**body, text: 1} if name is None else {**body, name: text}
    if below[0] == 0:
        return {**body, name: [text]}
    inner = body.get(name)
    return {**body, name: planted(inner if isinstance(inner, dict) else {}, tuple(below), text)}


@pytest.mark.parametrize("route", ROUTES)
def test_a_url_with_a_credential_is_refused_in_every_text(route: str, tmp_path: Path) -> None:
    record, body, prefix = ROUTES[route]
    schema = record.model_json_schema()
    paths = list(texts_of(schema, schema))
    if record is SubmitJob:
        named = {".".join(map(str, path)) for path in paths}
        assert {"name", "project", "labels", "team", "code_ref", "parameters.any",
                "resources.accelerator", "purpose", "continue_from"} <= named  # fmt: skip
    made = make_runtime(tmp_path / "state")
    away = Endpoints(prefect_api_url="http://127.0.0.1:9/api")
    runtime = made.model_copy(update={"endpoints": away})
    with app_client(runtime) as client:
        for path in paths:
            for text in CREDENTIALS:
                whole = planted(body, (prefix, *path) if prefix else path, text)
                answer = call(client, "POST", route, client.owner, json=whole)
                assert 400 <= answer.status_code < 500, (path, text, answer.text)
                assert answer.status_code != 404, (path, answer.text)
                assert PLANTED not in answer.text, (path, answer.text)
                assert TOKEN not in answer.text, (path, answer.text)
        kept = [
            call(client, "GET", known, client.owner).text
            for known in ("/v1/training-jobs", "/audit?limit=1000", "/v1/data-purposes", "/metrics")
        ]
    files = [each.read_bytes() for each in runtime.state_dir.rglob("*") if each.is_file()]
    for text in (PLANTED, TOKEN):
        assert not [each for each in kept if text in each]
        assert not [each for each in files if text.encode() in each]


SHAPES = [  # of real tokens; none of them is one
    "pl_" + 4 * "0a1b" + "_" + 11 * "a-Z_",
    "hf_" + 17 * "aZ",
    *(f"gh{each}_" + 9 * "a1B2" for each in "psour"),
    "github_pat_" + 11 * "a1" + "_" + 59 * "Z",
    "glpat-" + 5 * "a_-Z",
    *(each + 4 * "AB12" for each in ("AKIA", "ASIA")),
    "AIza" + 7 * "a1-_Z",
    "xoxb-" + 2 * "1234567890-" + 8 * "aB3",
    "sk-" + 12 * "a1B2",
    "sk-proj-" + 12 * "a-_2",
    "sk-ant-api03-" + 12 * "a-_2",
    "eyJ" + 9 * "hbG" + ".eyJ" + 9 * "zdW" + "." + 9 * "a_-",
    "-----BEGIN PRIVATE KEY",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
]
words = st.lists(
    st.from_regex("[a-z]{1,14}|[A-Z]{1,12}|[0-9]{1,6}|eyJ|hf|gh[po]|AKIA|sk", fullmatch=True)
)


@pytest.mark.parametrize("shape", SHAPES)
@given(before=words, after=words, near=st.sampled_from([" ", "=", "_", "-", ":", '"', "\n"]))
def test_a_token_of_a_known_shape_is_refused_wherever_it_stands(
    shape: str, before: list[str], after: list[str], near: str
) -> None:
    text = near.join([*before, shape]) + " " + near.join(after)
    with pytest.raises(InvalidInput, match="access token or private key") as refused:
        require_no_secrets(ReviewJob.model_construct(accepted=True, reason=text))
    assert shape not in str(refused.value)
    assert shape not in without_passwords(text)


def test_a_private_key_is_hidden_to_its_end() -> None:
    assert without_passwords(f"key: {SHAPES[-1]}\nMIIEvQIBADANB") == "key: ***"


@given(words, st.sampled_from([" ", "-", "_", "/", ".", "="]))
def test_ordinary_words_are_no_tokens(some: list[str], near: str) -> None:
    assert not has_token(near.join(some))


@pytest.mark.parametrize(
    "text",
    [
        "tokens that begin with hf_, ghp_, AKIA, xoxb- or sk- are refused",
        "hf_llama_3_8b_instruct_lr_3e_4_batch_64_long_context_second_try",
        "sk-learn-baseline-of-the-second-quarter-with-more-features",
        "xoxo-from-all-of-the-vision-team",
        "AKIAKE2026 and MAKIA0123456789ABCDEF",
        "git+https://github.com/acme/jobs@" + 20 * "0a" + "#jobs:train",
        "s3://bucket/data/snapshots/" + 32 * "0a",
        f"{RUN} tj-0123456789ab, sha256:" + 32 * "0a",
        "-----BEGIN CERTIFICATE-----",
        "the private key is on the build host",
    ],
)
def test_what_only_resembles_a_token_is_taken(text: str) -> None:
    require_no_secrets(ReviewJob(accepted=True, reason=text))
    assert without_passwords(text) == text


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(make_runtime(tmp_path / "state", beat_s=5.0))
    server.runtime.state_dir.mkdir()
    server.start()
    yield server
    server.end()


def test_what_people_write_is_in_its_own_record_alone(served: Served) -> None:
    import httpx

    owner = AccessClient(served.url, served.runtime.secrets.coordinator_token)
    headers = bearer(served.runtime.secrets.coordinator_token)

    def send(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(f"{served.url}{path}", json=body, headers=headers)
        assert answer.status_code < 300, answer.text
        return dict(answer.json())

    texts = {"name": PLANTED, "project": PLANTED, "parameters": {"training.optimizer": PLANTED}}
    spec = JOB | texts
    mine = send("/v1/training-jobs/adopt", {"spec": spec, "run_id": RUN})["job"]
    other = send("/v1/training-jobs/adopt", {"spec": JOB, "run_id": RUN[:-1] + "0"})["job"]
    assert PLANTED in owner.job(mine["job_id"]).model_dump_json()
    assert PLANTED not in owner.job(other["job_id"]).model_dump_json()
    made = send("/v1/data-purposes", {"purpose": "p", "reason": f"as {PLANTED} says"})
    assert PLANTED in made["reason"]
    rows = [each.model_dump_json() for each in owner.audit(limit=1000)]
    own = (mine["job_id"], made["rule_id"])
    assert [e for e in rows if PLANTED in e and not any(each in e for each in own)] == []
    assert PLANTED not in httpx.get(f"{served.url}/metrics", headers=headers).text
    logs = list(served.runtime.state_dir.rglob("*.log"))
    assert logs and not [each for each in logs if PLANTED in each.read_text()]
    lines = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert not [each for each in lines if PLANTED in each]
