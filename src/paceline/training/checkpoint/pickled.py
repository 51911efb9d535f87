"""A pickle parsed as data: names and values only; nothing is imported, constructed or called.

``parse`` interprets the opcodes that torch writes into ``.metadata`` and into a tensor's file, and
no others. A global becomes a ``PickledGlobal`` (two strings), a call or an instance an
``PickledCall`` (the callable's name, its arguments, its state). A pickle cannot reach a class or
function of this process, so it can neither run code nor leave state behind, whatever its opcodes.
Time is linear in the bytes; memory is bounded by ``MAX_OBJECTS`` and the bytes themselves.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import CorruptData, InvalidInput

MAX_OBJECTS = 16_000_000  # strings, lists, dicts, tuples, objects: about 1.3 GB
MAX_DEPTH = 64  # of nested marks; DCP needs six


class PickledGlobal(NamedTuple):
    """The name of a class or function."""

    module: str
    name: str


class PickledCall:
    """A call that a pickle requests: ``by`` with ``args``, then ``state`` set on the result."""

    __slots__ = ("args", "by", "state")

    def __init__(self, by: PickledGlobal, args: tuple[Any, ...]) -> None:
        self.by, self.args = by, args
        self.state: Any = None


PERSISTENT = PickledGlobal("", "persistent id")  # ``by`` of a reference to data outside the pickle


def parse(data: bytes, names: Collection[tuple[str, str]], where: Path) -> Any:
    """Return the content of the pickle ``data``: dicts, lists, tuples, plain values and Objects.

    ``names`` are the allowed globals; errors name the file ``where``. Raises InvalidInput for any
    other global, CorruptData for opcodes that torch does not write, and for a pickle that is
    damaged or too large.
    """
    machine = _Machine(data, names, where)
    try:
        return machine.run()
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise CorruptData(
            "pickle cannot be read as data",
            got=f"{type(error).__name__} at byte {machine.at}: {str(error)[:200]}",
            wanted="what torch.save or DCP writes",
            where=where,
            do="Export or copy the checkpoint again.",
        ) from error


class _Machine:
    def __init__(self, data: bytes, names: Collection[tuple[str, str]], where: Path) -> None:
        self.at = 0
        self._data, self._names, self._where = data, names, where
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._made = 0

    def run(self) -> Any:
        data, stop = self._data, pickle.STOP[0]
        while (opcode := data[self.at]) != stop:
            self.at += 1
            if (step := _STEPS.get(opcode)) is None:
                raise ValueError(f"opcode {bytes([opcode])!r}")
            step(self)
        (found,) = self._stack
        return found

    def make(self, value: Any) -> None:
        self._made += 1
        if self._made > MAX_OBJECTS:
            raise ValueError(f"more than {MAX_OBJECTS} objects")
        self._stack.append(value)

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self._data):
            raise ValueError(f"{count} bytes wanted, {len(self._data) - self.at} left")
        found = self._data[self.at : end]
        self.at = end
        return found

    def number(self, layout: struct.Struct) -> int:
        (found,) = layout.unpack_from(self._data, self.at)
        self.at += layout.size
        return int(found)

    def pop(self, kind: type) -> Any:
        self.top(kind)
        return self._stack.pop()

    def popped_mark(self) -> list[Any]:
        at = self._marks.pop()
        found = self._stack[at:]
        del self._stack[at:]
        return found

    def top(self, kind: type) -> Any:
        found = self._stack[-1]
        if type(found) is not kind:
            raise TypeError(f"{type(found).__name__} where a {kind.__name__} belongs")
        return found

    # ── opcodes ──────────────────────────────────────────────────────────────────────────────────

    def skip(self, layout: struct.Struct) -> None:
        self.number(layout)

    def push_number(self, layout: struct.Struct) -> None:
        self._stack.append(self.number(layout))

    def push_float(self) -> None:
        self._stack.append(struct.unpack(">d", self.take(8))[0])

    def push_long(self) -> None:
        count = self.number(_U1)
        self._stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def push_text(self, layout: struct.Struct) -> None:
        self.make(self.take(self.number(layout)).decode())

    def push(self, value: object) -> None:
        self._stack.append(value)

    def put(self, layout: struct.Struct) -> None:
        at = self.number(layout)
        if at < len(self._memo):
            self._memo[at] = self._stack[-1]
        elif at == len(self._memo):
            self.memoize()
        else:
            raise ValueError(f"memo {at} after {len(self._memo)}")

    def memoize(self) -> None:
        self._memo.append(self._stack[-1])

    def get(self, layout: struct.Struct) -> None:
        self._stack.append(self._memo[self.number(layout)])

    def mark(self) -> None:
        if len(self._marks) == MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} marks")
        self._marks.append(len(self._stack))

    def pack(self, count: int) -> None:
        if len(self._stack) < count:
            raise ValueError("stack is empty")
        values = tuple(self._stack[-count:])
        del self._stack[-count:]
        self.make(values)

    def pack_marked(self) -> None:
        self.make(tuple(self.popped_mark()))

    def append(self) -> None:
        value = self._stack.pop()
        self.top(list).append(value)

    def extend(self) -> None:
        values = self.popped_mark()
        self.top(list).extend(values)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set(self.top(dict), key, value)

    def set_items(self) -> None:
        values = self.popped_mark()
        into = self.top(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            self._set(into, key, value)

    def _set(self, into: dict[Any, Any], key: Any, value: Any) -> None:
        # Only keys of these types have a hash that a file cannot force to collide (or to recurse).
        if type(key) not in (str, PickledCall):
            raise TypeError(f"{type(key).__name__} as a key")
        into[key] = value

    def name(self) -> None:
        module, end, rest = self._data[self.at : self.at + 512].partition(b"\n")
        name, end_of_name, _ = rest.partition(b"\n")
        if not end or not end_of_name:
            raise ValueError("a global's name does not end")
        self.at += len(module) + len(name) + 2
        self._name(module.decode(), name.decode())

    def name_on_stack(self) -> None:
        name, module = self.pop(str), self.pop(str)
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        if (module, name) not in self._names:
            raise InvalidInput(
                "pickle names what is no part of a checkpoint",
                got=f"{module}.{name}"[:300],
                wanted="torch's own records only",
                where=self._where,
                do="Do not open it with other tools either, unless you know who made it.",
            )
        self.make(PickledGlobal(module, name))

    def call(self) -> None:
        args, by = self.pop(tuple), self.pop(PickledGlobal)
        self.make(PickledCall(by, args))

    def persistent(self) -> None:
        self.make(PickledCall(PERSISTENT, self.pop(tuple)))

    def build(self) -> None:
        state = self._stack.pop()
        target = self.top(PickledCall)
        if state is None or target.state is not None:
            raise TypeError("an object is given its state twice, or none")
        target.state = state


_U1, _U2, _U4, _U8, _I4 = (struct.Struct(each) for each in ("<B", "<H", "<I", "<Q", "<i"))

_STEPS: dict[int, Callable[[_Machine], None]] = {
    code[0]: step
    for code, step in {
        pickle.PROTO: lambda m: m.skip(_U1),
        pickle.FRAME: lambda m: m.skip(_U8),
        pickle.MARK: _Machine.mark,
        pickle.NONE: lambda m: m.push(None),
        pickle.NEWTRUE: lambda m: m.push(True),
        pickle.NEWFALSE: lambda m: m.push(False),
        pickle.BININT: lambda m: m.push_number(_I4),
        pickle.BININT1: lambda m: m.push_number(_U1),
        pickle.BININT2: lambda m: m.push_number(_U2),
        pickle.LONG1: _Machine.push_long,
        pickle.BINFLOAT: _Machine.push_float,
        pickle.SHORT_BINUNICODE: lambda m: m.push_text(_U1),
        pickle.BINUNICODE: lambda m: m.push_text(_U4),
        pickle.EMPTY_TUPLE: lambda m: m.push(()),
        pickle.EMPTY_LIST: lambda m: m.make([]),
        pickle.EMPTY_DICT: lambda m: m.make({}),
        pickle.TUPLE1: lambda m: m.pack(1),
        pickle.TUPLE2: lambda m: m.pack(2),
        pickle.TUPLE3: lambda m: m.pack(3),
        pickle.TUPLE: _Machine.pack_marked,
        pickle.APPEND: _Machine.append,
        pickle.APPENDS: _Machine.extend,
        pickle.SETITEM: _Machine.set_item,
        pickle.SETITEMS: _Machine.set_items,
        pickle.MEMOIZE: _Machine.memoize,
        pickle.BINPUT: lambda m: m.put(_U1),
        pickle.LONG_BINPUT: lambda m: m.put(_U4),
        pickle.BINGET: lambda m: m.get(_U1),
        pickle.LONG_BINGET: lambda m: m.get(_U4),
        pickle.GLOBAL: _Machine.name,
        pickle.STACK_GLOBAL: _Machine.name_on_stack,
        pickle.REDUCE: _Machine.call,
        pickle.NEWOBJ: _Machine.call,
        pickle.BINPERSID: _Machine.persistent,
        pickle.BUILD: _Machine.build,
    }.items()
}
