"""Stages of one run side by side: the first that fails ends the others, and is what people read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from prefect import Task
from prefect.exceptions import UnfinishedRun
from prefect.futures import PrefectFuture

from paceline.tasks._support.run import Run

R = TypeVar("R")


class Beside:
    """Submits stages that run while the flow goes on."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._futures: list[PrefectFuture[Any]] = []

    def submit(self, stage: Task[Any, R], *args: Any) -> PrefectFuture[R]:
        """Start ``stage`` with the run and ``args``; it waits for those that are futures."""
        future: PrefectFuture[R] = stage.submit(self._run, *args)
        self._futures.append(future)
        future.add_done_callback(self._ended)
        return future

    def wait(self) -> None:
        """Return once all have ended well; raises the error of the first that has not."""
        for each in self._futures:
            each.result()

    def wait_for_end(self) -> None:
        """Return once all have ended; ``Run.stop_if_ended`` raises where one has not ended well."""
        for each in self._futures:
            self._ended(each)

    def _ended(self, future: PrefectFuture[Any]) -> None:
        try:
            future.result()
        except UnfinishedRun:
            pass  # what it waited for has failed
        except Exception as error:  # noqa: BLE001 - of another thread; ``beside`` raises it
            self._run.end(error)


@contextmanager
def beside(run: Run) -> Iterator[Beside]:
    """Yield what submits stages that run beside the body.

    Once all have ended it raises what failed first, in the body or beside it: a relay and a
    snapshot's build look at ``Run.stop_if_ended`` and end as cancelled.
    """
    run.beside = made = Beside(run)
    try:
        yield made
        made.wait()
    except Exception as error:  # noqa: BLE001 - the first one is raised
        run.end(error)
        made.wait_for_end()
        assert run.ended_by is not None
        raise run.ended_by from run.ended_by.__cause__
    except BaseException as error:
        run.end(error)  # a signal: Prefect waits for what was submitted
        raise
    finally:
        run.beside = None
