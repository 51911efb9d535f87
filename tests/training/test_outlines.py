"""Ranks that share outlines of groups through the job's own objects."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import DataSettings
from paceline.data import Batch, ShardCache
from paceline.training.loop.rank_setup import stream_of
from tests.training.conftest import Camp

READERS = 3


def test_ranks_share_outlines_below_the_jobs_checkpoints_where_it_is_worth_it(
    camp: Camp, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataSettings.model_validate({"batching": "packed", "columns": 3})
    job = camp.job("outlined", ranks=READERS).model_copy(update={"data": data})
    url = f"{job.checkpoint_url}/{job.job_id}/outlines"
    cache = ShardCache(camp.snapshot, camp.store, camp.runtime.state_dir / "cache-of-outlines")

    def read(rank: int) -> list[Batch]:
        its: Any = SimpleNamespace(
            job=job, snapshot=camp.snapshot, cache=cache, store=camp.store, context=32
        )
        mesh: Any = SimpleNamespace(data_rank=rank, data_world=READERS)
        with stream_of(its, mesh, None) as stream:
            return [stream.next() for _ in range(60)]

    def all_ranks() -> list[list[Any]]:
        with ThreadPoolExecutor(READERS) as pool:
            shares = list(pool.map(read, range(READERS)))
        return [
            [(each.inputs_BT.tolist(), each.global_tokens) for each in share] for share in shares
        ]

    alone = all_ranks()
    assert not camp.store.list(url), "three readers read all lengths as well"
    monkeypatch.setattr("paceline.data.loading.columns.SHARING_READERS", READERS)
    assert all_ranks() == alone
    left = camp.store.list(url)
    assert 0 < len(left) <= READERS, "each reader keeps its last one"
    assert {each.url.rsplit(".", 1)[1] for each in left} == {"outline"}
