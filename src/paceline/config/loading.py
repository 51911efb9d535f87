"""Load a Profile from ``profiles/NAME.toml``; errors name the key and the nearest valid one."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from paceline import __version__
from paceline.config.settings import Profile
from paceline.errors import InvalidProfile, short_repr

MAX_BYTES = 256 * 1024  # of a file or of one override
MAX_AUTHORITY_BYTES = 16 * 1024  # it travels with each node that joins
PEM = "-----BEGIN "
CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----")
MAX_JOB_DOTS = 4  # in the key of a training's own setting
# What else than its training settings a job may choose; how samples are read is the snapshot's.
JOB_SETTINGS = (
    "model.context",  # of bases whose config does not say it
    "data.batching",
    "data.columns",
    "data.prefetch_batches",
    "data.prefetch_shards",
)
# What runs on the nodes, and what they call.
INSTALLATION_SETTINGS = (
    "training.code_ref",
    "training.optimizer_ref",
    "training.guard.preemption",
)
MAX_DOTS = 1000  # in one line; names and addresses contain dots too


def profile_directories() -> list[Path]:
    """Return the profile directories: ``$PACELINE_PROFILES``, the source tree, the wheel."""
    here = Path(__file__).resolve().parents[1]
    places = [here.parents[1] / "profiles", here / "_profiles"]
    if extra := os.environ.get("PACELINE_PROFILES"):
        places.insert(0, Path(extra))
    return [place for place in places if place.is_dir()]


def load_profile(name_or_path: str, overrides: Mapping[str, object] | None = None) -> Profile:
    """Return the profile ``name_or_path`` with dotted ``overrides`` applied.

    An override is such as ``{"cluster.link_mbit": 6}``; text counts as its TOML literal ("6"), and
    as a string where it is none.
    Raises InvalidProfile with the file, the key and the nearest valid key.
    """
    path = _find(name_or_path)
    try:
        with path.open("rb") as file:
            raw = _toml(file.read(MAX_BYTES + 1).decode())
    except (OSError, ValueError) as error:
        raise InvalidProfile(
            "profile cannot be read",
            got=error,
            wanted="a TOML file",
            where=path,
            do="Fix the file.",
        ) from error
    for key, value in (overrides or {}).items():
        _set(raw, key, _literal(value))
    try:
        profile = Profile.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, path, overrides or {}) from error
    if profile.cluster.kind == "kubernetes" and not profile.cluster.kubernetes.image:
        raise InvalidProfile(
            "the profile names no image",
            got='[cluster] kind = "kubernetes" without cluster.kubernetes.image',
            wanted="an image such as registry.example/paceline:0.1.0",
            where=path,
        )
    if profile.cluster.kind == "local" and profile.cluster.hosts:
        raise InvalidProfile(
            "the profile names hosts and starts none of them",
            got='cluster.hosts with [cluster] kind = "local"',
            wanted='kind = "ssh"',
            where=path,
            do="Begin with the profile `ssh`; hosts that join are named nowhere.",
        )
    if profile.cluster.per_job and not profile.training.ranks_per_node:
        raise InvalidProfile(
            "how many nodes a job needs is not known before it has them",
            got="training.ranks_per_node = 0 where each job requests nodes of its own",
            wanted="the ranks that each node runs, such as its number of accelerators",
            where=path,
        )
    for section, key in (("model", "base"), ("evaluation", "tasks")):
        settings = getattr(profile, section)
        if (named := getattr(settings, key)).startswith(("./", "../")):
            root = Path.cwd() if f"{section}.{key}" in (overrides or {}) else path.parent
            settings = settings.model_copy(update={key: str((root / named).resolve())})
            profile = profile.model_copy(update={section: settings})
    if not (named := profile.objects.ca) or named.startswith(PEM):
        return profile
    objects = profile.objects.model_copy(update={"ca": _certificates(Path(named))})
    return profile.model_copy(update={"objects": objects})


def _certificates(path: Path) -> str:
    """Return the certificates in a PEM file: other machines of the fleet do not have the file."""
    try:
        with path.open(encoding="ascii") as file:
            text = file.read(MAX_BYTES)
    except (OSError, ValueError) as error:
        raise _bad_authority(str(error), path) from error
    found = CERTIFICATE.findall(text)
    if not found or sum(map(len, found)) > MAX_AUTHORITY_BYTES:
        raise _bad_authority(f"{len(found)} certificates in {len(text)} bytes", path)
    return "\n".join(found) + "\n"


def _bad_authority(got: str, path: Path) -> InvalidProfile:
    return InvalidProfile(
        "bad value in profile",
        got=got,
        wanted=f"a PEM file with the authority's certificate, at most {MAX_AUTHORITY_BYTES} bytes",
        where=f"objects.ca = {path}",
        do="Authorities of a machine's own need no setting: leave it out, or set AWS_CA_BUNDLE.",
    )


def _find(name_or_path: str) -> Path:
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        path = Path(name_or_path)
        if path.is_file():
            return path
    known = {file.stem: file for place in profile_directories() for file in place.glob("*.toml")}
    if name_or_path in known:
        return known[name_or_path]
    raise InvalidProfile(
        "no such profile",
        got=name_or_path,
        wanted=f"one of {', '.join(sorted(known)) or '(none found)'} or a path",
        do=_nearest(name_or_path, list(known)),
    )


def _toml(text: str) -> dict[str, Any]:
    """Return the parsed document; raises ValueError, also for input beyond the limits.

    ``tomllib`` has no limits: it takes quadratic time over the parts of a dotted key (40 KB of
    them: 4 s) and raises RecursionError for nested brackets.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES} bytes")
    if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"a line with more than {MAX_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def toml_value(text: str) -> Any:
    """Return the value of a TOML literal; ``text`` itself where it is none."""
    try:
        return _toml(f"v = {text}")["v"]
    except ValueError:
        return text


def _literal(value: object) -> object:
    return toml_value(value) if isinstance(value, str) else value


def with_job_settings(profile: Profile, given: Mapping[str, object]) -> Profile:
    """Return ``profile`` with the settings of one training, such as
    ``{"training.learning_rate": 3e-4, "training.lora.r": 8, "data.batching": "packed"}``.

    The code that runs on nodes, what the data may be used for, and how candidates are judged are
    the installation's. Raises InvalidProfile for these, for unknown keys and for
    values that a profile may not have either.
    """
    for key in given:
        section, _, name = key.partition(".")
        allowed = (section == "training" and name) or key in JOB_SETTINGS
        if not allowed:
            raise _not_of_one_training(key)
        if key.count(".") > MAX_JOB_DOTS:
            raise InvalidProfile("not a key of a profile", got=short_repr(key))
    changed = _changed(profile, given, "the settings of this training")
    # Compared, because a section may be given as a whole.
    for key in INSTALLATION_SETTINGS:
        ours = attrgetter(key)
        if ours(changed) != ours(profile):
            raise _not_of_one_training(key)
    return changed


def with_recorded_settings(profile: Profile, recorded: Profile) -> Profile:
    """Return ``profile`` with the settings of an earlier training, whose record is in S3: of
    ``recorded`` only what a job may choose, and not where its ranks are placed.

    Raises InvalidProfile for values that a profile may not have.
    """
    raw = profile.model_dump(mode="json")
    raw["training"] = recorded.training.model_dump(mode="json")
    for key in JOB_SETTINGS:
        _set(raw, key, attrgetter(key)(recorded))
    for key in (*INSTALLATION_SETTINGS, "training.ranks_per_node"):
        _set(raw, key, attrgetter(key)(profile))
    return _validated(raw, "the settings of the earlier training", {})


def with_overrides(profile: Profile, given: Mapping[str, object]) -> Profile:
    """Return ``profile`` with dotted overrides as those of ``load_profile``; raises as that."""
    values = {key: _literal(value) for key, value in given.items()}
    return _changed(profile, values, "the installation's settings")


def _changed(profile: Profile, given: Mapping[str, object], where: str) -> Profile:
    raw = profile.model_dump(mode="json")
    for key, value in given.items():
        _set(raw, key, value)
    return _validated(raw, where, given)


def _validated(raw: dict[str, Any], where: str, given: Mapping[str, object]) -> Profile:
    try:
        return Profile.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, where, given) from error


def _not_of_one_training(key: str) -> InvalidProfile:
    return InvalidProfile(
        "not a setting of one training",
        got=short_repr(key[:100]),
        wanted=f"training.… but {', '.join(INSTALLATION_SETTINGS)}; or {', '.join(JOB_SETTINGS)}",
        do='The installation\'s profile decides the others ("Profile keys" in the documentation).',
    )


def _parts(dotted: str) -> list[str]:
    """Return the parts of a key; one in quotation marks may contain dots, as in TOML."""
    if not {'"', "'"} & set(dotted):
        return dotted.split(".")
    parts: list[str] = []
    try:
        table: Any = _toml(f"{dotted} = 0")
        while isinstance(table, dict):
            ((part, table),) = table.items()  # a comment is none, lines are several
            parts.append(part)
    except ValueError as error:
        raise InvalidProfile(
            "not a key of a profile", got=dotted, wanted='section.key or gate.models."ID".key'
        ) from error
    return parts


def _set(raw: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = _parts(dotted)
    table = raw
    for parent in parents:
        if table.get(parent) is None:  # an optional section that the profile leaves out
            table[parent] = {}
        table = table[parent]
        if not isinstance(table, dict):
            raise InvalidProfile("override goes through a value", got=dotted, wanted="section.key")
    table[last] = value


def _explain(
    error: ValidationError, path: Path | str, overrides: Mapping[str, object]
) -> InvalidProfile:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    dotted = ".".join(location)
    typed = next((key for key in overrides if f"{dotted}.".startswith(f"{key}.")), None)
    typed = typed or next((key for key in overrides if key.startswith(f"{dotted}.")), None)
    where = path if typed is None else f"--set {typed}"
    if first["type"] == "extra_forbidden":
        valid = _keys_at(location[:-1])
        return InvalidProfile(
            "unknown key in profile",
            got=dotted,
            wanted=f"one of {', '.join(sorted(valid))}",
            where=where,
            do=_nearest(location[-1], valid),
        )
    return InvalidProfile(
        "bad value in profile",
        # S3's parameters may have a customer's own key
        got=dotted
        if dotted.startswith("objects.parameters")
        else f"{dotted} = {short_repr(first['input'])}",
        wanted=_wanted(first["msg"], location),
        where=where,
    )


def _wanted(message: str, location: list[str]) -> str:
    """Return the expected value from pydantic's message, without its internal terms."""
    if "dictionary or instance" in message:
        return f"a section with {', '.join(_keys_at(location))}"
    wanted = message.removeprefix("Input should be ").removeprefix("Value error, ")
    return "a list, e.g. [1, 2]" if wanted == "a valid tuple" else wanted


def _keys_at(location: list[str]) -> list[str]:
    model: type[BaseModel] = Profile
    for part in location:
        if part not in model.model_fields:  # a model's id below gate.models
            continue
        annotation = model.model_fields[part].annotation
        for each in get_args(annotation) or (annotation,):  # a section, of each key, or none
            if isinstance(each, type) and issubclass(each, BaseModel):
                model = each
    return list(model.model_fields)


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"A profile of a newer release needs that release; this is Paceline {__version__}."
