"""The documentation's site builds without a warning, is whole, and loads nothing from elsewhere."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

import paceline
from paceline import errors
from paceline.api import ROUTES
from paceline.cli import cli
from paceline.config import Profile, load_profile
from paceline.schemas import SCHEMAS, EventName
from tests.project.test_dials import ROOT
from tests.support.browser import chromium, keep, resize

LARGER = {"your-model-on-2x8-gpus.md"}  # with figures of its own
TUTORIALS = {  # tutorial → pages whose commands it takes
    "a-cluster-in-20-minutes.md": ["bring-up-a-fleet.md"],
    "your-model-on-2x8-gpus.md": [
        "train-on-a-fleet.md",
        "fine-tune-on-conversations.md",
        "estimate-a-training.md",
    ],
    "from-ci.md": ["bring-up-a-fleet.md", "use-from-a-laptop.md", "run-the-control-plane.md"],
}

PAGES = (  # of each kind one, and the widest
    "index", "tutorials/the-demo", "how-to/set-up-agents", "how-to/handle-failing-ranks",
    "reference/cli", "reference/profile", "reference/rest", "explanation/architecture",
)  # fmt: skip
IMAGES_ARE_THERE = "return [...document.images].every(image => image.naturalWidth > 0)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", directory],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def text_of(page: Path) -> str:
    """Return a page's text without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def commands(command: click.Command, path: str) -> Iterator[str]:
    """Yield the path of ``command`` and of those below it."""
    yield path
    for name in command.list_commands(None) if isinstance(command, click.Group) else ():  # type: ignore[arg-type]
        child = command.get_command(None, name)  # type: ignore[arg-type]
        if child is not None and not child.hidden:
            yield from commands(child, f"{path} {name}")


def keys(model: type[BaseModel]) -> Iterator[str]:
    """Yield the names of a section and of its keys."""
    for name, field in model.model_fields.items():
        yield name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation)


def is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, errors.PacelineError)


def test_the_reference_lists_what_the_code_has(site: Path) -> None:
    known = {
        "cli": commands(cli, "paceline"),
        "rest": (f"{method} {path}" for method, path in ROUTES),
        "python": (f"paceline.{name}" for name in paceline.__all__ if name != "__version__"),
        "profile": keys(Profile),
        "events": EventName,
        "errors": (name for name, kind in vars(errors).items() if is_error(kind)),
        "schemas": (f"{name}.json" for name in SCHEMAS),
    }
    for page, names in known.items():
        text = text_of(site / f"reference/{page}.html")
        missing = [name for name in names if name not in text]
        assert not missing, page


def test_no_page_shows_raw_markdown(site: Path) -> None:
    raw = re.compile(r"^```|\]\(\S+\.md[)#]|^\| .* \|$", re.MULTILINE)
    pages = [page for page in site.rglob("*.html") if "source" not in page.parts]
    shown = {page.name: found[0] for page in pages if (found := raw.search(text_of(page)))}
    assert not shown
    assert raw.search("```sh name") and raw.search("see [it](it.md)") and raw.search("| a | b |")


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//)"
    )
    imported = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//")
    pages, sheets = [*site.rglob("*.html")], [*site.rglob("*.css")]
    assert len(pages) > 80
    assert len(sheets) > 1
    assert not [page for page in pages if loaded.search(page.read_text(encoding="utf-8"))]
    assert not [sheet for sheet in sheets if imported.search(sheet.read_text(encoding="utf-8"))]
    assert loaded.search('<link href="https://fonts.example/css">')
    assert loaded.search('<script async src="//host/x.js">')


@pytest.mark.browser
@pytest.mark.nightly
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_are_as_wide_as_the_window(site: Path, width: int) -> None:
    with chromium() as browser:
        resize(browser, width)
        for page in PAGES:
            browser.get((site / f"{page}.html").as_uri())
            wide = browser.execute_script("return document.documentElement.scrollWidth")
            assert wide <= width, page
            assert browser.execute_script(IMAGES_ARE_THERE), page
            keep(browser, f"site-{page.replace('/', '-')}-{width}")


def test_the_files_that_pages_link_are_in_the_site(site: Path) -> None:
    unit = site / "source/deployments/systemd/paceline-agent@.service.html"
    assert "ExecStart=" in text_of(unit)


@pytest.mark.parametrize("tutorial", TUTORIALS)
def test_a_tutorial_shows_the_commands_that_its_how_to_pages_show(tutorial: str) -> None:
    text = (ROOT / "docs/tutorials" / tutorial).read_text(encoding="utf-8")
    shown = "\n".join(
        (ROOT / "docs/how-to" / page).read_text(encoding="utf-8") for page in TUTORIALS[tutorial]
    )
    for words, values in re.findall(r"^\| (`[A-Z_0-9`, ]+`) \| ([^|]+) \|", text, re.MULTILINE):
        names, given = re.findall(r"`([^`]+)`", words), re.findall(r"`([^`]+)`", values)
        for name, value in zip(
            names, given * len(names) if len(given) == 1 else given, strict=False
        ):
            shown = re.sub(rf"\b{name}\b", value, shown)
    blocks = re.findall(r"^```sh \S+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    assert len(lines) > 5
    if tutorial in LARGER:
        # what is left of a line once its figures are equal, and settings that a profile takes
        typed = "\n".join(lines).replace("\\\n", "")
        for name, value in re.findall(r"--set (training\.[\w.]+)=(\S+)", typed):
            load_profile("embedded", {name: value})
        shown, lines = (re.sub(r"\d+", "1", text) for text in (shown, "\n".join(lines)))
        lines = [re.sub(r"( --set training\.\S+)* ?\\?$", "", line) for line in lines.splitlines()]
        shown = re.sub(r"( --set training\.\S+)* ?\\?$", "", shown, flags=re.MULTILINE)
    missing = [line for line in lines if line not in shown]
    assert not missing
