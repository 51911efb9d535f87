"""A DCP directory of unknown origin is read as data: no pickle in it runs, keeps state or grows."""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.errors import CorruptData, InvalidInput, PacelineError
from paceline.training.checkpoint import read_dcp

W = torch.arange(6.0).reshape(2, 3)
WANTED = {"w": torch.empty(2, 3, device="meta")}
DATA = "__0_0.distcp"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Touch:
    """A pickle of it creates a file as it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A directory that dcp.save wrote, of one tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"w": W}, checkpoint_id=tmp_path / "there", no_dist=True)
    return tmp_path / "there"


@pytest.fixture(autouse=True)
def unchanged_torch() -> Iterator[None]:
    """A function and a class that a pickle may name are as they were."""
    function: Any = torch.serialization._get_layout
    layout = function("torch.strided")
    assert vars(function).keys() == {"cache"}
    yield
    planted = vars(function).keys() | {"planted"} & vars(TensorStorageMetadata).keys()
    same = function.cache.get("torch.strided") is layout
    vars(function).clear()
    function.cache = {}
    if hasattr(TensorStorageMetadata, "planted"):
        del TensorStorageMetadata.planted
    assert same
    assert planted == {"cache"}


# ── pickles, assembled ───────────────────────────────────────────────────────────────────────────


def name(module: str, what: str) -> bytes:
    return f"c{module}\n{what}\n".encode()


def text(said: str) -> bytes:
    return b"X" + struct.pack("<I", len(said)) + said.encode()


def of(value: object) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def dict_of(**values: bytes) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in values.items()) + b"u"


def record(what: str, **fields: bytes) -> bytes:
    return name(records.__name__, what) + b")\x81" + dict_of(**fields) + b"b"


GET_LAYOUT = name("torch.serialization", "_get_layout")
STRIDED = GET_LAYOUT + b"(" + text("torch.strided") + b"tR"
TENSOR = of(
    TensorStorageMetadata(
        records.TensorProperties(torch.float32),
        torch.Size([2, 3]),
        [records.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))],
    )
)


def metadata(tensors: bytes, storage: bytes, planner: bytes = b"N") -> bytes:
    return (
        b"\x80\x02"
        + record(
            "Metadata", state_dict_metadata=tensors, storage_data=storage, planner_data=planner
        )
        + b"."
    )


def storage(there: Path) -> dict[Any, Any]:
    """Return where the tensor lies, and as a value of the same name a pickle that runs."""
    evil = pickle.dumps(Touch(there / "ran"))
    (there / "evil.distcp").write_bytes(evil)
    real: dict[Any, Any] = FileSystemReader(there).read_metadata().storage_data
    return real | {records.MetadataIndex("w"): _StorageInfo("evil.distcp", 0, len(evil))}


def a_function_keeps_state_for_a_second_load(there: Path) -> bytes:
    """At a second load ``_get_layout`` returns "w", and the tensor becomes a value to unpickle."""
    plant = dict_of(cache=b"}(" + text("torch.strided") + text("w") + b"u")
    tensors = b"}(" + text("w") + TENSOR + STRIDED + of(records.BytesStorageMetadata()) + b"u"
    return metadata(tensors, of(storage(there)), GET_LAYOUT + plant + b"b")


def a_function_is_given_an_attribute(there: Path) -> bytes:
    planted = GET_LAYOUT + dict_of(planted=b"\x88") + b"b"
    return metadata(b"}" + text("w") + TENSOR + b"s", of(storage(there)), planted)


def a_class_is_given_an_attribute(there: Path) -> bytes:
    cls = name(records.__name__, "TensorStorageMetadata")
    planted = cls + b"N" + dict_of(planted=b"\x88") + b"\x86b"
    return metadata(b"}" + text("w") + TENSOR + b"s", of(storage(there)), planted)


def a_call_of_what_a_call_returned(there: Path) -> bytes:
    cache = dict_of(run=name("torch.distributed.checkpoint.filesystem", "_StorageInfo"))
    plant = GET_LAYOUT + dict_of(cache=cache) + b"b"
    chain = b"(" + text("run") + b"tR(" + text(DATA) + b"K\0K\1tR"
    return metadata(b"}" + text("w") + TENSOR + b"s", of(storage(there)), plant + chain)


def a_memo_that_swaps_a_record(there: Path) -> bytes:
    """Memo 0 is a record as it is checked, and a function where it is used again."""
    swap = GET_LAYOUT + b"q\0" + record("StorageMeta") + b"q\0" + b"\x86"
    again = b"h\0" + dict_of(planted=b"\x88") + b"b"
    chained = swap + again + b"h\0" + dict_of(planted=b"\x88") + b"b\x87"
    return metadata(b"}" + text("w") + TENSOR + b"s", of(storage(there)), chained)


def a_call_of_anything_else(there: Path) -> bytes:
    return pickle.dumps(Touch(there / "ran"))


def a_class_with_its_instance_opcode(there: Path) -> bytes:
    return b"(" + text(str(there / "ran")) + b"ipathlib\nPath\n."


def a_name_of_the_extension_registry(_there: Path) -> bytes:
    return b"\x80\x02\x82\x01."


def a_value_that_is_no_metadata(_there: Path) -> bytes:
    return b"\x80\x02" + STRIDED + b"."


CRAFTED = [
    a_function_keeps_state_for_a_second_load,
    a_function_is_given_an_attribute,
    a_class_is_given_an_attribute,
    a_call_of_what_a_call_returned,
    a_memo_that_swaps_a_record,
    a_call_of_anything_else,
    a_class_with_its_instance_opcode,
    a_name_of_the_extension_registry,
    a_value_that_is_no_metadata,
]


@pytest.mark.parametrize("craft", CRAFTED)
def test_crafted_metadata_are_refused_and_leave_nothing(
    there: Path, craft: Callable[[Path], bytes]
) -> None:
    (there / ".metadata").write_bytes(craft(there))
    try:
        with pytest.raises((CorruptData, InvalidInput)) as caught:
            read_dcp(there, WANTED)
    finally:
        assert not (there / "ran").exists(), "the pickle ran"
    assert caught.value.got
    assert ".metadata" in str(caught.value.where)


HUGE: dict[str, bytes] = {
    "memo index": b"Nr\xff\xff\xff\xff.",
    "memo index of a known object": b"N\x94r\xff\xff\xff\x7f.",
    "memo without end": b"N" + b"\x94" * 100 + b"j\xff\xff\xff\xff.",
    "text": b"X\xff\xff\xff\xffabc.",
    "frame": b"\x95" + b"\xff" * 8 + b".",
    "bytes": b"\x8e" + b"\xff" * 7 + b"\x7f.",
    "marks": b"(" * 100_000 + b".",
    "integer": b"\x8b\xff\xff\xff\x7f.",
    "key of nested tuples": b"})" + b"\x85" * 200_000 + b"Ns.",
}


@pytest.mark.parametrize("raw", HUGE.values(), ids=HUGE)
def test_metadata_that_claim_more_than_they_hold_take_no_memory(there: Path, raw: bytes) -> None:
    (there / ".metadata").write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData):
            read_dcp(there, WANTED)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 * len(raw) + 4 * 2**20


def test_metadata_that_are_too_large_are_refused_unread(there: Path) -> None:
    with (there / ".metadata").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InvalidInput, match="too large"):
        read_dcp(there, WANTED)


def test_no_unpickler_of_python_or_torch_sees_a_checkpoint(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("a checkpoint reached an unpickler")

    for module, what in [
        (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")
    ]:  # fmt: skip
        monkeypatch.setattr(module, what, called)
    assert torch.equal(read_dcp(there, WANTED).weights["w"], W)


# ── the files of tensors ─────────────────────────────────────────────────────────────────────────


def pointed_at(there: Path, raw: bytes, **changes: Any) -> None:
    """Make ``raw`` what ``there`` holds for its tensor."""
    found = FileSystemReader(there).read_metadata()
    (index,) = found.storage_data
    (there / DATA).write_bytes(raw)
    fields: dict[str, Any] = {"relative_path": DATA, "offset": 0, "length": len(raw)} | changes
    found.storage_data = {index: _StorageInfo(**fields)}
    (there / ".metadata").write_bytes(pickle.dumps(found))


def saved(value: object) -> bytes:
    raw = io.BytesIO()
    torch.save(value, raw)
    return raw.getvalue()


def zipped(raw: bytes, how: int = zipfile.ZIP_STORED, **changes: bytes) -> bytes:
    """Return the archive ``raw`` with other entries, or with its entries compressed."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as before, zipfile.ZipFile(made, "w", how) as after:
        for each in before.namelist():
            after.writestr(each, changes.get(Path(each).stem, before.read(each)))
    return made.getvalue()


def test_a_tensor_that_runs_code_is_refused(there: Path) -> None:
    pointed_at(there, saved({"w": W}))
    with pytest.raises(CorruptData):
        read_dcp(there, WANTED)
    pointed_at(there, zipped(saved(W), data=pickle.dumps(Touch(there / "ran"))))
    with pytest.raises(InvalidInput, match="no part of a checkpoint"):
        read_dcp(there, WANTED)
    assert not (there / "ran").exists()


def test_an_archive_that_inflates_is_refused_before_it_does(there: Path) -> None:
    bomb = zipped(saved(torch.zeros(1 << 22)), zipfile.ZIP_DEFLATED)
    pointed_at(there, bomb)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData, match="compressed"):
            read_dcp(there, WANTED)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20


def test_an_archive_with_a_directory_of_many_entries_is_refused_unread(there: Path) -> None:
    made = io.BytesIO(saved(W))
    with zipfile.ZipFile(made, "a") as archive:
        for number in range(3000):
            archive.writestr(f"archive/extra/{number}", b"")
    pointed_at(there, made.getvalue())
    with pytest.raises(CorruptData, match="directory of"):
        read_dcp(there, WANTED)


@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        (saved(W.double()), {}),
        (saved(W.t()), {}),
        (saved(W[:1]), {}),
        (zipped(saved(W), byteorder=b"big"), {}),
        (saved(W)[:-30], {}),
        (b"no archive", {}),
        (saved(W), {"length": 1 << 40}),
        (saved(W), {"offset": -1}),
        (saved(W), {"offset": 8}),
        (saved(W), {"transform_descriptors": ["stream.zstd"]}),
        (saved(torch.nn.Parameter(W)), {}),
    ],
    ids=[
        "dtype", "shape", "part", "byte order", "cut", "no archive", "length", "negative",
        "offset", "extension", "parameter",
    ],
)  # fmt: skip
def test_a_file_that_is_not_the_tensor_of_the_metadata_is_refused(
    there: Path, raw: bytes, changes: dict[str, Any]
) -> None:
    pointed_at(there, raw, **changes)
    with pytest.raises((CorruptData, InvalidInput)):
        read_dcp(there, WANTED)


@pytest.mark.parametrize(
    "path", ["../outside.distcp", "/etc/passwd", "sub/x", "..", ".metadata", ""]
)
def test_a_tensor_lies_in_the_directory_itself(there: Path, path: str) -> None:
    (there.parent / "outside.distcp").write_bytes(saved(W))
    pointed_at(there, saved(W), relative_path=path)
    with pytest.raises(InvalidInput, match="a file elsewhere"):
        read_dcp(there, WANTED)


@pytest.mark.parametrize(
    "rows", [[(0, 1)], [(0, 1), (0, 1)], [(0, 1), (1, 2)], [(0, 1), (5, 1)]],
    ids=["a part", "the same twice", "more than there is", "outside"],
)  # fmt: skip
def test_boxes_that_do_not_tile_a_tensor_are_refused(there: Path, rows: list[Any]) -> None:
    """Else what lay in memory before would become weights."""
    found = FileSystemReader(there).read_metadata()
    raw = saved(W[:1].clone())
    (there / DATA).write_bytes(raw)
    part = _StorageInfo(DATA, 0, len(raw))
    boxes = [(torch.Size([at, 0]), torch.Size([n, 3])) for at, n in rows]
    described: Any = found.state_dict_metadata["w"]
    described.chunks = [records.ChunkStorageMetadata(*each) for each in boxes]
    found.storage_data = {records.MetadataIndex("w", at): part for at, _ in boxes}
    (there / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CorruptData):
        read_dcp(there, WANTED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("turned", [False, True])
def test_what_dcp_saves_is_read_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, turned: bool
) -> None:
    tensor: Tensor = torch.randn(4, 5).mul(8).to(dtype)
    tensor = tensor.t() if turned else tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"w": tensor, "scalar": torch.tensor(3).to(dtype), "none": torch.empty(0, 3)}
        save(state | {"said": [1, "x"]}, checkpoint_id=tmp_path, no_dist=True)
    wanted = {key: torch.empty_like(each, device="meta") for key, each in state.items()}
    found = read_dcp(tmp_path, wanted)
    for key, each in state.items():
        raw = found.weights[key].contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(raw, each.contiguous().reshape(-1).view(torch.uint8))


def test_what_is_refused_is_named(there: Path) -> None:
    (there / ".metadata").write_bytes(pickle.dumps(Touch(there / "ran")))
    with pytest.raises(PacelineError) as caught:
        read_dcp(there, WANTED)
    assert caught.value.do
    assert str(caught.value.where).endswith(".metadata")
