"""Every error Paceline raises, in one tree.

A message states what went wrong, then what was *got*, what was *wanted*, *where*, and what to *do*.
Adapters translate third-party errors into these and chain them with ``from``.

PacelineError
├── TemporaryError                  try again: the same call may work later
│   ├── ServiceUnavailable          a server (S3, coordinator, Prefect, MLflow) does not answer
│   │   └── NotLeading              this coordinator replica is not the leader; another is, or none
│   ├── TooManyCalls                a caller exceeded its rate limit
│   ├── NotReady                    a process was started and missed its readiness deadline
│   ├── PeerLost                    a peer closed, reset or stopped responding
│   └── WorkerLost                  an agent, Dask worker or rank died
└── PermanentError                  fails again until the input or the system changes
    ├── InvalidInput                a caller's value is invalid
    │   ├── InvalidProfile
    │   ├── InvalidManifest
    │   │   └── UntrustedManifest   unsigned, or not signed by a trusted publisher
    │   ├── InvalidPlan
    │   ├── InvalidSnapshot
    │   └── InvalidFrame            bytes on the peer port that are not Paceline's protocol
    ├── AccessDenied                credentials missing or refused
    ├── NotFound
    │   └── SourceMissing           bucket, object or path does not exist
    ├── Conflict                    an idempotency key, id or lock is already taken
    │   ├── StateLocked             another supervisor owns the state directory
    │   ├── RunElsewhere            another process does this work, and keeps its record
    │   └── StaleEpoch              a write from an older epoch or incarnation
    ├── PortInUse
    ├── StorageFull
    ├── StorageFailed               a disk write failed (EIO); the bytes are discarded
    ├── CorruptData                 bytes do not match their digest
    │   └── SourceChanged           the source object was replaced while it was read
    ├── OriginBudgetExceeded        more bytes would be read from the source than the plan allows
    ├── DeploymentFailed
    ├── Cancelled
    ├── DataRejected                a data snapshot failed its validation
    ├── TrainingFailed
    │   └── NotSaved                a training state could not be saved as a checkpoint
    ├── GateRefused                 a candidate did not pass the promotion gate
    ├── AwaitingApproval            a person must approve the promotion first
    ├── NotReproducible             a dependency of a training run changed or is missing
    └── MissingTool                 a required program is not installed
        └── MissingExtra            a library of one of Paceline's extras is not installed
"""

from __future__ import annotations

from typing import Any, TypeVar

from paceline.text import printable, without_passwords

Kind = TypeVar("Kind", bound="PacelineError")
MAX_PART_CHARACTERS = 2000  # of an error's part in a record


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
        self.got = _hidden(got)
        self.wanted = _hidden(wanted)
        self.where = _hidden(where)
        self.do = do
        super().__init__(self.one_line())

    def one_line(self) -> str:
        """Return the whole message on one line: what, got, wanted, where, what to do.

        Each part is bounded and printable, because peers, servers and files supply some of them.
        Passwords in URLs are left out.
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

    def as_kind(self, kind: type[Kind], **changed: Any) -> Kind:
        """Return the same as an error of ``kind``, with the parts that ``changed`` names."""
        parts = {each: getattr(self, each) for each in ("what", "got", "wanted", "where", "do")}
        return kind(**parts | changed)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross Dask and process boundaries; pickle rebuilds them with all their fields.
        fields = (self.what, self.got, self.wanted, self.where, self.do)
        return (_rebuild, (type(self), *fields))

    @property
    def code(self) -> str:
        """Return the stable name of the error class, as used in JSON output and REST."""
        return type(self).__name__


def _hidden(value: object) -> object:
    """Return ``value``; a text without the passwords of its URLs: callers may show it."""
    return without_passwords(value) if isinstance(value, str) else value


def _shown(value: object) -> str:
    line = str(value).replace("\r\n", " ").replace("\n", " ").replace("\t", " ")
    return without_passwords(printable(line))


def _rebuild(
    kind: type[PacelineError], what: str, got: object, wanted: object, where: object, do: str | None
) -> PacelineError:
    return kind(what, got=got, wanted=wanted, where=where, do=do)


def to_record(error: PacelineError) -> dict[str, str | None]:
    """Return the class and the parts of ``error`` as JSON values, each cut to a bounded length."""
    parts = {"what": error.what, "do": error.do}
    parts |= {each: getattr(error, each) for each in ("got", "wanted", "where")}
    return {"code": error.code} | {
        name: None if each is None else str(each)[:MAX_PART_CHARACTERS]
        for name, each in parts.items()
    }


def kind_named(code: object) -> type[PacelineError] | None:
    """Return the class of errors that is called ``code``; None where there is none."""
    kind = globals().get(str(code))
    return kind if isinstance(kind, type) and issubclass(kind, PacelineError) else None


def from_record(record: dict[str, str | None]) -> PacelineError:
    """Return the error of ``record``; raises KeyError for what ``to_record`` did not return."""
    parts = dict(record)
    code = parts.pop("code")
    if (kind := kind_named(code)) is None:
        raise KeyError(code)
    return _rebuild(kind, str(parts["what"]), *(parts[x] for x in ("got", "wanted", "where", "do")))


def short_repr(value: object, most: int = 1000) -> str:
    """Return the repr of an untrusted ``value``, cut to ``most`` characters, for error messages."""
    try:
        return repr(value)[:most]
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply"


class TemporaryError(PacelineError):
    """The same call may work later."""

    exit_code = 75  # EX_TEMPFAIL


class ServiceUnavailable(TemporaryError):
    """A server does not answer, or answers that it is unavailable."""


class TooManyCalls(TemporaryError):
    """A caller exceeded its rate limit."""


class NotLeading(ServiceUnavailable):
    """A coordinator replica that is not the leader received a request that needs the leader."""


class NotReady(TemporaryError):
    """A process was started and missed its readiness deadline."""


class PeerLost(TemporaryError):
    """A peer closed or reset its connection, or missed its deadline."""


class WorkerLost(TemporaryError):
    """An agent, a Dask worker or a training rank died."""


class PermanentError(PacelineError):
    """The same call fails again until the input or the system changes."""


class InvalidInput(PermanentError):
    """A caller's value is invalid."""

    exit_code = 2


class InvalidProfile(InvalidInput):
    """A profile has an unknown key or a value out of range."""


class InvalidManifest(InvalidInput):
    """A manifest breaks a limit or does not describe one model exactly."""


class UntrustedManifest(InvalidManifest):
    """A manifest's signature is missing, wrong, or not from a trusted publisher."""


class InvalidPlan(InvalidInput):
    """A plan cannot be made from, or does not cover, the given workers."""


class InvalidSnapshot(InvalidInput):
    """A data snapshot is malformed or labelled for another purpose."""


class InvalidFrame(InvalidInput):
    """Bytes on the peer port are not Paceline's protocol or exceed its limits."""


class AccessDenied(PermanentError):
    """Credentials are missing or were refused."""

    exit_code = 77  # EX_NOPERM


class NotFound(PermanentError):
    """The named thing does not exist."""


class SourceMissing(NotFound):
    """A bucket, object or path to read from does not exist."""


class Conflict(PermanentError):
    """The name, key or lock is already taken."""


class StateLocked(Conflict):
    """Another supervisor owns the state directory."""


class RunElsewhere(Conflict):
    """Another process does this work, and keeps its record."""


class StaleEpoch(Conflict):
    """A write from an older epoch or incarnation was refused."""


class PortInUse(PermanentError):
    """A requested port is taken."""


class StorageFull(PermanentError):
    """A disk is full, or its quota is used up."""


class StorageFailed(PermanentError):
    """A disk write failed; the partly written data is discarded."""


class CorruptData(PermanentError):
    """Bytes do not match their digest."""


class SourceChanged(CorruptData):
    """The source object was replaced while it was read."""


class OriginBudgetExceeded(PermanentError):
    """More source bytes would be read than the plan allows."""


class DeploymentFailed(PermanentError):
    """A deployment ended before every required worker was complete."""


class Cancelled(PermanentError):
    """The caller asked to stop."""

    exit_code = 130


class DataRejected(PermanentError):
    """A data snapshot failed its validation."""


class TrainingFailed(PermanentError):
    """A training job used up its restarts or cannot run as configured."""


class NotSaved(TrainingFailed):
    """A training state could not be saved as a checkpoint; earlier checkpoints are intact."""


class GateRefused(PermanentError):
    """A candidate did not pass the promotion gate."""

    exit_code = 3


class AwaitingApproval(PermanentError):
    """A promotion waits for a person's approval, as a flow run of its own."""

    exit_code = 5


class NotReproducible(PermanentError):
    """A dependency of a training run (code, libraries, data, base model) changed or is missing."""

    exit_code = 4


class MissingTool(PermanentError):
    """A required program is not installed."""


class MissingExtra(MissingTool, ModuleNotFoundError):
    """A library of one of Paceline's extras is not installed; the message names the extra."""

    exit_code = 2
