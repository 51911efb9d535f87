"""What mkdocs adds to the pages at build time: reference from the code, and linked files.

A page of ``docs/reference`` has a line ``<!-- generated: NAME -->``, which is replaced by what the
function of that name below returns. Files of the repository that a page links (units, manifests,
examples) become pages below ``source/``, so that the site is complete without the repository.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import json
import pkgutil
import re
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from types import ModuleType
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from prometheus_client.core import Metric
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

import paceline
import paceline.schemas
from paceline import errors
from paceline.api import create_app
from paceline.api.problems import status_of
from paceline.cli import cli
from paceline.config import Endpoints, Profile, Runtime, Secrets, cluster, settings, training
from paceline.schemas import events as events_module
from paceline.schemas.json_schemas import SCHEMAS
from paceline.telemetry.metrics import FleetMetrics, Snapshot
from paceline.training.metrics import exporter

Schema = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
# A block's name, for tests; Markdown does not know it.
NAMED = re.compile(r"^(```(?:sh|toml|yaml|python|json)) \S+$", re.MULTILINE)
LINK = re.compile(r"(\]\(|^\[\w+\]: )((?:\.\./)+[^)#\s]+)", re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}
REFERENCE = "#/components/schemas/"
BOUNDS = {
    "minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<",
}  # fmt: skip


MOST = 2**53  # bounds above it are those of the integers themselves
# What a field of any record means where its own record has no comment on it.
COMMON = {
    "deployment_id": "as `POST /deployments` returned it",
    "worker_id": "the agent's name in the fleet",
    "model_id": "such as pylm or acme/7b",
    "version": "of the model, as published",
    "job_id": "tj-…, as `POST /v1/training-jobs` returned it",
    "run_id": "by which ledger, Prefect and MLflow name the run",
    "flow_run_id": "of the Prefect flow run; null: none",
    "manifest_digest": "SHA-256 of the model's manifest",
    "topology": "the shape of the plan",
    "epoch": "of the plan; it grows with each new one",
    "status": "see the type",
    "kind": "see the type",
    "continue": "false: register again",
    "state": "see the type",
    "phase": "see the type",
    "failure": "the reason; null: it did not fail",
    "reason": "in words, for a person; empty: none given",
    "incarnation": "grows with each restart of the agent",
    "hostname": "as the operating system has it",
    "rack": "where it stands; empty: not said",
    "zone": "room or site, above racks; empty: not said",
    "seed": "of the plan's random choices",
    "project": "whose data these are; empty: the profile's",
    "currency": "of every sum here, as in [prices]",
    "created_at": "seconds since the Unix epoch",
    "updated_at": "seconds since the Unix epoch",
    "started_at": "seconds since the Unix epoch; null: not yet",
    "ended_at": "seconds since the Unix epoch; null: not yet",
    "completed_at": "seconds since the Unix epoch; null: not yet",
    "last_heartbeat": "seconds since the Unix epoch",
    "at": "seconds since the Unix epoch",
    "value": "the figure itself",
    "low": "lower end of its interval",
    "high": "upper end of its interval",
    "seconds": "that it took",
    "bytes": "its size",
    "url": "where it lies",
    "documents": "how many samples",
    "notes": "what else happened, for a person",
    "predicted_seconds": "of the plan, by the cost model",
    "bound_seconds": "that no plan can beat: size / link",
    "total_bytes": "of the model",
    "origin_bytes": "read from the origin, by all workers",
    "cross_rack_bytes": "sent from one rack to another",
    "refetched_bytes": "received again, after a loss or a wrong digest",
    "pieces_reused": "pieces that the nodes had before",
    "bytes_reused": "bytes that the nodes had before",
    "evidence_digest": "SHA-256 of the evidence",
    "workers_failed": "their names",
    "workers": "how many",
    "racks": "how many",
    "ranks": "processes of the gang",
    "steps": "optimizer steps",
    "plan": "the plan that was followed",
    "alias": "champion",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ that a page links."""
    linked = {
        target
        for file in files.documentation_pages()
        for _, link in LINK.findall(file.content_string)
        if (target := _outside(file.src_uri, link))
    }
    for target in sorted(linked):
        text = (ROOT / target).read_text(encoding="utf-8")
        language = LANGUAGES.get(PurePosixPath(target).suffix, "text")
        content = (
            f"---\nsearch:\n  exclude: true\n---\n# `{target}`\n\n`````{language}\n{text}`````\n"
        )
        files.append(File.generated(config, f"source/{target}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, and lead links out of docs/ to the pages of those files."""
    del config, files
    here = page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        target = _outside(here, found[2])
        start = str(PurePosixPath(here).parent)
        return found[0] if not target else f"{found[1]}{relpath(f'source/{target}.md', start)}"

    markdown = NAMED.sub(r"\1", LINK.sub(moved, markdown))
    return MARK.sub(lambda found: globals()[found[1]](), markdown)


def _outside(page: str, link: str) -> str:
    """Return the path of what ``link`` names in the repository; "" where it lies in docs/."""
    target = normpath(PurePosixPath("docs", page).parent / link)
    return "" if target.startswith("docs/") else target


# The command line


def commands() -> str:
    """Return the help of every command, as it prints it."""
    return "\n".join(_help(cli, None, "paceline", 2))


def _help(
    command: click.Command, parent: click.Context | None, name: str, depth: int
) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent, terminal_width=84)
    if parent:
        yield f"{'#' * depth} {context.command_path}\n"
    yield f"```text\n{command.get_help(context)}\n```\n"
    for each in command.list_commands(context) if isinstance(command, click.Group) else ():
        child = command.get_command(context, each)  # type: ignore[attr-defined]
        assert child is not None, each
        if not child.hidden:
            yield from _help(child, context, each, depth + (parent is not None))


def python() -> str:
    """Return the signature and docstring of each name that ``import paceline`` offers, then the
    fields of the records that these return."""
    names = sorted(
        set(paceline.__all__) - {"__version__"}, key=lambda name: (name[0].isupper(), name)
    )
    page = "\n\n".join(part for name in names for part in _name(name, getattr(paceline, name)))
    return "\n\n".join([page, *_results(page)])


def _results(page: str) -> Iterator[str]:
    """Return the records in the return types of the signatures of ``page``, and those in them."""
    kinds = {}
    for returned in re.findall(r"\) -> ([^:\n]+):", page):
        for name in re.findall(r"\w+", returned):
            if inspect.isclass(kind := getattr(paceline.schemas, name, None)):
                kinds[name] = kind
    _, schema = models_json_schema(
        [(kind, "validation") for kind in kinds.values()], ref_template=REFERENCE + "{model}"
    )
    yield "## Records\n\nWhat the functions return: pydantic models, with these fields."
    yield from _records(schema["$defs"])


def _name(name: str, offered: Any) -> Iterator[str]:
    heads = "###" if "." in name else "##"
    if inspect.isfunction(inspect.unwrap(offered)):
        yield from (
            f"{heads} `paceline.{name}`",
            _signature(offered),
            inspect.getdoc(offered) or "",
        )
        return
    yield from (f"{heads} `paceline.{name}`", inspect.getdoc(offered) or "")
    # its bases that have no name of their own are parts of it
    bases = [each for each in offered.__mro__[1:] if each.__module__.startswith("paceline")]
    parts = [offered, *(each for each in bases if each.__name__ not in paceline.__all__)]
    for own, member in (item for part in parts for item in vars(part).items()):
        if own == "__init__":
            yield _signature(member)
        elif not own.startswith("_") and inspect.isfunction(member):
            yield from _name(f"{name}.{own}", member)
        elif not own.startswith("_") and isinstance(member, property):
            yield from (f"### `paceline.{name}.{own}`", inspect.getdoc(member) or "")


def _signature(function: Any) -> str:
    """Return the lines of a function's source before its body."""
    source = inspect.cleandoc("\n" + inspect.getsource(function))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    return "```python\n" + "\n".join(lines) + "\n```"


# REST, events and profiles: tables of fields


def routes() -> str:
    """Return every route of the coordinator's OpenAPI document, then the records they name."""
    with tempfile.TemporaryDirectory() as state:
        secrets = Secrets(coordinator_token="none")  # noqa: S106 (no server listens)
        runtime = Runtime(
            profile=Profile(), state_dir=Path(state), endpoints=Endpoints(), secrets=secrets
        )
        document = create_app(runtime).openapi()
    lines = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += [f"### `{method.upper()} {path}`", operation.get("description", "")]
            if given := operation.get("parameters"):
                lines.append(_table(
                    ("parameter", "in", "type"),
                    ((f"`{x['name']}`", x["in"], _type(x["schema"])) for x in given),
                ))  # fmt: skip
            body = operation.get("requestBody", {}).get("content", {})
            lines += [f"Body: {_type(each['schema'])}" for each in body.values()]
            for status, answer in operation["responses"].items():
                kinds = [
                    _type(x["schema"]) if "schema" in x else f"`{kind}`"
                    for kind, x in answer.get("content", {}).items()
                ]
                if status.startswith("2"):
                    lines.append(f"Answer {status}: {', '.join(kinds) or 'no body'}")
    lines.append("## Records")
    return "\n\n".join([*lines, *_records(document["components"]["schemas"])])


def events() -> str:
    """Return the names of events, then the items of the event stream."""
    meanings = _comments(events_module)
    names = _table(
        ("event", "meaning"),
        (
            (f"`{each.value}`", meanings.get(("EventName", each.name), ""))
            for each in events_module.EventName
        ),
    )
    stream = TypeAdapter(events_module.StreamItem).json_schema(ref_template=REFERENCE + "{model}")
    heading = "## Items of the event stream\n\n`GET /events/stream` sends these."
    return "\n\n".join([names, heading, *_records(stream["$defs"])])


def profile_keys() -> str:
    """Return each section of a profile with its keys."""
    whole = Profile.model_json_schema(ref_template=REFERENCE + "{model}")
    meanings = _comments(settings) | _comments(cluster) | _comments(training)
    return "\n\n".join(_section("", whole, whole["$defs"], meanings))


def _section(
    path: str, schema: Schema, known: dict[str, Schema], meanings: dict[tuple[str, str], str]
) -> Iterator[str]:
    about = _text(schema.get("description", "")) if path else ""
    parts = {name: _model(each) for name, each in schema["properties"].items()}
    keys = {name: schema["properties"][name] for name, part in parts.items() if not part}
    anchor = f"{{ #{schema['title'].lower()} }}"
    yield f"## {f'`[{path}]`' if path else 'The whole profile'} {anchor}\n\n{about}"
    yield _table(
        ("key", "type", "default", "meaning"),
        (
            (f"`{name}`", _type(each), _default(each),
             meanings.get((schema["title"], name)) or meanings.get(("Policy", name), "")
             or _text(each.get("description", "")))
            for name, each in keys.items()
        ),
    )  # fmt: skip
    for name, each in schema["properties"].items():
        inner = each.get("items") or each.get("additionalProperties") or {}
        part, below = (parts[name], name) if parts[name] else (_model(inner), f"{name}.NAME")
        if part:
            yield from _section(f"{path}.{below}".strip("."), known[part], known, meanings)


def _model(schema: Schema) -> str:
    """Return the name of the section that ``schema`` refers to, also where it may be absent."""
    choices = [schema, *schema.get("anyOf", ()), *schema.get("allOf", ())]
    names = [each["$ref"].removeprefix(REFERENCE) for each in choices if "$ref" in each]
    return names[0] if names else ""


def _records(known: dict[str, Schema]) -> Iterator[str]:
    meanings = _comments(settings) | _comments(training)
    kinds: dict[str, type] = {}
    for each in pkgutil.iter_modules(paceline.schemas.__path__):
        module = importlib.import_module(f"paceline.schemas.{each.name}")
        meanings |= _comments(module)
        kinds |= dict(inspect.getmembers(module, inspect.isclass))
    for name, schema in sorted(known.items()):
        yield f"### {name}\n\n{_text(schema.get('description', ''))}"
        record = re.sub("-(Input|Output)$", "", name)  # of one that is both body and answer
        owners = [record, *(base.__name__ for base in inspect.getmro(kinds.get(record, object)))]
        required = schema.get("required", ())
        if "properties" in schema:
            yield _table(
                ("field", "type", "default", "meaning"),
                (
                    (f"`{key}`", _type(each), "required" if key in required else _default(each),
                     next(filter(None, (meanings.get((own, key)) for own in owners)), "")
                     or _text(each.get("description", ""))
                     or COMMON.get(key, ""))
                    for key, each in schema["properties"].items()
                ),
            )  # fmt: skip
        else:
            yield _type(schema)


def _type(schema: Schema) -> str:
    """Return a JSON schema in words; records become links to their heading."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(REFERENCE)
        return f"[{name}](#{name.lower()})"
    if choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return " or ".join(dict.fromkeys(_type(each) for each in choices))
    if values := schema.get("enum") or [schema[x] for x in ("const",) if x in schema]:
        return ", ".join(f"`{each}`" if each != "" else '`""`' for each in values)
    kind = schema.get("type", "any")
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items", {})]
        return f"list of {', '.join(_type(each) for each in items)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_type(schema['additionalProperties'])}"
    bounds = [
        f"{sign} {schema[key]:.12g}"
        for key, sign in BOUNDS.items()
        if key in schema and abs(schema[key]) < MOST
    ]
    return " ".join([kind, *bounds])


def _default(schema: Schema) -> str:
    value = schema.get("default")
    return "" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`"


def _comments(module: ModuleType) -> dict[tuple[str, str], str]:
    """Return what comments of ``module`` state of each field of each class.

    A field's comment is on its last line, or on lines of their own right above it.
    """
    source = inspect.getsource(module)
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:|fmt:)", token.string)
    }
    found = {}
    for node in ast.walk(ast.parse(source)):
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            target = (
                getattr(field, "target", None) or (getattr(field, "targets", None) or [None])[0]
            )
            if not isinstance(target, ast.Name):
                continue
            first = field.lineno
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            own = [comments.get(n, "") for n in (*range(first, field.lineno), field.end_lineno)]
            found[node.name, target.id] = _text(" ".join(filter(None, own)))
    return found


# Metrics, errors, schemas


def metrics() -> str:
    """Return every metric of coordinator and ranks."""
    none = Snapshot(
        deployments=[], progress={}, workers=[], beats=0, beats_refused=0, leader_epoch=0,
        jobs={},
    )  # fmt: skip
    rank = exporter.RankMetrics(dict.fromkeys(("job_id", "rank"), "0"))
    rank._figures = dict.fromkeys(exporter._GAUGES, 0.0)
    rank._interval_s = 0.0
    ranks = sorted(rank.collect(), key=lambda each: each.name)
    return "\n\n".join([
        "## Of the coordinator (`GET /metrics`)", _metrics(FleetMetrics(lambda: none).collect()),
        "## Of each training rank", _metrics(iter(ranks)),
    ])  # fmt: skip


def _metrics(found: Iterator[Metric]) -> str:
    return _table(
        ("metric", "kind", "labels", "meaning"),
        (
            (f"`{each.name}{'_total' if each.type == 'counter' else ''}`", each.type,
             ", ".join(f"`{label}`" for label in each._labelnames), each.documentation)
            for each in found
        ),
    )  # fmt: skip


def error_classes() -> str:
    """Return the tree of errors, and each with its exit code and HTTP status."""
    _, tree = inspect.getdoc(errors).split("\n\nPacelineError\n")  # type: ignore[union-attr]
    rows = []
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.PacelineError):
            status = status_of(kind(""))
            about = _text(inspect.getdoc(kind) or "")
            rows.append((f"`{name}`", str(kind.exit_code), str(status), about))
    return "\n\n".join([
        f"```text\nPacelineError\n{tree}\n```",
        _table(("error", "exit code", "HTTP status", "meaning"), rows),
    ])  # fmt: skip


def json_schemas() -> str:
    """Return the schemas of docs/schemas with what each describes."""
    return _table(
        ("schema", "describes"),
        (
            (f"[`{name}.json`](../schemas/{name}.json)", _about(kind))
            for name, kind in SCHEMAS.items()
        ),
    )


def decisions() -> str:
    """Return the titles of the decisions."""
    pages = sorted((ROOT / "docs/decisions").glob("0*.md"))
    titles = {
        each.name: each.read_text(encoding="utf-8").split("\n", maxsplit=1)[0] for each in pages
    }
    return "\n".join(f"- [{title.lstrip('# ')}]({name})" for name, title in titles.items())


def _about(kind: type[BaseModel]) -> str:
    return _text((inspect.getdoc(kind) or "").split("\n\n", maxsplit=1)[0])


def _text(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;")


def _table(heads: tuple[str, ...], rows: Any) -> str:
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    if not lines:
        return ""
    return "\n".join(
        f"| {line} |" for line in (" | ".join(heads), " | ".join("-" * len(heads)), *lines)
    )
