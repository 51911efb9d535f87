"""A pickle parsed as data: names and values only; nothing is imported, constructed or called.

``parse`` interprets the opcodes that torch writes into ``.metadata`` and into a tensor's file, and
no others; ``pickletools`` decodes them. A global becomes a ``PickledGlobal`` (two strings), a call
or an instance a ``PickledCall`` (the callable's name, its arguments, its state). A pickle cannot
reach a class or function of this process, so it can neither run code nor leave state behind,
whatever its opcodes. Time is linear in the bytes; memory is bounded by ``MAX_OBJECTS`` and the
bytes themselves.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection
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


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
PERSISTENT = PickledGlobal("", "persistent id")  # ``by`` of a reference to data outside the pickle


def parse(data: bytes, names: Collection[tuple[str, str]], where: Path) -> Any:
    """Return the content of the pickle ``data``: dicts, lists, tuples, plain values and
    ``PickledCall`` objects.

    ``names`` are the allowed globals; errors name the file ``where``. Raises InvalidInput for any
    other global, CorruptData for opcodes that torch does not write, and for a pickle that is
    damaged or too large.
    """
    machine = _Machine(names, where)
    at = 0
    try:
        for opcode, argument, position in pickletools.genops(data):
            at = position or 0
            machine.step(opcode.name, argument)
        return machine.result()
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptData(
            "pickle cannot be read as data",
            got=f"{type(error).__name__} at byte {at}: {str(error)[:200]}",
            wanted="what torch.save or DCP writes",
            where=where,
            do="Export or copy the checkpoint again.",
        ) from error


class _Machine:
    """The stack, marks and memo of a pickle; each opcode is one ``step``."""

    def __init__(self, names: Collection[tuple[str, str]], where: Path) -> None:
        self._names, self._where = names, where
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._made = 0

    def result(self) -> Any:
        (found,) = self._stack
        return found

    def step(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        match opcode:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "SHORT_BINUNICODE" | "BINUNICODE":
                self._make(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE":
                stack.append(_CONSTANTS[opcode])
            case "EMPTY_LIST" | "EMPTY_DICT":
                self._make([] if opcode == "EMPTY_LIST" else {})
            case "MARK":
                if len(self._marks) == MAX_DEPTH:
                    raise ValueError(f"more than {MAX_DEPTH} marks")
                self._marks.append(len(stack))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._make(tuple(self._take(len(stack) - int(opcode[-1]))))
            case "TUPLE":
                self._make(tuple(self._take(self._marks.pop())))
            case "APPEND" | "APPENDS":
                values = self._take(self._marks.pop() if opcode == "APPENDS" else len(stack) - 1)
                self._top(list).extend(values)
            case "SETITEM" | "SETITEMS":
                values = self._take(self._marks.pop() if opcode == "SETITEMS" else len(stack) - 2)
                self._set(self._top(dict), values)
            case "MEMOIZE":
                self._memo.append(stack[-1])
            case "BINPUT" | "LONG_BINPUT":
                self._put(argument)
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                self._name(*argument.split(" ", 1))
            case "STACK_GLOBAL":
                name, module = self._pop(str), self._pop(str)
                self._name(module, name)
            case "REDUCE" | "NEWOBJ":
                args, by = self._pop(tuple), self._pop(PickledGlobal)
                self._make(PickledCall(by, args))
            case "BINPERSID":
                self._make(PickledCall(PERSISTENT, self._pop(tuple)))
            case "BUILD":
                self._build(stack.pop())
            case _:
                raise ValueError(f"opcode {opcode}")

    def _make(self, value: Any) -> None:
        self._made += 1
        if self._made > MAX_OBJECTS:
            raise ValueError(f"more than {MAX_OBJECTS} objects")
        self._stack.append(value)

    def _take(self, first: int) -> list[Any]:
        """Remove and return the values from index ``first`` of the stack."""
        if first < 0:
            raise ValueError("stack is empty")
        found = self._stack[first:]
        del self._stack[first:]
        return found

    def _top(self, kind: type) -> Any:
        found = self._stack[-1]
        if type(found) is not kind:
            raise TypeError(f"{type(found).__name__} where a {kind.__name__} belongs")
        return found

    def _pop(self, kind: type) -> Any:
        self._top(kind)
        return self._stack.pop()

    def _set(self, into: dict[Any, Any], values: list[Any]) -> None:
        for key, value in zip(values[::2], values[1::2], strict=True):
            # Only keys of these types have a hash that a file cannot force to collide or recurse.
            if type(key) not in (str, PickledCall):
                raise TypeError(f"{type(key).__name__} as a key")
            into[key] = value

    def _build(self, state: Any) -> None:
        target = self._top(PickledCall)
        if state is None or target.state is not None:
            raise TypeError("an object is given its state twice, or none")
        target.state = state

    def _put(self, at: int) -> None:
        if at > len(self._memo):
            raise ValueError(f"memo {at} after {len(self._memo)}")
        self._memo[at : at + 1] = [self._stack[-1]]

    def _name(self, module: str, name: str) -> None:
        if (module, name) not in self._names:
            raise InvalidInput(
                "pickle names what is no part of a checkpoint",
                got=f"{module}.{name}"[:300],
                wanted="torch's own records only",
                where=self._where,
                do="Do not open it with other tools either, unless you know who made it.",
            )
        self._make(PickledGlobal(module, name))
