"""A published base is refused in one line, by its config and headers, before a node is busy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config import DataSettings, load_profile
from paceline.data import Snapshot, build_snapshot
from paceline.errors import InvalidInput, PacelineError, PermanentError
from paceline.flows import lifecycle, train
from paceline.manifest import build_manifest, write_manifest
from paceline.manifest.finite import WeightsScan
from paceline.manifest.publish import record_unsound
from paceline.models import config_for, file_sha256, new_model, save_model
from paceline.storage import DiskStore
from paceline.tasks._support.run import Run
from paceline.tasks.train import require_base
from paceline.training import base_check
from tests.support.hugging_face import (
    CHATML,
    change_config as config,
    change_weights as weights,
    write_model,
    write_tokenizer,
)

WITHOUT = """
import sys
from importlib.machinery import PathFinder

lacking, model, snapshot = sys.argv[1].split(","), *sys.argv[2:]
found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name in lacking else found(name, *rest)
from paceline.config import load_profile
from paceline.data import load_snapshot
from paceline.errors import PacelineError
from paceline.storage import DiskStore
from paceline.training import check_base

store = DiskStore()
lora = {"training.lora.target_modules": "q_proj"}
for more in ({}, {"training.mesh.tp": "3", "training.ranks": "3"}, lora):
    profile = load_profile("local", {"model.context": "32"} | more)
    try:
        check_base(
            model, store, profile.training, profile.data, 32, load_snapshot(snapshot, store)
        )
        print("passed")
    except PacelineError as error:
        print(error.one_line())
"""

WEIGHTS, NORM = "model.safetensors", "model.norm.weight"


def ours(directory: Path, *, context: int = 32, **changes: Any) -> None:
    for each in directory.iterdir():
        each.unlink()
    made = config_for(20_000, context, **changes)
    save_model(new_model(made, 1), made, directory)


ANSWERS = {"chat": {"completion": "it is"}, "pairs": {"chosen": "it is", "rejected": "what"}}
DPO = {"training.dpo.beta": "0.1"}
TALKS: dict[str, tuple[str, dict[str, str], str]] = {
    "chat": ("chat", {}, ""),
    "pairs": ("pairs", DPO, ""),
    "DPO on chat": ("chat", DPO, r"got training\.dpo and conversations"),
    "pairs without DPO": ("pairs", {}, r"got pairs without training\.dpo"),
    "windows": ("chat", {"data.batching": "windows"}, r"Set data\.batching=packed"),
    "longer": ("chat", {"model.context": "16"}, "a conversation is longer than a row"),
}
COLUMNS = {"data.columns": "2"}
LORA = {"training.lora.target_modules": "nope"}
CASES: dict[str, tuple[Callable[[Path], object], dict[str, str], str]] = {
    "sound": (lambda _: None, {}, ""),
    # its bytes are read by its publish, and by the ranks
    "NaN": (lambda path: weights(path, lambda t: t[NORM].fill_(torch.nan)), {}, ""),
    "ours": (ours, {}, ""),
    "ours, a layer": (ours, LORA, "nope"),
    "a layer": (lambda _: None, LORA, "nope"),
    "context": (lambda _: None, {"model.context": "4096"}, "at most 64"),
    "mesh": (lambda _: None, {"training.mesh.tp": "3", "training.ranks": "3"}, "mesh"),
    "activation": (lambda path: config(path, hidden_act="odd"), {}, "hidden_act = 'odd'"),
    "tensor": (lambda path: weights(path, lambda t: t.pop(NORM)), {}, f"got {NORM}"),
    "tokenizer": (lambda path: (path / "tokenizer.json").write_text("{}"), {}, "tokenizer"),
    "cut short": (lambda path: (path / WEIGHTS).write_bytes(b"\x10\0\0"), {}, WEIGHTS),
    "columns": (lambda _: None, {"training.batch_sequences": "5"} | COLUMNS, "divide"),
    "ours, no DPO": (ours, {"training.dpo.beta": "0.1"}, "got training.dpo and text"),
    # families of experts: nothing would cut or balance them
    "Mixtral": (lambda path: config(path, model_type="mixtral"), {}, "got model_type 'mixtral'"),
    "Qwen3-MoE": (lambda path: config(path, model_type="qwen3_moe"), {}, "'qwen3_moe'"),
    "pickled": (lambda path: (path / "pytorch_model.bin").touch(), {}, "pytorch_model.bin"),
}


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    root = tmp_path_factory.mktemp("data")
    for number in range(8):
        (root / f"{number}.txt").write_text(f"line {number}\n" * 100)
    return build_snapshot(str(root), (root / "built").as_uri(), DataSettings(), DiskStore())


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a tokenizer's file, and URLs of conversations and of pairs that it tokenised."""
    root, urls = tmp_path_factory.mktemp("talks"), {}
    write_tokenizer(root, ["what is it, and what it is"], 290, template=CHATML, end="<|im_end|>")
    for kind, answers in ANSWERS.items():
        rows = [{"key": f"{n}", "prompt": f"what is {n}?", **answers} for n in range(20)]
        source, tokenizer = root / f"{kind}.jsonl", root / "tokenizer.json"
        source.write_text("".join(json.dumps(each) + "\n" for each in rows))
        settings = DataSettings(format="jsonl", tokenizer=str(tokenizer))
        urls[kind] = build_snapshot(
            str(source), (root / kind).as_uri(), settings, DiskStore()
        ).url  # fmt: skip
    return tokenizer, urls


@pytest.mark.parametrize("layout", ["ours", "transformers"])
@pytest.mark.parametrize("name", list(TALKS))
def test_conversations_that_do_not_fit_the_way_are_found_without_torch(
    talks: tuple[Path, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    layout: str,
) -> None:
    (kind, changed, words), (tokenizer, urls) = TALKS[name], talks
    size = int(changed.get("model.context", 256))
    base = write_model(
        "llama", tmp_path / "models/base/v1", vocab_size=290, max_position_embeddings=256
    )
    if layout == "ours":
        ours(base, context=size, vocabulary=290, tokenizer_digest=file_sha256(tokenizer))
    else:
        (base / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    monkeypatch.setattr(base_check, "is_installed", lambda _: False)  # as on the coordinator
    defaults = {"data.batching": "bucketed", "model.context": "256"}
    profile = load_profile("local", defaults | changed)
    with pytest.raises(InvalidInput, match=words) if words else nullcontext():
        require_base(run_of(tmp_path), profile, "base", "v1", urls[kind])


def run_of(root: Path) -> Any:
    return SimpleNamespace(
        runtime=SimpleNamespace(models_url=(root / "models").as_uri()),
        store=DiskStore(),
        checked=set(),
    )


@pytest.mark.parametrize("name", list(CASES))
def test_what_cannot_be_trained_is_found_without_the_weights(
    snapshot: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spoil, changed, words = CASES[name]
    spoil(write_model("llama", tmp_path / "models" / "base" / "v1", vocab_size=257))
    profile = load_profile("local", {"model.context": "32"} | changed)
    monkeypatch.setattr(  # a process of its own takes seconds
        base_check, "check_in_process", lambda _, asked, *__, **___: base_check.require_base(asked)
    )
    if not words:
        require_base(run_of(tmp_path), profile, "base", "v1", snapshot.url)
        return
    with pytest.raises(PacelineError) as caught:
        require_base(run_of(tmp_path), profile, "base", "v1", snapshot.url)
    assert words in caught.value.one_line()
    assert "\n" not in caught.value.one_line()
    assert isinstance(caught.value, PermanentError), "never tried again"


def test_a_process_of_its_own_names_where_the_base_is_published(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    published = write_model("llama", tmp_path / "models" / "base" / "v1", vocab_size=257)
    profile = load_profile("local", {"model.context": "4096"})
    with pytest.raises(InvalidInput, match=f"at most 64.*at {published.as_uri()}"):
        require_base(run_of(tmp_path), profile, "base", "v1", snapshot.url)


@pytest.mark.parametrize(
    ("layout", "lacking"),
    [("ours", "peft,transformers"), ("transformers", "peft,torch,transformers")],
)
def test_a_machine_without_the_libraries_checks_what_it_can(
    snapshot: Snapshot, tmp_path: Path, lacking: str, layout: str
) -> None:
    base = write_model("llama", tmp_path / "base", vocab_size=257)
    if layout == "ours":
        ours(base)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, lacking, base.as_uri(), snapshot.url],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, adapted = done.stdout.splitlines()
    assert first == adapted == "passed"
    assert ("mesh" in second) if layout == "ours" else (second == "passed"), second


def test_a_version_that_is_not_published_is_left_to_distribution(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    require_base(run_of(tmp_path), load_profile("local", {}), "base", "v1", snapshot.url)


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t[NORM].fill_(torch.nan), f"not finite.*{NORM} in {WEIGHTS}"),
        (lambda t: t.update({HEAD: t[TABLE] + 1}), f"tied weights differ.*{HEAD} is not {TABLE}"),
    ],
    ids=["NaN", "tied"],
)
def test_what_its_publish_found_is_refused(
    snapshot: Snapshot, tmp_path: Path, spoil: Callable[[Any], object], words: str
) -> None:
    base = write_model("qwen2", tmp_path / "models" / "base" / "v1", vocab_size=257)
    weights(base, spoil)
    profile = load_profile("local", {"model.context": "32"})
    ways: dict[str, Any] = {"model_id": "base", "version": "v1", "link_mbit": 100.0}
    manifest = build_manifest(base, **ways)
    write_manifest(base, manifest)
    scan = WeightsScan()
    scan.update(memoryview((base / WEIGHTS).read_bytes()))
    record_unsound(base.as_uri(), DiskStore(), manifest, {WEIGHTS: scan})
    with pytest.raises(InvalidInput, match=f"{words}.*{base.as_uri()}"):
        require_base(run_of(tmp_path), profile, "base", "v1", snapshot.url)


def test_a_base_is_checked_once_in_a_run(
    snapshot: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("paceline.tasks.train.check_base", lambda *given: asked.append(given))
    run = run_of(tmp_path)
    packed = {"data.batching": "packed"}
    for each in ({}, {}, {"training.steps": "7"}, {"model.context": "32"}, packed, {}):
        require_base(run, load_profile("local", each), "base", "v1", snapshot.url)
    assert len(asked) == 4, "the same base, data and settings are not asked again"


@pytest.mark.parametrize("flow", [train, lifecycle], ids=["train", "lifecycle"])
def test_a_base_is_checked_before_nodes_are_busy(
    monkeypatch: pytest.MonkeyPatch, flow: Any
) -> None:
    link = SimpleNamespace(user=("default", ""), sweep=None, hosts=["a"])
    profile = load_profile("local")
    run = SimpleNamespace(
        state_dir="", run_id="run-20261120-153600-9f3a1c",
        runtime=SimpleNamespace(profile=profile), manifest=lambda _: None,
    )  # fmt: skip

    def refused(*_: object) -> None:
        raise InvalidInput("it does not fit")

    def busy(*_: object, **__: object) -> None:
        pytest.fail("a node is busy")

    monkeypatch.setattr(Run, "open", lambda *_: run)
    passed = {
        "recorded": lambda *_: nullcontext(),
        "linked": lambda *_: nullcontext(link),
        "with_job_settings": lambda *_: profile,
        "exporting": lambda *_, **__: profile,
        "prepare_inputs": lambda *_, **__: SimpleNamespace(
            model_id="m", version="v1", snapshot_url="u"
        ),
    }
    ignored = (
        "permitted_snapshot", "require_own_expectations", "published_tasks", "profile_of",
        "require_judgeable", "require_one_process", "published_url",
    )  # fmt: skip
    for name in (*passed, *ignored):
        if hasattr(flow, name):
            monkeypatch.setattr(flow, name, passed.get(name, lambda *_: None))
    monkeypatch.setattr(flow, "require_base", refused)
    monkeypatch.setattr(flow, "distribute_model", busy)
    with pytest.raises(InvalidInput, match="it does not fit"):
        if flow is train:
            train.train_model.fn("m", "v1", "u")
        else:
            lifecycle.run_lifecycle.fn()
