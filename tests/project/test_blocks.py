"""Each block of the docs has a name, and a test types, runs or loads it; else NOT_RUN says why."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline.config import load_profile
from tests.project.test_dials import ROOT
from tests.project.test_site import TUTORIALS

FENCE = re.compile(r"^```(\S*) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = {
    "from-plan-to-activation container": "wants podman and the image",
    "from-plan-to-activation systemd": "wants root and systemd; tests/deployments read the unit",
    "import-from-a-hub cache": "wants transformers on a node; its journey reads that directory",
    "run-training-jobs budget": "wants a job that spent its budget; tests/api/test_job_costs.py",
    "train-your-hugging-face-model load-export": "its journey loads the export by a longer program",
    "train-your-hugging-face-model load-adapter": "its journey has a longer one",
}
# What a test imports → the page that it types.
TYPED = {
    "journeys.guide import .*block": "bring-up-a-fleet",
    "journeys.trainers import": "train-on-a-fleet",
    "journeys.control_plane import": "run-the-control-plane",
}


@cache
def blocks() -> dict[tuple[str, str], tuple[str, str, str]]:
    """Return language, heading and text by page and name; fails where one has no name."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for fence in FENCE.finditer(text):
            language, name, body = fence.groups()
            if language != "text":  # what is printed, and drawings
                assert language and name, f"{page}: {fence[0]}"
                assert (page.stem, name) not in found, f"{page}: {name} twice"
                headings = re.findall(r"^## (.+)$", text[: fence.start()], re.MULTILINE)
                found[page.stem, name] = language, headings[-1] if headings else "", body
    return found


@cache
def sources() -> tuple[str, ...]:
    texts = (each.read_text(encoding="utf-8") for each in sorted(ROOT.glob("tests/**/*.py")))
    return tuple(
        " ".join([text, *(page for word, page in TYPED.items() if re.search(word, text))])
        for text in (
            re.sub(r"(?s)^NOT_RUN = .*?^}", "", text, flags=re.MULTILINE) for text in texts
        )
    )


def is_used(page: str, name: str, language: str, heading: str) -> bool:
    """Return whether a test names the page, and the block or the heading above its commands."""
    quoted = [rf"[\"'/ ]{re.escape(name)}[\"'\\ ]", rf'"{re.escape(heading) or "-"}"'][
        : 1 + (language == "sh")
    ]
    words = re.compile("|".join([*quoted, rf'blocks\("{language}"\)']))
    return any(page in each and words.search(each) for each in sources())


def test_every_block_has_a_name_and_is_used_by_a_test() -> None:
    known = {key: each for key, each in blocks().items() if each[0] not in ("toml", "yaml")}
    used = {key for key, (kind, heading, _) in known.items() if is_used(*key, kind, heading)}
    copied = {known[key][2] for key in used}
    tutorials = {each.removesuffix(".md") for each in TUTORIALS}  # test_site.py compares them
    unused = {
        f"{page} {name}"
        for (page, name), (_, _, text) in known.items()
        if (page, name) not in used and page not in tutorials and text not in copied
    }
    assert len(used) > 120
    assert sorted(unused) == sorted(NOT_RUN)


@pytest.mark.parametrize(
    "key", [key for key, (kind, _, _) in blocks().items() if kind == "toml"], ids=" ".join
)
def test_a_profile_of_the_docs_loads(key: tuple[str, str], tmp_path: Path) -> None:
    if key == ("sweep-hyper-parameters", "space"):
        pytest.skip("tests/jobs/test_sweep.py reads it: it is no profile")
    path = tmp_path / "mine.toml"
    path.write_text(blocks()[key][2].replace("sha256:…", f"sha256:{'0' * 64}"))
    load_profile(str(path))


def test_the_logits_of_the_docs_are_a_method() -> None:
    defined: dict[str, Any] = {}
    exec(f"class Workload:\n{blocks()['train-your-own-model', 'logits'][2]}", defined)
    assert defined["Workload"]().logits(("logits", "state")) == "logits"
