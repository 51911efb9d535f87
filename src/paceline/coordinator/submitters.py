"""Who submitted a run, as the ledger has it, and whether a run is the caller's.

The coordinator alone writes these records. They say who may go on with a run, look at its flows and
cancel them, and who may not approve what it made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock

from paceline.coordinator.callers import current_caller, may_see, sees
from paceline.coordinator.coordinator import Coordinator
from paceline.errors import AccessDenied, PermanentError, ServiceUnavailable
from paceline.schemas import OF_TEAM, SUBMITTERS, StageRecord, TrainingJob, digest_of

Jobs = Callable[[], Iterable[TrainingJob]]
LOCK_WAIT_S = 5.0
# A record is read, changed and written under the lock of its run; runs share a few locks.
_LOCKS = tuple(RLock() for _ in range(64))


def submitters(coordinator: Coordinator, run_id: str) -> dict[str, str]:
    """Return the tokens (id → name) that submitted ``run_id``."""
    return _tokens(_submission(coordinator, run_id))


def is_submitter(coordinator: Coordinator, run_id: str) -> bool:
    """Return whether the caller submitted ``run_id``, with this token or another of its name."""
    who, caller = submitters(coordinator, run_id), current_caller()
    return caller.token_id in who or caller.name in who.values()


def is_own_run(coordinator: Coordinator, jobs: Jobs, run_id: str) -> bool | None:
    """Return whether ``run_id`` is the caller's: every run for a token that is bound to no team or
    project, else what a token of its team and project submitted. None: nothing says whose it is.

    Of a run that no token submitted over REST, or one whose record has ended, ``jobs`` say it.
    """
    caller = current_caller()
    if not caller.is_bound:
        return True
    who = submitters(coordinator, run_id)
    if caller.token_id in who:
        return True
    if known := [each for each in map(coordinator.tokens.find, who) if each is not None]:
        return any(sees(caller, each.team, each.project) for each in known)
    own_jobs = _has_own_jobs(jobs, run_id)
    return False if who and own_jobs is None else own_jobs


def is_anothers_run(coordinator: Coordinator, jobs: Jobs, run_id: str) -> bool:
    """Return whether a token of another team or project than the caller's submitted ``run_id``, or
    has its jobs. What an unbound token or a command started for no team is everybody's."""
    if is_own_run(coordinator, jobs, run_id):
        return False
    known = map(coordinator.tokens.find, submitters(coordinator, run_id))
    bound = any(each.team or each.project for each in known if each is not None)
    own_jobs = _has_own_jobs(jobs, run_id)
    return own_jobs is False or (bound and own_jobs is None)


def _has_own_jobs(jobs: Jobs, run_id: str) -> bool | None:
    """Return whether every job of ``run_id`` is one that the caller sees; None without jobs."""
    found = [may_see(each.spec.team, each.spec.project) for each in jobs() if each.run_id == run_id]
    return all(found) if found else None


@contextmanager
def submitting(
    coordinator: Coordinator, jobs: Jobs, run_id: str, is_new: Callable[[], bool]
) -> Iterator[None]:
    """Record the caller as one of those who submitted ``run_id``, before the ``with`` starts a flow
    of it; taken back where the ``with`` raises PermanentError. (After a TemporaryError the flow may
    have started.)

    ``is_new``: whether a run of which nothing is recorded has no flow. Raises AccessDenied for a
    run that is not the caller's.
    """
    with _locked(run_id):
        own = is_own_run(coordinator, jobs, run_id)
        if not (is_new() if own is None else own):
            raise AccessDenied(
                "the run is another's",
                got=run_id,
                wanted="a new run id, or a run that a token of the same team and project submitted",
            )
        before = _submission(coordinator, run_id)
        note_submitter(coordinator, run_id)
        try:
            yield
        except PermanentError:
            if current_caller().token_id not in _tokens(before):
                _keep(coordinator, run_id, before)
            raise


def note_submitter(coordinator: Coordinator, run_id: str, *, unless_known: bool = False) -> None:
    """Record the caller as one of those who submitted ``run_id``, and whether one is of a team."""
    with _locked(run_id):
        kept, caller = _submission(coordinator, run_id), current_caller()
        known = _tokens(kept)
        if caller.token_id not in known and not (known and unless_known):
            of_team = caller.is_bound or bool(kept.get(OF_TEAM))
            names = known | {caller.token_id: caller.name}
            _keep(coordinator, run_id, {"tokens": names, OF_TEAM: of_team})


@contextmanager
def _locked(run_id: str) -> Iterator[None]:
    lock = _LOCKS[hash(run_id) % len(_LOCKS)]
    if not lock.acquire(timeout=LOCK_WAIT_S):
        raise ServiceUnavailable("another flow of this run is being started", where=run_id)
    try:
        yield
    finally:
        lock.release()


def _tokens(kept: Mapping[str, object]) -> dict[str, str]:
    tokens = kept["tokens"]
    assert isinstance(tokens, dict)  # only this module writes it
    return tokens


def _submission(coordinator: Coordinator, run_id: str) -> Mapping[str, object]:
    record = coordinator.stage(SUBMITTERS, digest_of(run_id))
    return {"tokens": {}} if record is None else record.output


def _keep(coordinator: Coordinator, run_id: str, output: Mapping[str, object]) -> None:
    coordinator.save_stage(StageRecord.of(SUBMITTERS, digest_of(run_id), dict(output), run_id))
