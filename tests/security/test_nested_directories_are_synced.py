"""Every directory between a model's root and its files is durable before the model is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.manifest import build_manifest, verify_directory
from paceline.relay.store import Store
from paceline.system import make_directories, sync_tree
from tests.relay.test_store import fill
from tests.support.powerloss import Disk

NESTED = "a/b/c.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    (model / NESTED).parent.mkdir(parents=True)
    (model / NESTED).write_bytes(b"weights" * 5000)
    (model / "a" / "d" / "e" / "f").mkdir(parents=True)
    (model / "a" / "d" / "e" / "f" / "g.json").write_text("{}")
    return model


def test_a_published_nested_model_outlasts_a_power_loss(tmp_path: Path, model: Path) -> None:
    root = tmp_path / "store"
    manifest = build_manifest(model, model_id="m", version="v1", link_mbit=1000)
    store, disk = Store(root), Disk(root)
    disk.names[disk._node(root.stat().st_ino)] = disk._entries(root)  # the store's own are old
    with disk.watching():
        staging = store.open(manifest)
        fill(staging, model)
        store.publish(staging)
    for seed in range(6):
        disk.after(tmp_path / f"after-{seed}", seed)
        verify_directory(tmp_path / f"after-{seed}" / "models" / "m" / "v1", manifest)
    staging.close()
    store.close()


def test_marks_are_believed_only_where_nested_names_are_durable(
    tmp_path: Path, model: Path
) -> None:
    """The first half arrives, the power goes: what is marked as held is there."""
    root = tmp_path / "store"
    manifest = build_manifest(model, model_id="m", version="v1", link_mbit=1000)
    store, disk = Store(root), Disk(root)
    disk.names[disk._node(root.stat().st_ino)] = disk._entries(root)
    with disk.watching():
        staging = store.open(manifest)
        fill(staging, model, range(1))
        staging.commit()
    for seed in range(6):
        after = tmp_path / f"after-{seed}"
        disk.after(after, seed)
        assert (after / "staging" / manifest.digest / "data" / NESTED).is_file()
    staging.close()
    store.close()


def test_a_tree_and_its_new_parents_outlast_a_power_loss(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk(root)
    with disk.watching():
        make_directories(root / "x" / "y" / "z" / "w")
        (root / "x" / "y" / "z" / "w" / "file").write_bytes(b"1")
        sync_tree(root / "x" / "y" / "z")
    for seed in range(6):
        disk.after(tmp_path / f"after-{seed}", seed)
        assert (tmp_path / f"after-{seed}" / "x/y/z/w/file").read_bytes() == b"1"
