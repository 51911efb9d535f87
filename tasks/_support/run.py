"""What every stage of one run shares: its id, the installation, the ledger, and who listens.

A stage is idempotent through the ledger: the digest of its inputs names its output. Asking again
for the same inputs returns the recorded output, whichever run produced it, and says so.
"""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.client import CoordinatorClient
from paceline.cluster import Fleet, Node, by_number
from paceline.config import Runtime, load_runtime
from paceline.errors import Conflict, NotReady, PacelineError, TemporaryError
from paceline.manifest import Manifest
from paceline.relay import fetch_allowed_manifest
from paceline.schemas import StageRecord, digest_of, new_run_id, require_run_id
from paceline.storage import ObjectStore

if TYPE_CHECKING:
    from paceline.registry import Registry
    from paceline.tasks._support.job import JobLink

logger = logging.getLogger(__name__)

OUTAGE_S = 60.0  # how long a coordinator may be away before work that is done is given up
RESTART_WAIT_S = 15.0  # the same, where nothing has been done yet: a restart takes seconds
RETRY_S = 1.0
LOCK_WAIT_S = 120.0
LOG_S = 10.0  # between two lines on a stage's progress

Answer = TypeVar("Answer")
Listener = Callable[["StageUpdate"], None]
_listeners: list[Listener] = []
_open_runs: dict[tuple[str, str], Run] = {}
_opening = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class StageUpdate:
    """How far a stage is, to be shown (terminal, progress artifact)."""

    stage: str
    fraction: float  # 0 to 1
    message: str
    done: bool = False
    reused: bool = False
    seconds: float = 0.0


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within the ``with``, call ``listener`` with every StageUpdate of this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def log_stages_to(log: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> Listener:
    """Return a listener that writes a line to ``log`` for each stage that is done."""

    def tell(update: StageUpdate) -> None:
        if update.done:
            how = "already done" if update.reused else f"done in {update.seconds:.1f} s"
            log.info("%s %s: %s", update.stage, how, update.message)

    return tell


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """A stage's output, how long it took, and whether the ledger already had it."""

    stage: str
    output: dict[str, Any]
    seconds: float
    reused: bool | None  # None: a stage that the ledger does not keep, done anew every time


@dataclass(kw_only=True)
class Summary:
    """What the run has shown so far, in the order it happened."""

    stages: list[StageResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Run:
    """One run of a flow over one installation. Not a dataclass: Prefect must not look inside."""

    def __init__(self, runtime: Runtime, run_id: str) -> None:
        self.runtime = runtime
        self.run_id = run_id
        self.summary = Summary()
        self.depth = 0  # how many flows of this run are open in this process
        self.driving: list[str] = []  # deployments under way because of this run
        self.job: JobLink | None = None  # of the training flow that is open
        self.checked: set[str] = set()  # what was found to be trainable
        self._manifests: dict[str, Manifest] = {}
        self._lock = threading.Lock()
        self._registered: set[str] = set()
        self._logged: dict[str, tuple[float, str]] = {}  # stage → when it was logged last, and what

    @classmethod
    def open(cls, state_dir: str | Path | None = None, run_id: str | None = None) -> Run:
        """Return a run on the installation in ``state_dir``; a fresh id where none is given.

        Raises NotReady where nothing runs there, InvalidInput for an id that is not one of ours.
        """
        require_run_id(run_id)
        runtime = load_runtime(state_dir)
        key = (str(runtime.state_dir), run_id or new_run_id())
        with _opening:
            # A flow and its sub-flows run in one process; they share one summary and one client,
            # as long as the installation is still the same one.
            known = _open_runs.get(key)
            if known is None or known.runtime != runtime:
                known = _open_runs[key] = cls(runtime, key[1])
            return known

    def close(self) -> None:
        """Forget this run: who opens its id again gets a summary of its own."""
        key = (self.state_dir, self.run_id)
        with _opening:
            if _open_runs.get(key) is self:
                del _open_runs[key]

    @property
    def state_dir(self) -> str:
        """Return the installation's state directory as flows pass it on."""
        return str(self.runtime.state_dir)

    @property
    def work_dir(self) -> Path:
        """Return this run's own scratch directory, created on first use."""
        path = self.runtime.state_dir / "runs" / self.run_id
        path.mkdir(parents=True, exist_ok=True)
        return path

    @cached_property
    def coordinator(self) -> CoordinatorClient:
        """Return the coordinator's client."""
        return CoordinatorClient.of(self.runtime)

    @cached_property
    def store(self) -> ObjectStore:
        """Return the object store."""
        return ObjectStore.from_runtime(self.runtime)

    @cached_property
    def registry(self) -> Registry:
        """Return the model registry; imports MLflow on first use."""
        from paceline.registry import Registry

        return Registry.from_runtime(self.runtime)

    @cached_property
    def mlflow_run(self) -> str:
        """Return the id of this run's record in MLflow, created where there is none."""
        return self.registry.ensure_run(
            self.run_id, experiment=self.runtime.profile.model.model_id, name=self.run_id
        )

    def fleet(self) -> Fleet:
        """Return a connection to the machines; use it in a ``with``."""
        return Fleet.connect(self.runtime)

    def nodes(self) -> list[str]:
        """Return every node: those with a living agent, and those with a registered worker."""
        alive = {each.worker_id for each in self.coordinator.workers() if each.alive}
        return sorted(alive | self._on_dask(), key=by_number)

    def reachable(self, nodes: Sequence[str]) -> list[str]:
        """Return those of ``nodes`` that Dask reaches; others have a resident agent or nothing."""
        known = self._on_dask()
        return [each for each in nodes if each in known]

    def _on_dask(self) -> set[str]:
        """Return the nodes whose workers were registered at any time of this run: one that is lost
        is an error of what needs it, not a node without a worker."""
        if self.runtime.endpoints.scheduler_address:
            with self.fleet() as fleet:
                self._registered |= {each.worker_id for each in fleet.nodes()}
        return self._registered

    def trainers(self, nodes: list[str]) -> list[Node]:
        """Return those of ``nodes`` that can run processes: with a worker. Raises NotReady."""
        found: list[Node] = []
        if self.runtime.endpoints.scheduler_address:
            with self.fleet() as fleet:
                found = [each for each in fleet.nodes() if each.worker_id in nodes]
        if not found:
            raise NotReady(
                "no node can run a process",
                got=f"no worker on {', '.join(nodes)}",
                wanted="a worker registered with Dask's scheduler",
                where=self.runtime.endpoints.scheduler_address or "no scheduler in the profile",
                do="Start workers on the nodes (`paceline worker`).",
            )
        return found

    def map_nodes(
        self, call: Callable[..., Any], nodes: list[str], *args: Any, timeout_s: float
    ) -> dict[str, Any]:
        """Return the result of ``call`` on each node, or the error that it raised there."""
        if not nodes:
            return {}
        with self.fleet() as fleet:
            return fleet.map_nodes(call, nodes, *args, timeout_s=timeout_s)

    def manifest(self, url: str) -> Manifest:
        """Return the manifest published at ``url``, read once in this run."""
        if url not in self._manifests:
            self._manifests[url] = fetch_allowed_manifest(url, self.runtime, self.store)
        return self._manifests[url]

    def retry(self, call: Callable[[], Answer], away_s: float = OUTAGE_S) -> Answer:
        """Return what ``call`` gives, asking again while a server is away for at most ``away_s``.

        ``call`` must be safe to repeat. What takes hours is not lost to a moment's restart.
        """
        deadline = time.monotonic() + away_s
        while True:
            try:
                return call()
            except TemporaryError as error:
                if time.monotonic() > deadline:
                    raise
                logger.info("asking again in %.0f s: %s", RETRY_S, error)
                time.sleep(RETRY_S)

    @contextmanager
    def lock(self, what: str, deadline_s: float = LOCK_WAIT_S) -> Iterator[None]:
        """Keep every other flow of this installation out of ``what`` meanwhile.

        Raises Conflict past ``deadline_s``. The lock goes with this process, however it ends.
        """
        path = self.runtime.state_dir / "locks" / f"{digest_of(what)[:16]}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + deadline_s
        with path.open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise Conflict(
                            f"another flow holds {what}",
                            wanted=f"free within {deadline_s:.0f} s",
                            where=path,
                            do="Wait for the other run to end, then run this one again.",
                        ) from error
                    time.sleep(0.1)
            yield

    def report(self, stage: str, fraction: float, message: str, **more: Any) -> None:
        """Send how far ``stage`` is to the listeners, and every ``LOG_S`` to the run's log."""
        at, said = self._logged.get(stage, (0.0, ""))
        stands = fraction == 0.0 and message != said  # what the stage waits for
        if not more.get("done") and (stands or time.monotonic() - at >= LOG_S):
            self._logged[stage] = time.monotonic(), message
            logger.info("%s %.0f %%: %s", stage, 100 * fraction, message)
        update = StageUpdate(
            stage=stage, fraction=min(max(fraction, 0.0), 1.0), message=message, **more
        )
        for listener in _listeners:
            listener(update)

    def finish(self, stage: str, began: float, message: str) -> float:
        """Close a stage that is done anew in every run; return its seconds since ``began``."""
        seconds = time.monotonic() - began
        done = StageResult(stage=stage, output={}, seconds=seconds, reused=None)
        with self._lock:
            self.summary.stages.append(done)
        self.report(stage, 1.0, message, done=True, seconds=seconds)
        logger.info("stage %s done in %.1f s run=%s %s", stage, seconds, self.run_id, message)
        return seconds

    def warn(self, line: str) -> None:
        """Keep ``line`` (a lost worker, a restart) for the summary, and log it."""
        logger.warning("%s", line)
        with self._lock:
            self.summary.notes.append(line)

    def stage(
        self,
        name: str,
        inputs: Mapping[str, Any],
        work: Callable[[], dict[str, Any]],
        *,
        still_true: Callable[[dict[str, Any]], bool] = lambda _output: True,
        describe: Callable[[dict[str, Any]], str] = lambda _output: "",
    ) -> StageResult:
        """Return what ``work`` gives for ``inputs``, from the ledger where it is known and
        ``still_true`` agrees; else do it and record it.

        ``work`` must be safe to repeat: a crash between it and the record runs it again.
        """
        began = time.monotonic()
        key = digest_of({"stage": name, "inputs": dict(inputs)})
        known = self.retry(lambda: self.coordinator.ledger_get(name, key), RESTART_WAIT_S)
        reused = known is not None and still_true(dict(known.output))
        if known is not None and reused:
            output = dict(known.output)
        else:
            self.report(name, 0.0, "started")
            output = work()
            record = StageRecord.of(name, key, output, self.run_id, time.monotonic() - began)
            self.retry(lambda: self.coordinator.ledger_put(record))
        result = StageResult(
            stage=name, output=output, seconds=time.monotonic() - began, reused=reused
        )
        with self._lock:
            self.summary.stages.append(result)
        message = describe(output)
        self.report(name, 1.0, message, done=True, reused=reused, seconds=result.seconds)
        logger.info(
            "stage %s %s in %.1f s run=%s %s",
            name,
            "already done" if reused else "done",
            result.seconds,
            self.run_id,
            message,
        )
        return result


def explain(error: BaseException) -> str:
    """Return ``error`` on one line, ours with all its parts, others with their type."""
    if isinstance(error, PacelineError):
        return error.one_line()
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
