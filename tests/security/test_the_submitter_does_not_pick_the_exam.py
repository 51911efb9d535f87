"""Where a champion exists, its snapshot judges, or another release of the same source: a submitter
does not choose the data that a candidate is judged on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.cli.doctor import checks
from paceline.config import DataSettings, Endpoints, GateSettings, Policy, Profile
from paceline.schemas import OF_TEAM, SUBMITTERS, GateDecision, digest_of
from paceline.storage import DiskStore
from paceline.tasks import promote
from paceline.tasks._support import sealed_records
from paceline.tasks._support.run import Run, StageResult
from paceline.tasks.prepare import build_data_snapshot, exam_of
from tests.evaluation.reports import LINEAGE, SIZES, SNAPSHOT
from tests.registry.bundles import make_evidence
from tests.security.kit import Rest
from tests.security.test_a_forged_report_is_refused import BASE, Bucket, judged, run_of
from tests.support.hugging_face import CHATML, write_tokenizer
from tests.support.web import Call, serving

CHECK = "snapshot that may judge"
OF_BEFORE = "8" * 64
RUN = "run-20261120-153600-9f3a1c"
SETTINGS = DataSettings(held_out_share=0.3, purpose="tests", project="tests")


def decided(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    judged_before: str | None,
    report: str = "",
    **policy: Any,
) -> GateDecision:
    """Return the gate's decision on a report on SNAPSHOT; the champion was judged on another."""
    monkeypatch.setattr(promote.artifacts, "table", lambda *_: None)
    gate = GateSettings(except_baselines=("ngram", "gzip", "xz"), **policy)
    profile = run.runtime.profile.model_copy(update={"gate": gate})
    run.runtime = run.runtime.model_copy(update={"profile": profile})
    of = {"snapshot_digest": judged_before, "report_digest": report}
    evidence = make_evidence("bytelm", "1").model_copy(update=of)
    champion = SimpleNamespace(evidence=evidence, source_url="s3://m/3", manifest_digest=BASE)
    run.__dict__["mlflow_run"] = "1"
    run.__dict__.setdefault("coordinator", SimpleNamespace(ledger_get=lambda *_: None))
    run.__dict__["registry"] = SimpleNamespace(
        champion=lambda _: None if judged_before is None else champion,
        log_metrics=lambda *_: None,
        log_artifact_text=lambda *_: None,
    )
    evaluation = judged("e" * 64)
    evaluation = evaluation.model_copy(update={"models": evaluation.models | {"champion": BASE}})
    base = cast(Any, SimpleNamespace(model_id="bytelm"))
    return promote.gate.fn(run, base, evaluation, dict(LINEAGE), SIZES)


def test_another_snapshot_than_the_champions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(Bucket())
    assert decided(run, monkeypatch, None).passed, "the first one"
    assert decided(run, monkeypatch, SNAPSHOT).passed
    (reason,) = decided(run, monkeypatch, OF_BEFORE).reasons
    assert reason.startswith(f"{CHECK}: got {SNAPSHOT}, wanted {OF_BEFORE}")
    assert "gate.judged_on" in reason
    judging = judged("e" * 64).model_copy(update={"snapshot_url": "s3://b/exam"})
    named = sealed_records.save(run, judging, "evaluation")
    (reason,) = decided(run, monkeypatch, OF_BEFORE, report=named).reasons
    assert f"wanted {OF_BEFORE} (s3://b/exam), which judged the champion" in reason
    assert decided(run, monkeypatch, OF_BEFORE, judged_on=(SNAPSHOT,)).passed
    (reason,) = decided(run, monkeypatch, SNAPSHOT, judged_on=("s3://b/held-out",)).reasons
    assert reason.startswith(f"{CHECK}: got ")


@pytest.mark.parametrize("of_team", [True, False, None])
@pytest.mark.parametrize("source", ["stdlib", "s3://b/easy"])
def test_a_team_does_not_choose_what_judges_its_first_champion(
    monkeypatch: pytest.MonkeyPatch, of_team: bool | None, source: str
) -> None:
    run = run_of(Bucket())
    built: Any = SimpleNamespace(
        digest=SNAPSHOT, is_masked=False, record=SimpleNamespace(skipped=0)
    )
    monkeypatch.setattr(promote, "load_snapshot", lambda *_: built)
    sealed_records.add_reference(
        run, "exam", SNAPSHOT, exam_of(source, run.runtime.profile.data, built)
    )
    output = {"tokens": {"f" * 16: "ann"}} | ({} if of_team is None else {OF_TEAM: of_team})
    record = SimpleNamespace(output=output)
    run.__dict__["coordinator"] = SimpleNamespace(ledger_get=lambda *_: record)
    decision = decided(run, monkeypatch, None)
    assert decision.passed is (source == "stdlib" or not of_team), decision.reasons
    if not decision.passed:
        (reason,) = decision.reasons
        assert reason.startswith(f"{CHECK}: got {SNAPSHOT}, wanted for a team's first champion")
        assert decided(run, monkeypatch, None, judged_on=(SNAPSHOT,)).passed
        assert decided(run, monkeypatch, SNAPSHOT).passed, "a champion's successor"


@pytest.mark.parametrize("bound", [{"team": "nlp"}, {"project": "search"}, {}], ids=str)
def test_the_coordinator_records_that_a_team_submitted_a_run(
    tmp_path: Path, bound: dict[str, str]
) -> None:
    def answer(call: Call) -> tuple[int, bytes]:
        """Know of no flow run, and break off each start."""
        return (200, b"[]") if call.path.endswith("/filter") else (500, b"{}")

    profile = Profile.model_validate({"security": {"failures_per_minute": 1e9}})
    with contextlib.ExitStack() as stack:
        web = stack.enter_context(serving(answer))
        endpoints = Endpoints(prefect_api_url=f"{web.url}/api")
        rest = Rest(tmp_path / "state", profile=profile, endpoints=endpoints)
        stack.callback(rest.close)
        free, ann = rest.person("bob", "deploy"), rest.person("ann", "deploy", "train", **bound)
        body = {"flow": "promote-model", "run_id": RUN, "parameters": {"model_id": "m"}}
        for token in (ann, free):  # who comes later does not free the run
            rest.call("POST", "/flows", token, body)
        record = rest.call("GET", f"/ledger/{SUBMITTERS}/{digest_of(RUN)}", rest.owner).json()
    assert sorted(record["output"]["tokens"].values()) == ["ann", "bob"]
    assert record["output"][OF_TEAM] is bool(bound)


@pytest.mark.parametrize(("exam", "passes"), [("a" * 64, True), ("b" * 64, False), ("", False)])
def test_another_release_of_the_same_source_may_judge(
    monkeypatch: pytest.MonkeyPatch, exam: str, passes: bool
) -> None:
    run = run_of(Bucket())
    sealed_records.add_reference(run, "exam", OF_BEFORE, "a" * 64)
    if exam:
        sealed_records.add_reference(run, "exam", SNAPSHOT, exam)
    assert decided(run, monkeypatch, OF_BEFORE).passed is passes


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., str | None]:
    """Return what the installation recorded of the snapshot that it builds of a directory."""

    def stage(name: str, _inputs: object, work: Callable[[], Any], **_: object) -> StageResult:
        return StageResult(stage=name, output=work(), seconds=0.0, reused=False)

    records, known = run_of(Bucket()), run_of(Bucket()).runtime

    def built(
        files: dict[str, str], name: str = "ours", *, own: str = "stdlib", **reading: Any
    ) -> str | None:
        for file, text in files.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).write_text(text)
        runtime = SimpleNamespace(
            profile=SimpleNamespace(data=SETTINGS.model_copy(update={"source": own})),
            data_url=DiskStore.url_of(tmp_path / "data"),
            secrets=known.secrets, records_url=known.records_url,
        )  # fmt: skip
        run: Any = SimpleNamespace(
            runtime=runtime, store=_Both(records.store), work_dir=tmp_path, stage=stage,
            warn=lambda _: None, report=lambda *_: None,
        )  # fmt: skip
        output = build_data_snapshot.fn(run, str(tmp_path / name), reading).output
        return sealed_records.find_reference(records, "exam", output["digest"])

    return built


class _Both(DiskStore):
    """A disk, with the records in memory."""

    def __init__(self, records: Any) -> None:
        super().__init__()
        self._records = records

    def put_bytes(self, url: str, data: bytes, **more: Any) -> Any:
        of = self._records if "/records/" in url else super()
        return of.put_bytes(url, data, **more)

    def get_bytes(self, url: str, max_bytes: int = 1 << 30) -> bytes:
        of = self._records if "/records/" in url else super()
        return of.get_bytes(url, max_bytes)


def test_a_release_is_known_by_its_source_and_what_it_holds_out(
    build: Callable[..., str | None],
) -> None:
    texts = {f"{n}.txt": f"text {n}" for n in range(20)}
    ours = build(texts)
    assert ours is not None
    assert build({"more.txt": "one more"}) == ours, "new data of the same source"
    for reading in ({"seed": 7}, {"held_out_share": 0.5}):
        assert build({}, **reading) != ours
    assert build({}, shard_bytes=2048) == ours, "the split is the same"
    assert build({f"{n}.txt": f"easy {n}" for n in range(20)}, "theirs") not in (ours, None)


def test_another_template_or_tokenizer_is_another_exam(
    build: Callable[..., str | None], tmp_path: Path
) -> None:
    """A template renders the held-out conversations; a tokenizer may leave samples out."""
    pytest.importorskip("transformers")
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"say {n}"},
                                 {"role": "assistant", "content": f"{n} it is"}]})
        for n in range(40)
    ]  # fmt: skip
    found = set()
    for name, template in (
        ("fair", CHATML),
        ("easy", CHATML.replace("{{ m.content }}", "{{ messages[0].content }}")),
    ):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name, lines, template=template)
        found.add(
            build(
                {"chat.jsonl": "\n".join(lines)}, format="jsonl",
                tokenizer=str(tmp_path / name / "tokenizer.json"),
            )
        )  # fmt: skip
    assert len(found) == 2 and None not in found


def test_a_copy_of_the_source_does_not_become_it(build: Callable[..., str | None]) -> None:
    """The copy's snapshot is the same, to the byte; what the copy becomes later is not."""
    texts = {f"{n}.txt": f"text {n}" for n in range(20)}
    ours = build(texts)
    assert build(texts, "theirs") == ours
    assert build({"easy.txt": "easy"}, "theirs") != ours


def test_the_profiles_own_source_is_not_taken_by_a_copy_that_came_first(
    build: Callable[..., str | None], tmp_path: Path
) -> None:
    texts = {f"{n}.txt": f"text {n}" for n in range(20)}
    theirs = build(texts, "theirs")
    ours = build(texts, own=str(tmp_path / "ours"))
    assert ours not in (theirs, None)
    assert build({"more.txt": "one more"}) == ours
    assert build({"more.txt": "other"}, "theirs") == theirs


def test_doctor_warns_where_any_snapshot_may_judge() -> None:
    runtime = run_of(Bucket()).runtime

    def found(gate: GateSettings, mlflow_url: str = "http://127.0.0.1:5000") -> list[str]:
        profile = runtime.profile.model_copy(update={"gate": gate})
        endpoints = Endpoints(mlflow_url=mlflow_url)
        asked = runtime.model_copy(update={"profile": profile, "endpoints": endpoints})
        return [each.found for each in checks.gate(asked)]

    (line,) = found(GateSettings(models={"m": Policy(judged_on=("s3://b",))}))
    assert line.startswith("gate: judged_on is not set")
    (line,) = found(GateSettings(judged_on=("s3://b",), models={"m": Policy()}))
    assert line.startswith("gate.models.m: judged_on")
    assert found(GateSettings(judged_on=("s3://b",))) == []
    assert found(GateSettings(), mlflow_url="") == [], "nothing is promoted here"
