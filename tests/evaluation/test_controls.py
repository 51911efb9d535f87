"""Training that taught nothing is refused: zero steps, shuffled labels, random bytes, NaN."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.config import EvaluationSettings, GateSettings
from paceline.evaluation import (
    HeldOutDocument,
    as_frame,
    as_markdown,
    choose_prefixes,
    decide,
    plot_report,
    score_models,
    score_transformer,
    windows,
)
from paceline.models import config_for, load_model, new_model, read_index, save_model
from paceline.schemas import EvaluationReport, RecordedScore
from tests.evaluation.reports import CLEAN, LINEAGE, SNAPSHOT, passing

pytestmark = pytest.mark.xdist_group("controls")  # one worker trains the models
CONTEXT = 32
SETTINGS = EvaluationSettings(held_out_bytes=8192, bootstrap_samples=200, ngram_order=3)


def texts() -> tuple[list[tuple[str, bytes]], list[bytes]]:
    """Return (held-out documents, train documents) from the running Python's library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py"))[:40]
    read = [(path.name, path.read_bytes()[:10_000]) for path in files]
    return read[::5], [text for number, (_, text) in enumerate(read) if number % 5]


def train(start: Path, out: Path, data: bytes, *, steps: int, shuffled: bool = False) -> Path:
    model, config = load_model(start)
    stream = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    random = torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        starts = torch.randint(len(stream) - CONTEXT - 1, (24,), generator=random)
        rows_BT = torch.stack([stream[at : at + CONTEXT + 1] for at in starts.tolist()])
        wanted = rows_BT[:, 1:].flatten()
        if shuffled:
            wanted = wanted[torch.randperm(len(wanted), generator=random)]
        loss = F.cross_entropy(model(rows_BT[:, :-1]).flatten(0, 1), wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save_model(model, config, out)
    return out


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EvaluationReport]:
    """Reports on candidates that learned and on controls that did not, over one base."""
    root = tmp_path_factory.mktemp("controls")
    held_out, documents = texts()
    data = b"\xff".join(documents)
    noise = np.random.default_rng(0).integers(0, 256, len(data), dtype=np.uint8).tobytes()
    config = config_for(20_000, CONTEXT)
    save_model(new_model(config, 0), config, root / "fresh")
    base = train(root / "fresh", root / "base", data, steps=60)
    candidates = {
        "taught": train(base, root / "taught", data, steps=120),
        "zero steps": train(base, root / "zero", data, steps=0),
        "shuffled labels": train(base, root / "shuffled", data, steps=40, shuffled=True),
        "random bytes": train(base, root / "noise", noise, steps=40),
        "not finite": poisoned(base, root / "nan"),
        "pickled": pickled(base, root / "pickled"),
    }
    seen: list[float] = []
    known: list[RecordedScore] = []  # base and baselines are scored once

    def keep(subject: str, bits_D: Any, facts: Any) -> None:
        bits = tuple(bits_D.tolist())
        its = {"held_out_bytes": 1, "scorer": "", "run_id": "", "facts": facts}
        score = RecordedScore(subject=subject, snapshot_digest=SNAPSHOT, bits=bits, **its)
        known.append(RecordedScore.model_validate_json(score.model_dump_json()))

    reports = {
        name: score_models(
            {"candidate": path, "base": base, "champion": base},
            choose_prefixes(held_out, SETTINGS.held_out_bytes),
            lambda: documents,
            SETTINGS,
            snapshot_digest=SNAPSHOT,
            on_progress=lambda fraction, _message: seen.append(fraction),
            known=known,
            on_scored=keep,
        )
        for name, path in candidates.items()
    }
    assert min(seen) == 0
    assert max(seen) <= 1
    return reports


def poisoned(start: Path, out: Path) -> Path:
    model, config = load_model(start)
    save_model(model, config, out)
    file = out / read_index(out)["model.norm.weight"]
    raw = bytearray(file.read_bytes())
    raw[-4:] = b"\x00\x00\xc0\x7f"  # NaN, as a poisoned export would hold it
    file.write_bytes(raw)
    return out


def pickled(start: Path, out: Path) -> Path:
    model, config = load_model(start)
    save_model(model, config, out)
    (out / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return out


def reasons(report: EvaluationReport) -> list[str]:
    # what beats a model of this size is not tested
    settings = GateSettings(except_baselines=("ngram", "gzip", "xz"))
    candidate = report.score("candidate")
    lineage = LINEAGE | {"weights_digest": candidate.weights_digest if candidate else "c" * 64}
    compared = report.model_copy(update={"overlaps": (CLEAN,)})
    return decide(compared, settings, champion=None, lineage=lineage).reasons


def test_a_candidate_that_learned_passes(judged: dict[str, EvaluationReport]) -> None:
    assert reasons(judged["taught"]) == []
    found = judged["taught"].score("candidate")
    assert found is not None
    assert found.dtype == "float32" and found.format == "safetensors"
    assert found.difference_to["gzip"].value != 0


def test_zero_steps_are_refused(judged: dict[str, EvaluationReport]) -> None:
    found = judged["zero steps"].score("candidate")
    assert found is not None
    assert found.difference_to["base"].high == 0.0  # the same bytes, scored once
    assert reasons(judged["zero steps"]) == [
        "better than base: got the same weights, wanted the whole interval below 0"
    ]


@pytest.mark.parametrize("control", ["shuffled labels", "random bytes"])
def test_a_control_is_refused(judged: dict[str, EvaluationReport], control: str) -> None:
    found = judged[control].score("candidate")
    assert found is not None
    assert found.difference_to["base"].low > 0, "it got worse, and the interval says so"
    assert any(each.startswith("better than base") for each in reasons(judged[control]))


def test_nan_and_pickles_are_refused_by_name(judged: dict[str, EvaluationReport]) -> None:
    assert "not finite" in reasons(judged["not finite"])[0]
    assert "not safetensors" in reasons(judged["pickled"])[0]
    assert judged["pickled"].score("base") is not None


def test_every_model_saw_the_same_bytes(judged: dict[str, EvaluationReport]) -> None:
    ((scored, documents),) = {(each.bytes, each.documents) for each in judged.values()}
    assert documents == 8
    assert SETTINGS.held_out_bytes - 16 <= scored <= SETTINGS.held_out_bytes


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, 56, 57, 1000])
def test_windows_score_each_byte_once_with_context(length: int) -> None:
    scored = [at for each in windows(length, CONTEXT) for at in range(each.fresh, each.end)]
    assert scored == list(range(length))
    for each in windows(length, CONTEXT):
        assert each.end - each.start <= CONTEXT
        assert each.fresh == each.start == 0 or each.fresh - each.start >= CONTEXT // 4


def test_bits_are_those_of_one_plain_pass(tmp_path: Path) -> None:
    config = config_for(20_000, CONTEXT)
    model = new_model(config, 3)
    save_model(model, config, tmp_path)
    documents = [b"import os", b"x", bytes(range(32))]
    scored = score_transformer(
        tmp_path,
        [HeldOutDocument("", each, len(each)) for each in documents],
        lambda _fraction: None,
    )
    found, cost = scored.bits, scored.serving
    assert (cost.machine, cost.batch, cost.context) == (platform.node(), 1, CONTEXT)
    assert cost.cpu and cost.prefill_ms == scored.latency_ms > 0 < cost.decode_ms_per_token
    assert cost.throughput_rows == 8 and (cost.tokens_per_second or 0) > 0
    assert cost.peak_memory_bytes is None or cost.peak_memory_bytes > 50_000_000  # torch alone
    for text, bits in zip(documents, found, strict=True):
        tokens = torch.tensor([[config.separator, *text[:-1]]])
        with torch.no_grad():
            nats = F.cross_entropy(model(tokens)[0], torch.tensor(list(text)), reduction="sum")
        assert bits == pytest.approx(nats.item() / np.log(2), rel=1e-5)


def test_a_report_reads_as_table_page_and_picture(
    judged: dict[str, EvaluationReport], tmp_path: Path
) -> None:
    report = judged["taught"]
    frame = as_frame(report)
    assert frame["bits_per_byte.value"].is_monotonic_increasing
    assert frame.loc["candidate", "difference_to.base.high"] < 0
    page = as_markdown(report)
    assert "| candidate − base |" in page and "better |" in page and "| worst document:" in page
    assert "not finite" in as_markdown(judged["not finite"])
    picture = plot_report(report, tmp_path / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    bare = passing().model_copy(update={"slices": ()})
    plot_report(bare, tmp_path / "bare.png")
