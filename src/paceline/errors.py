"""Every error Paceline raises, in one tree.

A message says what went wrong, then what was *got*, what was *wanted*, *where*, and what to *do*.
Adapters translate third-party errors into these and chain them with ``from``.

PacelineError
├── TemporaryError                  try again: the same call may work later
│   ├── ServiceUnavailable          a server (S3, coordinator, Prefect, MLflow) does not answer
│   │   └── NotLeading              another replica of the coordinator decides, or none does now
│   ├── TooManyCalls                a caller used up its allowance for now
│   ├── NotReady                    a process was started and missed its readiness deadline
│   ├── PeerLost                    a peer closed, reset or went silent
│   └── WorkerLost                  an agent, Dask worker or rank died
└── PermanentError                  will not work until somebody changes something
    ├── InvalidInput                a caller's value is not acceptable
    │   ├── InvalidProfile
    │   ├── InvalidManifest
    │   │   └── UntrustedManifest   unsigned, or signed by nobody this installation trusts
    │   ├── InvalidPlan
    │   ├── InvalidSnapshot
    │   └── InvalidFrame            bytes on the peer port that are not our protocol
    ├── AccessDenied                credentials missing or refused
    ├── NotFound
    │   └── SourceMissing           bucket, object or path does not exist
    ├── Conflict                    an idempotency key, id or lock is taken by something else
    │   ├── StateLocked             another supervisor owns the state directory
    │   └── StaleEpoch              a writer of an older epoch or incarnation
    ├── PortInUse
    ├── StorageFull
    ├── StorageFailed               a disk refuses to keep bytes (EIO); they are discarded
    ├── CorruptData                 bytes do not match their digest
    │   └── SourceChanged           the source object was replaced while it was read
    ├── OriginBudgetExceeded        the origin fuse: more source bytes than the plan allows
    ├── DeploymentFailed
    ├── Cancelled
    ├── DataRejected                a data snapshot failed its validation
    ├── TrainingFailed
    │   └── NotSaved                a state could not be kept as a checkpoint
    ├── GateRefused                 a candidate did not earn promotion
    ├── NotReproducible             what a training depended on is not here as it was
    └── MissingTool                 a program that must be installed is not there
"""

from __future__ import annotations

from paceline.text import printable


class PacelineError(Exception):
    """Root of every error that Paceline raises on purpose."""

    exit_code: int = 1

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        wanted: object = None,
        where: object = None,
        do: str | None = None,
    ) -> None:
        self.what = what
        self.got = got
        self.wanted = wanted
        self.where = where
        self.do = do
        super().__init__(self.one_line())

    def one_line(self) -> str:
        """Return the whole message on one line: what, got, wanted, where, what to do.

        Each part is bounded and printable: peers, servers and files supply some of them.
        """
        parts = [_shown(self.what)]
        details = [
            f"{label} {_shown(value)}"
            for label, value in (("got", self.got), ("wanted", self.wanted), ("at", self.where))
            if value is not None
        ]
        if details:
            parts.append(", ".join(details))
        line = ": ".join(parts)
        return f"{line}. {_shown(self.do)}" if self.do else line

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross Dask and process borders; rebuild them with all their fields.
        fields = (self.what, self.got, self.wanted, self.where, self.do)
        return (_rebuild, (type(self), *fields))

    @property
    def code(self) -> str:
        """Return the stable name of this kind of error, as JSON output and REST carry it."""
        return type(self).__name__


def _shown(value: object) -> str:
    return printable(str(value).replace("\r\n", " ").replace("\n", " ").replace("\t", " "))


def _rebuild(
    kind: type[PacelineError], what: str, got: object, wanted: object, where: object, do: str | None
) -> PacelineError:
    return kind(what, got=got, wanted=wanted, where=where, do=do)


def shown(value: object, most: int = 1000) -> str:
    """Return a foreign ``value`` as an error names it: its repr, cut, however deep it is nested."""
    try:
        return repr(value)[:most]
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply"


class TemporaryError(PacelineError):
    """The same call may work later."""

    exit_code = 75  # EX_TEMPFAIL


class ServiceUnavailable(TemporaryError):
    """A server does not answer, or answers that it cannot serve now."""


class TooManyCalls(TemporaryError):
    """A caller used up its allowance for now."""


class NotLeading(ServiceUnavailable):
    """A replica of the coordinator was asked to decide something while it does not lead."""


class NotReady(TemporaryError):
    """A process was started and missed its readiness deadline."""


class PeerLost(TemporaryError):
    """A peer closed its connection, reset it, or went silent past its deadline."""


class WorkerLost(TemporaryError):
    """An agent, a Dask worker or a training rank died."""


class PermanentError(PacelineError):
    """It will not work until somebody changes something."""


class InvalidInput(PermanentError):
    """A caller's value is not acceptable."""

    exit_code = 2


class InvalidProfile(InvalidInput):
    """A profile has an unknown key or a value out of range."""


class InvalidManifest(InvalidInput):
    """A manifest breaks a limit or does not describe one model exactly."""


class UntrustedManifest(InvalidManifest):
    """A manifest's signature is missing, wrong, or nobody's that is trusted here."""


class InvalidPlan(InvalidInput):
    """A plan cannot be made from, or does not cover, the given workers."""


class InvalidSnapshot(InvalidInput):
    """A data snapshot is malformed or labelled for another purpose."""


class InvalidFrame(InvalidInput):
    """Bytes on the peer port are not our protocol or exceed its limits."""


class AccessDenied(PermanentError):
    """Credentials are missing or were refused."""

    exit_code = 77  # EX_NOPERM


class NotFound(PermanentError):
    """The named thing does not exist."""


class SourceMissing(NotFound):
    """A bucket, an object or a path that should be read does not exist."""


class Conflict(PermanentError):
    """The name, key or lock is taken by something else."""


class StateLocked(Conflict):
    """Another supervisor owns the state directory."""


class StaleEpoch(Conflict):
    """A writer of an older epoch or incarnation was refused."""


class PortInUse(PermanentError):
    """A port that was asked for is taken."""


class StorageFull(PermanentError):
    """A disk has no room, or its quota is spent."""


class StorageFailed(PermanentError):
    """A disk refused to keep bytes; what was being written there is discarded."""


class CorruptData(PermanentError):
    """Bytes do not match their digest."""


class SourceChanged(CorruptData):
    """The source object was replaced while it was read."""


class OriginBudgetExceeded(PermanentError):
    """More source bytes would be read than the plan allows."""


class DeploymentFailed(PermanentError):
    """A deployment ended without every needed worker complete."""


class Cancelled(PermanentError):
    """The caller asked to stop."""

    exit_code = 130


class DataRejected(PermanentError):
    """A data snapshot failed its validation."""


class TrainingFailed(PermanentError):
    """A training job used up its restarts or cannot run as asked."""


class NotSaved(TrainingFailed):
    """A training's state could not be kept as a checkpoint; the checkpoints before are intact."""


class GateRefused(PermanentError):
    """A candidate did not earn promotion."""

    exit_code = 3


class NotReproducible(PermanentError):
    """What a training depended on (code, libraries, data, base model) is not here as it was."""

    exit_code = 4


class MissingTool(PermanentError):
    """A program that must be installed is not there."""
