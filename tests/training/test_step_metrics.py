"""Figures of a rank: stragglers, alerts, operations, traces, and what the meter makes of a step."""

from __future__ import annotations

import json
import os
import platform
import random
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from paceline.config import DataSettings, TrainingSettings
from paceline.data.loading import tokens_seen
from paceline.errors import AccessDenied, PacelineError, ServiceUnavailable
from paceline.models import ModelShape, config_for, new_model
from paceline.storage import DiskStore
from paceline.training.loop import Group, StepReport
from paceline.training.metrics import (
    AlertChange,
    Alerts,
    Exporter,
    ForwardTimer,
    RankMetrics,
    StepMetrics,
    Straggler,
    Tracer,
    TraceUploader,
    Utilisation,
    matmul_peak,
    memory,
    stragglers,
)

CPU = torch.device("cpu")


def gang(ranks: int, steps: int = 20, slow: dict[int, float] | None = None) -> list[list[float]]:
    draw = random.Random(1)
    return [
        [0.1 * draw.uniform(0.95, 1.05) * (slow or {}).get(rank, 1.0) for rank in range(ranks)]
        for _ in range(steps)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 8, 1000])
def test_the_slow_rank_is_named_and_nobody_else(ranks: int) -> None:
    (found,) = stragglers(gang(ranks, slow={1: 2.0}))
    assert found.rank == 1
    assert found.factor == pytest.approx(2.0, rel=0.1)
    assert stragglers(gang(ranks)) == []


def test_stragglers_come_slowest_first_and_few_steps_name_nobody() -> None:
    found = stragglers(gang(8, slow={3: 2.0, 5: 4.0}))
    assert [each.rank for each in found] == [5, 3]
    assert stragglers(gang(8, steps=9, slow={3: 9.0})) == []
    assert stragglers(gang(1, slow={0: 9.0})) == []


def test_one_slow_step_makes_no_straggler() -> None:
    steps = gang(4)
    steps[7][2] = 60.0
    assert stragglers(steps) == []


def test_an_alert_needs_five_minutes_without_a_break_and_is_told_once() -> None:
    alerts = Alerts()
    told = [
        change
        for second in range(0, 400, 10)
        for change in alerts.update({"utilisation": 0.5}, float(second))
    ]
    assert [(each.name, each.raised) for each in told] == [("low-utilisation", True)]
    assert "50%" in told[0].message
    assert alerts.raised == ("low-utilisation",)
    assert alerts.update({"utilisation": 0.9}, 400.0) == []
    (cleared,) = alerts.update({"utilisation": 0.9}, 431.0)
    assert not cleared.raised
    assert alerts.raised == ()


def test_a_good_moment_starts_the_five_minutes_anew() -> None:
    alerts = Alerts()
    for second in range(0, 2000, 10):
        share = 0.9 if second % 290 == 0 else 0.5
        assert alerts.update({"utilisation": share}, float(second)) == []


@pytest.mark.parametrize(
    ("figure", "good", "bad", "name"),
    [
        ("data_wait_share", 0.01, 0.3, "data-starvation"),
        ("checkpoint_stall_share", 0.03, 0.05, "slow-checkpoints"),
        ("reduce_bytes_per_second", 1e9, 1e8, "slow-all-reduce"),
    ],
)
def test_each_alert_has_its_figure(figure: str, good: float, bad: float, name: str) -> None:
    alerts = Alerts()
    for second in range(100):
        assert alerts.update({figure: good}, float(second)) == []
    told = [each for second in range(100, 170) for each in alerts.update({figure: bad}, second)]
    assert [each.name for each in told] == [name]
    assert alerts.update({}, 1000.0) == [], "a figure that is missing says nothing"
    assert alerts.raised == (name,)


def test_operations_are_those_that_torch_counts() -> None:
    config = config_for(50_000, 32)
    model = new_model(config, 0)
    # It knows the attention of GPUs and the plain one, not the CPU's own kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 32, dtype=torch.int64)).sum().backward()
    counted = counter.get_total_flops() / (2 * 32)
    shape = ModelShape.of(config)
    assert shape.flops_per_token() == pytest.approx(counted, rel=1e-6)
    assert shape.flops_per_token(64) > shape.flops_per_token(32)


def test_attention_that_documents_apart_do_not_need_is_no_work() -> None:
    config, shard = config_for(50_000, 32), SimpleNamespace(samples=10, stream_bytes=71)
    seen = {
        batching: tokens_seen(DataSettings(batching=batching), [shard, shard], 32)
        for batching in ("windows", "packed", "bucketed", "carried")
    }
    assert seen == {"windows": 32, "packed": 8, "bucketed": 8, "carried": 32}
    parallel = SimpleNamespace(modules=(), bytes_reduced=0)
    found = StepMetrics.of(TrainingSettings(), parallel, Group(), CPU, config=config, seen=8)
    shape = ModelShape.of(config)
    assert found.flops_per_token == shape.flops_per_token(8) < shape.flops_per_token()


def test_the_peak_is_measured_once_and_leaves_the_threads_alone() -> None:
    before = torch.get_num_threads()
    first = matmul_peak("cpu", torch.float32, before + 1)
    assert first > 1e8
    assert matmul_peak("cpu", torch.float32, before + 1) is first
    assert torch.get_num_threads() == before


def test_busy_counts_training_passes_only() -> None:
    model = torch.nn.Linear(256, 256)
    busy = ForwardTimer([model], CPU)
    model(torch.zeros(64, 256))
    assert busy.take() > 0
    assert busy.take() == 0
    model.eval()
    model(torch.zeros(64, 256))
    assert busy.take() == 0
    model.train()
    busy.close()
    model(torch.zeros(64, 256))
    assert busy.take() == 0


def test_memory_and_utilisation_of_this_process() -> None:
    utilisation = Utilisation(CPU, threads=1)
    assert sum(range(1_000_000)) > 0
    share = utilisation.take()
    assert share is not None
    assert 0 < share <= 1
    assert memory(CPU)["rss_peak_bytes"] > 50e6


def test_a_trace_is_written_for_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    told: list[tuple[int, Path]] = []
    tracer = Tracer([2], tmp_path, 3, lambda step, path: told.append((step, path)))
    for step in (1, 2, 3):
        tracer.begin(step)
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        tracer.end(step)
    ((step, path),) = told
    assert (step, path.name) == (2, "trace-step-2-rank-3.json")
    names = {each.get("name") for each in json.loads(path.read_text())["traceEvents"]}
    assert "aten::mm" in names
    tracer = Tracer([1], tmp_path, 0, lambda step, path: told.append((step, path)))
    tracer.begin(1)
    tracer.close()
    assert len(told) == 1, "a step that did not end has no trace"


def test_a_trace_that_cannot_be_made_or_taken_costs_itself_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    tracer = Tracer([1, 3], tmp_path / "file" / "below", 0, lambda *_: None)
    other = Tracer([3], tmp_path, 1, lambda *_: None)
    tracer.begin(1)
    tracer.begin(1)  # what was pushed too late is computed again
    tracer.end(1)
    assert "no trace of step 1" in caplog.text
    other.begin(3)
    other.end(3)
    assert (tmp_path / "trace-step-3-rank-1.json").exists(), "the profiler is free again"


def test_a_trace_is_made_of_the_next_step_whenever_it_is_asked_for(tmp_path: Path) -> None:
    told: list[int] = []
    request = tmp_path / "trace"
    request.touch()  # by somebody who looked at an earlier attempt
    tracer = Tracer([], tmp_path, 0, lambda step, _: told.append(step), request=request)
    for step in range(1, 7):
        if step in (3, 5):
            os.utime(request, ns=(step, step))
        tracer.begin(step)
        tracer.end(step)
    assert told == [3, 5]
    request.unlink()
    tracer.begin(7)
    tracer.end(7)
    assert told == [3, 5], "a request that is taken back asks for nothing"


def test_a_step_becomes_figures() -> None:
    model = torch.nn.Linear(8, 8)
    asked: list[None] = []
    numbers = StepMetrics(
        Group(), [model], CPU, flops_per_token=1e6, peak=lambda: asked.append(None) or 1e9
    )
    for step in range(1, 12):
        numbers.begin(step, 1.0 * step, 0.0)
        model(torch.zeros(4, 8))
        slots = numbers.shared(1.0 * step + 0.5)
        figures = numbers.end(step, 100.0, slots, 1.0 * step + 0.5, 0.25)
    assert len(asked) == 1, "the peak is measured once"
    assert figures["data_wait_s"] == pytest.approx(0.5)
    assert figures["busy_seconds"] >= 0.5
    assert figures["data_wait_share"] / figures["checkpoint_stall_share"] == pytest.approx(2.0)
    rate = figures["tokens_per_second"]
    assert rate == pytest.approx(100.0 / figures["step_seconds"])
    assert figures["mfu"] == pytest.approx(rate * 1e6 / 1e9)
    assert figures.keys() >= {"rss_peak_bytes", "utilisation", "matmul_peak_flops"}
    assert numbers.slow == []
    numbers.close()


def report(**changes: Any) -> StepReport:
    fields: dict[str, Any] = {
        "step": 7, "loss": 2.5, "grad_norm": 0.5, "learning_rate": 1e-3,
    }  # fmt: skip
    fields["figures"] = {"step_seconds": 0.5, "tokens_per_second": 200.0}
    fields["figures"] |= changes.pop("figures", {})
    return StepReport(**(fields | changes))


def test_prometheus_reads_a_rank_and_finds_it_by_its_file(tmp_path: Path) -> None:
    killed = {"labels": {"__tmp_pid": str(2**30), "__tmp_host": platform.node()}}
    elsewhere = {"labels": {"__tmp_pid": str(2**30), "__tmp_host": "another-host"}}
    for name, entry in (("job-0-0", killed), ("job-0-1", elsewhere)):
        (tmp_path / f"{name}.json").write_text(json.dumps([entry]))
    labels = {"job_id": "job-1", "rank": "0"}
    with Exporter(labels, tmp_path, step_deadline_s=60.0) as exporter:
        assert not (tmp_path / "job-0-0.json").exists(), "a killed rank's goes with the next one"
        (tmp_path / "job-0-1.json").unlink()
        exporter.take(report(figures={"mfu": 0.4, "utilisation": 0.9}))
        change = AlertChange("data-starvation", True, 0.5, "starves")
        slow = (Straggler(2, 0.3, 0.1),)
        exporter.take(report(step=8, applied=False, alerts=(change,), slow=slow), quarantined=2)
        (entry,) = json.loads((tmp_path / "job-1-0.json").read_text())
        shown = {name: each for name, each in entry["labels"].items() if not name.startswith("__")}
        assert shown == labels, "what begins with __ never becomes a label of a series"
        with urllib.request.urlopen(f"http://{entry['targets'][0]}/metrics", timeout=10) as page:
            families = {
                each.name: each for each in text_string_to_metric_families(page.read().decode())
            }

    def value(name: str) -> float:
        (sample,) = families[f"paceline_training_{name}"].samples
        assert sample.labels.items() >= labels.items()
        return sample.value

    assert value("step") == 8
    assert value("steps") == 2
    assert value("steps_skipped") == 1
    assert value("tokens") == 200
    assert value("mfu_ratio") == 0.4, "figures that are not in a report stay"
    assert value("loss_nats") == 2.5
    assert value("quarantined_shards") == 2
    assert value("step_deadline_seconds") == 60
    assert time.time() - 60 < value("last_step_timestamp_seconds") <= time.time()
    assert value("alert") == 1
    assert value("straggler_factor") == pytest.approx(3.0)
    assert list(tmp_path.iterdir()) == [], "the file goes with the rank"


def test_what_is_the_gangs_comes_from_rank_0_alone() -> None:
    def names(rank: str) -> set[str]:
        metrics = RankMetrics({"job_id": "job-1", "rank": rank})
        metrics.take(report(figures={"mfu": 0.4}))
        return {each.name for each in metrics.collect()}

    gangs = {
        "loss_nats", "gradient_norm", "learning_rate", "tokens", "tokens_per_second",
        "last_checkpoint_timestamp_seconds",
    }  # fmt: skip
    assert names("0") - names("1") == {f"paceline_training_{each}" for each in gangs}
    assert "paceline_training_mfu_ratio" in names("1")


def test_the_age_of_the_last_checkpoint_can_be_read() -> None:
    now = [100.0]
    metrics = RankMetrics({"rank": "0"}, clock=lambda: now[0])

    def shown() -> dict[str, float]:
        return {each.name[18:]: each.samples[0].value for each in metrics.collect() if each.samples}

    now[0] = 130.0
    metrics.take(report())
    assert shown()["last_checkpoint_timestamp_seconds"] == 100.0, "as old as the attempt"
    assert "checkpoint_interval_seconds" not in shown(), "nobody knows yet"
    metrics.saved()
    now[0] = 150.0
    metrics.take(report(), interval_s=25.0)
    assert shown()["last_checkpoint_timestamp_seconds"] == 130.0
    assert shown()["checkpoint_interval_seconds"] == 25.0


def test_a_cleared_alert_is_no_longer_shown() -> None:
    metrics = RankMetrics({"rank": "0"})
    for raised in (True, False):
        change = AlertChange("slow-checkpoints", raised, 0.5, "slow")
        metrics.take(report(alerts=(change,)))
    (alert,) = [each for each in metrics.collect() if each.name.endswith("_alert")]
    assert alert.samples == []


@pytest.mark.parametrize("error", [ServiceUnavailable("S3 is away"), AccessDenied("not yours")])
def test_a_trace_stays_on_the_disk_while_storage_takes_none(
    tmp_path: Path, error: PacelineError
) -> None:
    class Away:
        def upload_file(self, path: Path, url: str) -> None:
            raise error

    path = tmp_path / "trace.json"
    path.write_text("{}")
    TraceUploader(Away(), "s3://bucket/job/traces")(3, path)  # type: ignore[arg-type]
    assert path.exists()
    store = DiskStore()
    url, told = DiskStore.url_of(tmp_path / "store"), []
    TraceUploader(store, url, lambda step, where: told.append((step, where)))(3, path)
    assert told == [(3, f"{url}/trace.json")]
    assert not path.exists()
    assert (tmp_path / "store" / "trace.json").read_text() == "{}"
