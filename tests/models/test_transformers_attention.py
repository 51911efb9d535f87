"""Models of transformers attend to the documents of a row one by one: the figures of masks, in
less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.models import Pretrained, attention, transformers_attention
from tests.support.hugging_face import FAMILIES, WINDOW, write_model

SIZES = [30, 3, 2, 18, WINDOW, 5]


def row_of(sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """Tokens, positions and documents of two rows that have the documents in another order."""
    rows = [sizes, sizes[::-1]]
    tokens_BT = torch.randint(256, (2, sum(sizes)), generator=torch.Generator().manual_seed(3))
    positions_BT = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in rows])
    names = torch.arange(len(sizes))
    documents_BT = torch.stack([names.repeat_interleave(torch.tensor(each)) for each in rows])
    return tokens_BT, positions_BT, documents_BT


@pytest.mark.parametrize("family", list(FAMILIES))
def test_documents_one_by_one_have_the_logits_and_gradients_of_a_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model = Pretrained.open(write_model(family, tmp_path)).load()
    found = []
    for call_pairs in (10**6, 1, 8**2):  # then each document alone, and short ones together
        monkeypatch.setitem(attention.CALL_PAIRS, "cpu", call_pairs)
        model.zero_grad()
        logits_BTV = model(*row_of(SIZES))
        logits_BTV.logsumexp(-1).mean().backward()
        found.append([logits_BTV.detach(), *(each.grad.clone() for each in model.parameters())])
    for masked, *apart in zip(*found, strict=True):
        for each in apart:
            torch.testing.assert_close(each, masked, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("sizes", [[50], [WINDOW + 1, 41, 2], None], ids=str)
def test_blocks_have_the_figures_of_a_mask_over_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, sizes: list[int] | None
) -> None:
    """None: a row that nothing cuts into documents, for which transformers makes its mask."""
    monkeypatch.setitem(attention.CALL_PAIRS, "cpu", 1)
    model = Pretrained.open(write_model(family, tmp_path)).load()
    given = row_of(sizes) if sizes else row_of([50])[:1]
    found, masks = [], []
    for block in (WINDOW, 64):
        monkeypatch.setattr(
            transformers_attention, "_block_of", lambda window, _, least=block: max(window, least)
        )
        monkeypatch.setattr(
            transformers_attention, "_in_blocks", seen(transformers_attention._in_blocks, masks)
        )
        model.zero_grad()
        logits_BTV = model(*given)
        logits_BTV.logsumexp(-1).mean().backward()
        found.append([logits_BTV.detach(), *(each.grad.clone() for each in model.parameters())])
        assert set(masks) == {(1, 1, WINDOW, 2 * WINDOW - 1)}, "no block where the mask is whole"
    for in_blocks, masked in zip(*found, strict=True):
        torch.testing.assert_close(in_blocks, masked, rtol=0, atol=1e-5)


def seen(called: Any, masks: list[tuple[int, ...]]) -> Any:
    """``called``, which adds the shapes of its masks to ``masks``."""

    def calling(*given: Any) -> Any:
        masks.append(tuple(given[3].shape))
        return called(*given)

    return calling


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation returns."""

    size = 0

    def __torch_dispatch__(
        self, called: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = called(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self.size = max(self.size, each.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", [1024]),
        ("llama", [500, 300, 200, 24]),
        ("mistral", [128] * 8),
        ("mistral", [1024]),
        ("mistral", None),
        ("gemma3_text", [1024]),
    ],
    ids=str,
)
def test_nothing_is_as_large_as_a_rows_square(
    tmp_path: Path, family: str, sizes: list[int] | None
) -> None:
    model = Pretrained.open(write_model(family, tmp_path, vocab_size=32)).load()
    tokens_BT, *rest = row_of(sizes or [1024])
    with Largest() as largest:
        model(tokens_BT % 32, *(rest if sizes else ())).logsumexp(-1).mean().backward()
    assert largest.size < 1024**2, "not even a mask of booleans"


def test_documents_one_by_one_stay_outside_of_a_compiled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lengths are others in each batch."""
    attention.exclude_from_compilation()
    monkeypatch.setitem(attention.CALL_PAIRS, "cpu", 1)
    model = Pretrained.open(write_model("mistral", tmp_path)).load()
    graphs: list[int] = []

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(len(list(graph.graph.nodes)))
        return graph.forward

    wanted = [model(*row_of(each)) for each in (SIZES, SIZES[::-1], [40, 24])]
    for each in model.model.layers:
        each.compile(backend=counting)
    with torch.no_grad():
        first = model(*row_of(SIZES))
        made = len(graphs)
        others = [model(*row_of(each)) for each in (SIZES[::-1], [40, 24])]
    assert made and len(graphs) == made, "other documents, and no graph more"
    for mine, its in zip([first, *others], wanted, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
