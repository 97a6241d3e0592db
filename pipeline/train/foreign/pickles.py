"""Pickles of other programs, read as data: nothing that they name is imported, and nothing is called.

A settings file of another program is a pickle of its own classes. Here each object becomes an `InertObject` with the
name of its class, so it is read where that program is not installed, and a file of a stranger runs no code.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.train.torch_compat.checkpoint_files import PythonUnpickler

_LARGEST = 64 * 2**20
"""Bytes of such a file; settings take some ten thousand."""
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.GET, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINFLOAT, pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.SHORT_BINBYTES, pickle.BINBYTES),
    *(pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_SET, pickle.ADDITEMS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD, pickle.BINPERSID),
)
_KEYS = (str, int, float, bool, type(None))


@dataclass(eq=False, slots=True)
class InertObject:
    """An object of another program."""

    kind: str
    """Full name of its class, or of the function that would have made it."""
    arguments: Any = ()
    state: Any = None


class _Kind(str):
    """Name of a class or function."""

    __slots__ = ()


class _Inert(PythonUnpickler):  # type: ignore[misc]
    """Makes records in place of objects. Python's own implementation, see `dcp_metadata`."""

    dispatch: ClassVar[dict[int, Any]] = {code[0]: PythonUnpickler.dispatch[code[0]] for code in _OPCODES}

    def find_class(self, module: str, name: str) -> Any:
        """The name, which is all that is kept."""
        return _Kind(f"{module}.{name}")

    def _make(self) -> None:
        arguments, kind = self.stack.pop(), self.stack[-1]
        if type(kind) is not _Kind:
            raise ValueError("it calls something that is not a class")
        self.stack[-1] = InertObject(str(kind), arguments)

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not InertObject:
            raise ValueError("it sets the state of something that has none")
        made.state = state

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of a tuple of tuples may take for ever.
            if type(key) not in _KEYS:
                continue
            if type(target) is dict:
                target[key] = value
            elif type(target) is not InertObject:  # of a record, as an OrderedDict is made, the items are not needed
                raise ValueError("it sets an item of something that has none")

    def _add_items(self) -> None:
        self.pop_mark()  # what is in a set is not needed

    def _persistent(self) -> None:
        self.stack[-1] = InertObject("a tensor")

    dispatch |= {
        pickle.NEWOBJ[0]: _make,
        pickle.REDUCE[0]: _make,
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.ADDITEMS[0]: _add_items,
        pickle.BINPERSID[0]: _persistent,
    }


def read_saved(path: Path) -> Any:
    """The object in a file of `torch.save`, with records in place of objects and tensors.

    Raises:
        UserError: it is damaged, or no such file.
    """
    try:
        with storage.open_regular(path) as file, zipfile.ZipFile(file) as archive:
            (entry,) = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > _LARGEST:
                raise ValueError(f"{entry.filename} has {entry.file_size:,} bytes, more than {_LARGEST:,}")
            return _Inert(io.BytesIO(archive.read(entry))).load()
    except (UserError, FileNotFoundError):
        raise
    except Exception as error:  # whatever a pickle can lead to that was cut or made by hand
        raise UserError(f"{path} is damaged, or not a file of torch.save: {error or type(error).__name__}") from None
