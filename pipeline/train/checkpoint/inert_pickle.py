"""Pickles read as data: nothing that they name is imported, and nothing is called.

To unpickle is to import what a pickle names, and to call it. Here names stay names, and what a pickle would make is an
`InertObject` with the name of its class.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.train.torch_compat.checkpoint_files import PythonUnpickler

PLAIN_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
)
"""Operations of numbers, strings, lists, tuples, tables and objects."""


@dataclass(eq=False, slots=True)
class InertObject:
    """An object that a pickle would make: its class or the function that makes it, the arguments, and its state."""

    kind: str
    arguments: Any = ()
    state: Any = None

    def __repr__(self) -> str:
        # Not of its parts, which may be shared and of any size.
        return f"<{self.kind}>"


class InertName(str):
    """Name of a class or function."""

    __slots__ = ()


class InertUnpickler(PythonUnpickler):  # type: ignore[misc]
    """Makes inert objects, numbers, strings, lists, tuples and tables, and nothing else.

    Python's own implementation, since that in C takes memory for any place in its memo that a pickle asks for, and
    computes the hash of any key, which for a tuple of tuples may never end. A subclass says by `dispatch` which
    operations there are, by `find_class` which names, and by `set_item` which keys.
    """

    dispatch: ClassVar[dict[int, Any]] = {}

    @classmethod
    def operations(cls, opcodes: Iterable[bytes]) -> dict[int, Callable[[Any], None]]:
        """The table of a subclass, with what makes objects replaced."""
        table = {code[0]: PythonUnpickler.dispatch[code[0]] for code in opcodes}
        return table | {
            pickle.NEWOBJ[0]: cls._make,
            pickle.REDUCE[0]: cls._make,
            pickle.BUILD[0]: cls._build,
            pickle.SETITEM[0]: cls._set_item,
            pickle.SETITEMS[0]: cls._set_items,
        }

    def check_call(self, kind: InertName, arguments: Any) -> None:
        """Refuse a call by an exception; by default none is, since nothing is called."""

    def set_item(self, target: Any, key: Any, value: Any) -> None:
        """Set an item of a table; a `ValueError` refuses the key."""
        raise NotImplementedError

    def _make(self) -> None:
        arguments, kind = self.stack.pop(), self.stack[-1]
        if type(kind) is not InertName:
            raise ValueError("it calls something that is not a class")
        self.check_call(kind, arguments)
        self.stack[-1] = InertObject(str(kind), arguments)

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not InertObject:
            raise ValueError("it sets the state of something that has none")
        made.state = state

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_item(self.stack[-1], key, value)

    def _set_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.set_item(self.stack[-1], key, value)
