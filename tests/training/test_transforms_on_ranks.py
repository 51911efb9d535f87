"""A user's transform on real ranks: samples that hang, raise, end their process or come back as
rubbish are named by shard and row, counted, and passed over, or the job stops with the name."""

from __future__ import annotations

import pytest

from paceline.data import ShardCache
from paceline.training import LocalLauncher, run_job
from paceline.training.launcher import JobTracker, NodePool
from paceline.training.loop import QuarantineReporter
from tests.training.conftest import SETTINGS, Camp

MODULE = "tests.data.transforms"
WHY = {
    "0.txt": "did not end within 2 s",
    "1.txt": "KeyError: 'nothing there'",
    "6.txt": "ended its process, twice: exit code 3",
    "3.txt": "its transform failed",
}


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


@pytest.mark.xdist_group("gangs")
def test_bad_samples_are_named_counted_and_passed_over(camp: Camp, launcher: LocalLauncher) -> None:
    data = {"batching": "packed", "transform": f"{MODULE}:mixed", "transform_deadline_s": 2.0}
    at = places(camp)
    assert {"0.txt", "6.txt"} <= at.keys(), "or nothing is shown"
    with camp.trusting(MODULE):
        result = run_job(camp.job("transforms-apart", ranks=2, data=data), camp.nodes, launcher)
        assert (result.steps, result.restarts) == (SETTINGS.steps, ()), "nobody was stopped"
        assert set(result.quarantined_shards) == set(at.values())
        for key, name in at.items():
            assert WHY[key] in result.quarantined_why[name]
        assert result.failures.shards == dict.fromkeys(at.values(), 1)
        (line,) = [each for each in result.quarantine_lines if WHY["6.txt"] in each]
        assert line.startswith(at["6.txt"][:12])


def test_each_ranks_quarantine_is_reported_once_and_is_in_the_result(camp: Camp) -> None:
    news, bad = QuarantineReporter(), {"b" * 64: "rotten"}
    assert news.has_new(bad)
    first = news.new_in(bad)
    assert first == {"quarantined_shards": ["b" * 64], "quarantined_why": bad}
    assert not news.has_new(bad) and news.new_in(bad) == {}
    bad["a" * 64 + "#7"] = "it raised"
    assert news.new_in(bad)["quarantined_why"] == {"a" * 64 + "#7": "it raised"}
    assert QuarantineReporter().new_in({"c" * 64}) == {
        "quarantined_shards": ["c" * 64],
        "quarantined_why": {},
    }

    account = JobTracker(camp.job("told"), 0.0)
    account.begin(1, 2)
    event = {"event": "step", "rank": 1, "attempt": 1, "step": 3, "data": first}
    account.on_line(event, 1.0)
    account.on_line({**event, "rank": 0, "step": 4, "data": {}}, 2.0)
    done = {
        "steps": 4, "first_loss": 1.0, "final_loss": 1.0, "tokens_per_second": 1.0,
        "data_wait_share": 0.0, "checkpoint_stall_share": 0.0, "export_url": "s3://x/y",
        "weights_digest": "0" * 64, "checkpoints": [], "config_digest": "0" * 64,
    }  # fmt: skip
    account.on_line({**event, "event": "result", "rank": 0, "step": 4, "data": done}, 3.0)
    result = account.result(4.0, NodePool(["node-0"], SETTINGS), 2)
    assert result.quarantined_shards == ("b" * 64,)
    assert result.quarantine_lines == ["b" * 12 + ": rotten"]
