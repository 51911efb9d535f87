"""A user's transform on real ranks: samples that hang, raise, end their process or come back as
rubbish are named by shard and row, counted, and passed over, or the job stops with the name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.data import ShardCache
from paceline.errors import DataRejected
from paceline.profile import SecuritySettings, save_runtime
from paceline.training import LocalLauncher, run_job
from paceline.training.account import HOPELESS
from paceline.wire.training import TrainJob
from tests.training.conftest import SETTINGS, Camp

MODULE = "tests.data.transforms"
WHY = {
    "0.txt": "did not end within 2 s",
    "1.txt": "KeyError: 'nothing there'",
    "6.txt": "ended its process, twice: exit code 3",
    "3.txt": "its transform failed",
}


@pytest.fixture
def trusting(camp: Camp) -> Iterator[None]:
    security = SecuritySettings(code_sources=(MODULE,))
    profile = camp.runtime.profile.model_copy(update={"security": security})
    save_runtime(camp.runtime.model_copy(update={"profile": profile}))
    yield
    save_runtime(camp.runtime)


def job_with(camp: Camp, name: str, processes: int) -> TrainJob:
    data = {
        "batching": "packed",
        "transform": f"{MODULE}:{'mixed' if processes else 'stuck'}",
        "transform_processes": processes,
        "transform_deadline_s": 2.0,
    }
    return camp.job(name, ranks=2, data=data)


def places(camp: Camp) -> dict[str, str]:
    """The shard and row of each bad sample that is trained on, by its key."""
    found = {}
    with ShardCache(camp.snapshot, camp.store, camp.runtime.state_dir / "looked-at") as cache:
        for shard in camp.snapshot.of_split("train"):
            with cache.samples(shard) as samples:
                for row in range(len(samples)):
                    if samples.key(row) in WHY:
                        found[samples.key(row)] = f"{shard.sha256}#{row}"
    return found


@pytest.mark.usefixtures("trusting")
def test_bad_samples_are_named_counted_and_passed_over(camp: Camp) -> None:
    at = places(camp)
    assert {"0.txt", "6.txt"} <= at.keys(), "or nothing is shown"
    with LocalLauncher() as launcher:
        result = run_job(job_with(camp, "transforms-apart", 1), camp.nodes, launcher)
        assert (result.steps, result.restarts) == (SETTINGS.steps, ()), "nobody was stopped"
        assert set(result.quarantined_shards) == set(at.values())
        for key, name in at.items():
            assert WHY[key] in result.quarantined_why[name]
        assert result.failures.shards == dict.fromkeys(at.values(), 1)
        (line,) = [each for each in result.passed_over if WHY["6.txt"] in each]
        assert line.startswith(at["6.txt"][:12])


@pytest.mark.usefixtures("trusting")
def test_on_a_thread_one_that_hangs_stops_the_rank_which_says_where(camp: Camp) -> None:
    with pytest.raises(DataRejected, match="a transform hangs") as caught:
        camp.run_alone(job_with(camp, "transforms-here", 0))
    assert caught.value.where == places(camp)["0.txt"]
    assert caught.value.code in HOPELESS, "so that the job stops, too"
