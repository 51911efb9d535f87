"""Ranks that hold each model together report the figures of one process, and of no part of it."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paceline.config import (
    DataSettings,
    Endpoints,
    EvaluationSettings,
    MeshSettings,
    Profile,
    Runtime,
    Secrets,
    TrainingSettings,
    save_runtime,
)
from paceline.data import build_snapshot, documents
from paceline.errors import WorkerLost
from paceline.evaluation import (
    choose_prefixes,
    score_models,
    score_on_ranks,
    text_model,
    transformer,
)
from paceline.models import ModelConfig, config_for, local_model_digest, new_model, save_model
from paceline.schemas import EvaluationReport, EvaluationSpec, RecordedScore
from paceline.storage import DiskStore
from paceline.tasks._support import judging_rank, scores
from paceline.training import LocalLauncher
from tests.security.test_a_forged_report_is_refused import Bucket, run_of
from tests.support.hugging_face import write_model, write_tokenizer

pytestmark = pytest.mark.timeout(500)
log = logging.getLogger(__name__)

SETTINGS = EvaluationSettings(held_out_bytes=6000, bootstrap_samples=100)
MB = 1_000_000
KILL = "kill-a-rank"
LARGE = ModelConfig(  # 51 M parameters, 205 MB, in 60 blocks
    hidden_size=256, intermediate_size=768, num_hidden_layers=60, num_attention_heads=8,
    num_key_value_heads=8, max_position_embeddings=16,
)  # fmt: skip


class Watched:
    """A launcher whose ranks are seen: what each reports, and a function called with each line."""

    def __init__(self, launcher: LocalLauncher) -> None:
        self.launcher = launcher
        self.lines: list[dict[str, Any]] = []
        self.on_line: Callable[[dict[str, Any]], None] = lambda _: None
        self._receive = launcher.receive
        launcher.receive = self.receive  # type: ignore[method-assign]

    def receive(self, timeout_s: float) -> Any:
        found = self._receive(timeout_s)
        for message in found:
            self.lines.append(dict(message.line))
            self.on_line(dict(message.line))
        return found


def main() -> int:
    """Score as a rank, in pieces: some rows have one more piece than others.

    Where the installation's directory has a file KILL, all save what they have after each step, and
    the first rank that is nearly done with "base" removes the file and kills itself.
    """
    text_model.PIECE = 20

    def scored(spec: EvaluationSpec, *others: Any, emit: Callable[..., None], **more: Any) -> None:
        def emit_or_die(kind: str, data: dict[str, Any]) -> None:
            emit(kind, data)
            if kind == "step" and "base" in data["message"] and data["fraction"] > 0.8:
                with suppress(FileNotFoundError):
                    Path(spec.state_dir, KILL).unlink()
                    os.kill(os.getpid(), signal.SIGKILL)

        if Path(spec.state_dir, KILL).exists():
            transformer.SAVE_EVERY_S = 0.0
        score_on_ranks(spec, *others, emit=emit_or_die, **more)

    with mock.patch.object(judging_rank, "score_on_ranks", scored):
        return judging_rank.main()


def preload() -> None:
    """Import what any rank of these tests needs."""
    judging_rank.preload()
    import transformers.models.llama.modeling_llama  # noqa: F401


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with mock.patch.object(scores, "JUDGING_RANK", f"{__name__}:main"), LocalLauncher() as launcher:
        yield Watched(launcher)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation's directory on this disk: a snapshot, and models beside it."""
    root = tmp_path_factory.mktemp("judging")
    source = root / "source"
    source.mkdir()
    texts = [f"def function_{n}():\n    return {n} * {n * 7}\n" * 20 for n in range(40)]
    for number, text in enumerate(texts):
        (source / f"module_{number}.py").write_text(text)
    build_snapshot(
        str(source), DiskStore.url_of(root / "data"), DataSettings(held_out_share=0.3), DiskStore()
    )
    config = config_for(30_000, 32, parts=2)
    for name, seed in (("candidate", 1), ("base", 2)):
        save_model(new_model(config, seed), config, root / name)
    llama = write_model("llama", root / "champion", vocab_size=320)
    write_tokenizer(llama, texts)
    save_runtime(
        Runtime(profile=Profile(), state_dir=root, endpoints=Endpoints(), secrets=Secrets())
    )
    return root


def spec_of(root: Path, *models: str, mesh: MeshSettings) -> EvaluationSpec:
    (record,) = (root / "data/snapshots").iterdir()
    return EvaluationSpec(
        run_id="run-20261120-153600-9f3a1c", state_dir=str(root),
        snapshot_url=DiskStore.url_of(record), snapshot_digest=record.name,
        models={name: str(root / name) for name in models}, settings=SETTINGS, scorer="paceline 1",
    )  # fmt: skip


def gang_of(ranks: int, mesh: MeshSettings, restarts: int = 1) -> scores.Gang:
    settings = TrainingSettings.model_validate({
        "ranks": ranks, "ranks_per_node": 2, "mesh": mesh,
        "guard": {"max_restarts": restarts},
    })  # fmt: skip
    return scores.Gang(settings, tuple(f"node-{n}" for n in range(ranks // 2)), {})


def judged(
    watched: Watched, root: Path, ranks: int, mesh: MeshSettings, *models: str, few: bool = False
) -> tuple[list[RecordedScore], dict[str, str], Bucket]:
    run, watched.lines = run_of(bucket := Bucket()), []
    spec, gang = spec_of(root, *models, mesh=mesh), gang_of(ranks, mesh)
    if few:  # tokens: what they take is not the weights'
        settings = SETTINGS.model_copy(update={"held_out_bytes": 1024})
        spec = spec.model_copy(update={"settings": settings})
    found, failures = scores.scored_on_ranks(run, spec, gang, watched.launcher, deadline_s=300.0)
    return found, failures, bucket


def report_of(root: Path, known: list[RecordedScore], *models: str) -> EvaluationReport:
    """What the evaluation's own process makes of ``known``; it scores the rest itself."""
    from paceline.data import load_snapshot, tokenizer_of

    store = DiskStore()
    snapshot = load_snapshot(spec_of(root, mesh=MeshSettings()).snapshot_url, store)
    read = [
        (each.path, each.text)
        for each in documents(snapshot, "held-out", store, root / "cache", 64 * 6000)
    ]
    return score_models(
        {name: root / name for name in models}, choose_prefixes(read, SETTINGS.held_out_bytes),
        lambda: [read[0][1]], SETTINGS, snapshot_digest=snapshot.digest,
        on_progress=lambda *_: None, tokenizer=tokenizer_of(snapshot, store), known=known,
    )  # fmt: skip


MODELS = ("candidate", "base", "champion")


@pytest.fixture(scope="module")
def alone(root: Path) -> EvaluationReport:
    return report_of(root, [], *MODELS)


EVERY_TIME = {"FSDP2": (2, MeshSettings(shard=2))}
NIGHTLY = {
    "TP": (2, MeshSettings(tp=2)),
    "FSDP2 × TP": (4, MeshSettings(shard=2, tp=2)),
    "FSDP2 on four": (4, MeshSettings(shard=4)),
    "replicas of shards": (4, MeshSettings(dp=2, shard=2)),
}


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        *(pytest.param(*each, id=name) for name, each in EVERY_TIME.items()),
        *(
            pytest.param(*each, id=name, marks=pytest.mark.nightly)
            for name, each in NIGHTLY.items()
        ),
    ],
)
def test_figures_are_those_of_one_process(
    watched: Watched, root: Path, alone: EvaluationReport, ranks: int, mesh: MeshSettings
) -> None:
    found, failures, bucket = judged(watched, root, ranks, mesh, *MODELS)
    assert not failures
    assert [each.subject for each in found] == [local_model_digest(root / x) for x in MODELS]
    assert len(bucket.objects) == 3
    together = report_of(root, found, *MODELS)
    for name in MODELS:
        mine, wanted = together.score(name), alone.score(name)
        assert mine is not None
        assert wanted is not None
        assert mine.bits_per_byte.value == pytest.approx(wanted.bits_per_byte.value, rel=1e-5)
        assert mine.token_accuracy == pytest.approx(wanted.token_accuracy, abs=1e-5)
        assert mine.calibration_error == pytest.approx(wanted.calibration_error, abs=1e-5)
        assert mine.difference_to.keys() == wanted.difference_to.keys()
        for other, difference in mine.difference_to.items():
            for end in ("value", "low", "high"):
                theirs = getattr(wanted.difference_to[other], end)
                assert getattr(difference, end) == pytest.approx(theirs, abs=1e-5)
        assert mine.serving is not None
        assert mine.serving.ranks == ranks, "it was not scored again"
        assert (mine.dtype, mine.parameters, mine.tokens) == (
            wanted.dtype,
            wanted.parameters,
            wanted.tokens,
        )


def peaks(watched: Watched) -> list[int]:
    results = [each for each in watched.lines if each.get("event") == "result"]
    results.sort(key=lambda each: each["rank"])
    return [each["data"]["peak_memory_bytes"] for each in results]


@pytest.mark.nightly
def test_no_rank_holds_a_whole_model(watched: Watched, root: Path) -> None:
    save_model(new_model(LARGE, 3), LARGE, root / "large")
    whole = sum(each.stat().st_size for each in (root / "large").glob("*.safetensors"))
    mesh = MeshSettings(shard=2)
    judged(watched, root, 2, mesh, "candidate", few=True)
    before = peaks(watched)
    found, failures, _ = judged(watched, root, 2, mesh, "large", few=True)
    assert not failures
    assert len(found) == 1
    grown = [after - least for after, least in zip(peaks(watched), before, strict=True)]
    log.info("bytes: weights %d, ranks before %s, grown by %s", whole, before, grown)
    assert whole > 200 * MB
    # a half, copies of blocks that are gathered (3.4 MB each), and activations
    assert all(0.4 * whole < each < 0.8 * whole for each in grown)


def steps_of(watched: Watched, attempt: int) -> list[float]:
    """The fractions at which an attempt was with the second of two models."""
    return [
        each["data"]["fraction"]
        for each in watched.lines
        if (each.get("event"), each.get("attempt")) == ("step", attempt)
        and each["data"]["fraction"] >= 0.5
        and "base" in each["data"]["message"]
    ]


def test_a_killed_rank_is_started_again_and_no_step_is_done_twice(
    watched: Watched, root: Path, alone: EvaluationReport
) -> None:
    (root / KILL).touch()
    found, failures, bucket = judged(watched, root, 2, MeshSettings(shard=2), "candidate", "base")
    assert not (root / KILL).exists(), "a rank killed itself"
    assert {each["attempt"] for each in watched.lines if each.get("event") == "started"} == {1, 2}
    assert not failures
    scored = [local_model_digest(root / name) for name in ("candidate", "base")]
    assert [each.subject for each in found] == scored, "the first was not scored again"
    begun, again = ([each for each in steps_of(watched, n) if each > 0.5] for n in (1, 2))
    assert begun[0] not in again, "its row scores were saved"
    assert again[-1] == 1.0
    unbroken, _, _ = judged(watched, root, 2, MeshSettings(shard=2), "base")
    assert (found[1].bits, found[1].facts["calibration"]) == (
        unbroken[0].bits,
        unbroken[0].facts["calibration"],
    ), "to the bit"
    kept = [json.loads(each)["record"] for each in bucket.objects.values()]
    assert len([each for each in kept if not each.get("unfinished")]) == 2
    wanted, mine = alone.score("base"), report_of(root, found, "candidate", "base").score("base")
    assert wanted is not None
    assert mine is not None
    assert mine.bits_per_byte.value == pytest.approx(wanted.bits_per_byte.value, rel=1e-5)


@pytest.mark.nightly
def test_ranks_that_die_again_and_again_are_an_error_and_leave_no_record(
    watched: Watched, root: Path
) -> None:
    def kill(line: dict[str, Any]) -> None:
        if line.get("event") == "started" and line["rank"] == 0:
            os.kill(line["data"]["pid"], signal.SIGKILL)

    watched.on_line = kill
    run = run_of(bucket := Bucket())
    mesh = MeshSettings(shard=2)
    spec = spec_of(root, "base", mesh=mesh)
    try:
        with pytest.raises(WorkerLost, match=r"ranks that score.*killed by signal 9"):
            scores.scored_on_ranks(
                run, spec, gang_of(2, mesh, 0), watched.launcher, deadline_s=300.0
            )
    finally:
        watched.on_line = lambda _: None
    assert not bucket.objects


def test_what_one_rank_cannot_read_fails_for_all_of_them_by_its_name(
    watched: Watched, root: Path
) -> None:
    config = config_for(30_000, 32)
    model = new_model(config, 4)
    save_model(model, config, root / "broken")
    file = max((root / "broken").glob("*.safetensors"))
    damaged = bytearray(file.read_bytes())
    damaged[-4:] = b"\xff\xff\xff\xff"  # NaN, in the part of the second rank alone
    file.write_bytes(damaged)
    found, failures, bucket = judged(watched, root, 2, MeshSettings(shard=2), "broken", "candidate")
    assert "weights are not finite" in failures["broken"]
    assert [each.subject for each in found] == [local_model_digest(root / "candidate")]
    assert len(bucket.objects) == 1
