"""The table of families, ways and meshes has the tests' own cases: none more, none fewer."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.hugging_face import FAMILIES
from tests.tasks import test_judging_on_ranks
from tests.training import test_supervised
from tests.training.parallel import test_hugging_face
from tests.training.parallel.hugging_face_ranks import ADAPTERS, FEW_WAYS, FOUR, WAYS, ways_of

PAGE = Path(__file__).parents[2] / "docs/how-to/train-your-hugging-face-model.md"
MESHES = {
    "one rank": "single",
    "DDP": "DDP",
    "FSDP2": "FSDP2",
    "TP": "TP",
    "DDP × TP": "DDP x TP",
    "FSDP2 × TP": "FSDP2 x TP",
}
Cell = tuple[str, str, str]  # way, family, mesh


def proven() -> dict[Cell, str]:
    """What the tests' parameters are, as cells."""
    cells: dict[Cell, str] = {}
    for way, link in (("all weights", "full"), ("LoRA", "lora"), ("DoRA", "lora")):
        for family in FAMILIES:
            when = "every run" if family in test_hugging_face.EVERY_TIME else "nightly"
            run = ways_of(family, way if way in ADAPTERS else "")
            few = FEW_WAYS[FOUR] if when == "every run" and way != "DoRA" else []
            for mesh, name in MESHES.items():
                absent = "[refused][refused]" if way == "DoRA" and "TP" in mesh else "–"
                absent = f"[nightly][{link}]" if name in few else absent
                cells[way, family, mesh] = f"[{when}][{link}]" if name in run else absent
    cells |= {("SFT", family, mesh): "–" for family in FAMILIES for mesh in MESHES}
    by_setting = {"shard=2": "FSDP2", "tp=2": "TP"}
    for when, cases in (
        ("nightly", test_supervised.NIGHTLY),
        ("every run", test_supervised.EVERY_TIME),
    ):
        for family, _, ranks, _, setting in cases:
            mesh = by_setting.get(setting, "one rank" if ranks == 1 else "DDP")
            cells["SFT", family, mesh] = f"[{when}][sft]"
    cells |= {("judging", family, mesh): "–" for family in FAMILIES for mesh in MESHES}
    cells |= {("judging", "llama", "one rank"): "[every run][own]"}
    cells |= {("judging", "gemma2", "one rank"): "[nightly][own]"}
    for mesh, when in test_judging_on_ranks.MESHES_SHOWN.items():
        cells["judging", "llama", mesh] = f"[{when}][judged]"
    return cells


def shown(page: str) -> dict[Cell, str]:
    """The table's cells; a family in two rows of one way is a mistake."""
    lines = page[page.index("| way | family") :].split("\n\n", maxsplit=1)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0][2:] == list(MESHES)
    cells: dict[Cell, str] = {}
    for way, families, *its in rows[2:]:
        for family in re.findall(r"`(\w+)`", families):
            for mesh, cell in zip(MESHES, its, strict=True):
                assert (way, family, mesh) not in cells
                cells[way, family, mesh] = cell
    return cells


def test_each_cell_is_a_case_of_the_test_that_it_links() -> None:
    assert shown(PAGE.read_text()) == proven()


def test_each_test_that_the_table_links_exists() -> None:
    page = PAGE.read_text()
    links = {
        name: (file, test)
        for name, file, test in re.findall(r'^\[(\w+)\]: (\S+) "(\w+)"$', page, re.MULTILINE)
    }
    assert set(links) == set(re.findall(r"\]\[(\w+)\]", page))
    for file, test in links.values():
        assert f"\ndef {test}(" in (PAGE.parent / file).read_text(), test


def test_every_way_of_the_ranks_has_a_column_or_is_one_recomputed() -> None:
    others = set(WAYS) - set(MESHES.values())
    assert all("recomputed" in each for each in others)
