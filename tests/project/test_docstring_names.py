"""A name that a docstring quotes exists in the code."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "paceline"
# A name with a capital, a dot or an underscore within.
QUOTED = re.compile(r"``((?=\w*(?:[a-z][A-Z]|[._][A-Za-z]))[A-Za-z][\w.]*)(?:\(.*?\))?``")
DOCSTRING = re.compile(r'^ *r?"""(.*?)"""$', re.MULTILINE | re.DOTALL)
OTHERS = {
    "codeRef",
    "file_sd_configs",
    "get_optimizer_state_dict",
    "torch.nn.utils.clip_grad_norm_",
}


def test_every_name_that_a_docstring_quotes_exists() -> None:
    quoted, known = [], set[str]()
    for path in sorted(SOURCE.rglob("*.py")):
        code = path.read_text(encoding="utf-8")
        known |= {path.stem, *path.relative_to(SOURCE).parts}
        for text in DOCSTRING.findall(code):
            quoted += [(path, name) for name in QUOTED.findall(text)]
        known.update(re.findall(r"[A-Za-z_]\w*", DOCSTRING.sub("", code)))
    assert len(quoted) > 500
    missing = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path, name in quoted
        if name not in OTHERS and not set(name.split(".")) <= known
    ]
    assert not missing


def test_names_are_told_from_words() -> None:
    quoted = "``GoneClass.run``, ``gone_call(1)`` in ``relay.gone``; no ``word``, ``1.0``, ``--to``"
    assert QUOTED.findall(quoted) == ["GoneClass.run", "gone_call", "relay.gone"]
