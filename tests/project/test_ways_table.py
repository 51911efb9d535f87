"""The table of families, ways and meshes has the tests' own cases: none more, none fewer."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.hugging_face import FAMILIES
from tests.training.parallel.hugging_face_ranks import (
    ADAPTERS,
    AVERAGE,
    BRIEF,
    DPO,
    EVERY_WAY,
    FOUR,
    HALF,
    MUON,
    OWN,
    SFT,
    WAYS,
    adapters_of,
    kinds_of,
    ways_of,
)

PAGE = Path(__file__).parents[2] / "docs/how-to/train-your-hugging-face-model.md"
KINDS = {"all weights": ("", "full"), "SFT": (SFT, "sft"), "DPO": (DPO, "dpo")}
KINDS |= {name: (name, "lora") for name in ADAPTERS}
KINDS |= {"SFT, LoRA": (f"{SFT} LoRA", "sft"), "DPO, LoRA": (f"{DPO} LoRA", "dpo")}
DIALS = {"Muon": (MUON, "muon"), "EMA": (AVERAGE, "ema"), "bfloat16": (HALF, "half")}
MESHES = {
    "one rank": "single",
    "DDP": "DDP",
    "FSDP2": "FSDP2",
    "HSDP": "HSDP",
    "TP": "TP",
    "DDP × TP": "DDP x TP",
    "FSDP2 × TP": "FSDP2 x TP",
    "CP": "CP",
    "DDP × CP": "DDP x CP",
    "FSDP2 × CP": "FSDP2 x CP",
    "PP": "PP",
    "DDP × PP": "DDP x PP",
    "FSDP2 × PP": "FSDP2 x PP",
    "PP × TP": "PP x TP",
}
Cell = tuple[str, str, str]  # way, family, mesh


def proven() -> dict[Cell, str]:
    """What the tests' parameters are, as cells; what they leave out is refused, of Muon, EMA and
    bfloat16 not compared (–)."""
    cells: dict[Cell, str] = {}
    for way, (kind, link) in (KINDS | DIALS).items():
        for family in (*FAMILIES, OWN):
            tried = (EVERY_WAY, FOUR) if family == BRIEF else (family,)
            run = {
                way: "nightly"
                for each in tried
                if kind in kinds_of(each)
                for way in ways_of(each, kind)
            }
            if family == BRIEF and kind in kinds_of(BRIEF):
                run |= dict.fromkeys(ways_of(BRIEF, kind), "every run")
            if not run:
                continue
            for mesh, name in MESHES.items():
                refused = "pairs"
                if adapters_of(kind) and link != "dpo":
                    refused = "own" if family == OWN and "PP" not in mesh else "adapters"
                otherwise = "–" if way in DIALS else f"[refused][{refused}]"
                cells[way, family, mesh] = f"[{run[name]}][{link}]" if name in run else otherwise
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
    others = set(WAYS) - set(MESHES.values()) - {"CP x TP"}  # below the table
    assert all("recomputed" in each for each in others)
