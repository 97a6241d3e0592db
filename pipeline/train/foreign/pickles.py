"""Pickles of other programs, read as data: nothing that they name is imported, and nothing is called.

A settings file of another program is a pickle of its own classes. Here each object becomes an `InertObject` with the
name of its class, so it is read where that program is not installed, and a file of a stranger runs no code.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, ClassVar

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.train.checkpoint.inert_pickle import PLAIN_OPCODES, InertName, InertObject, InertUnpickler

LARGEST_FILE = 64 * 2**20
"""Bytes of a file that is read whole."""
_LARGEST = 4 * 2**20
"""Bytes of the pickle in such a file; settings take some ten thousand."""
_OPCODES = (
    *PLAIN_OPCODES,
    *(pickle.POP, pickle.POP_MARK, pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.GET, pickle.GLOBAL),
    *(pickle.BINFLOAT, pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.LIST, pickle.EMPTY_SET, pickle.ADDITEMS),
    pickle.BINPERSID,
)
_KEYS = (str, int, float, bool, type(None))


class _SettingsUnpickler(InertUnpickler):
    """Takes any class by its name, and leaves out what settings do not need."""

    def find_class(self, module: str, name: str) -> Any:
        """The full name, which is all that is kept."""
        return InertName(f"{module}.{name}")

    def set_item(self, target: Any, key: Any, value: Any) -> None:
        """Set an item of a table; others, and items of objects, are left out."""
        if type(target) is dict and type(key) in _KEYS:
            target[key] = value
        elif type(target) not in (dict, InertObject):
            raise ValueError("it sets an item of something that has none")

    def _add_items(self) -> None:
        self.pop_mark()  # what is in a set is not needed

    def _set(self) -> None:
        self.append(None)  # a set takes much memory

    def _persistent(self) -> None:
        self.stack[-1] = InertObject("a tensor")

    dispatch: ClassVar[dict[int, Any]] = InertUnpickler.operations(_OPCODES) | {
        pickle.ADDITEMS[0]: _add_items,
        pickle.EMPTY_SET[0]: _set,
        pickle.BINPERSID[0]: _persistent,
    }


def read_saved(path: Path) -> Any:
    """The object in a file of `torch.save`, with records in place of objects and tensors.

    Raises:
        UserError: it is damaged, or no such file.
    """
    with storage.open_regular(path) as file:
        return parse_saved(file.read(LARGEST_FILE + 1), str(path))


def parse_saved(data: bytes, where: str) -> Any:
    """The object in the bytes of a file of `torch.save`, as `read_saved` gives it.

    Args:
        data: all of the file.
        where: it is, for messages.

    Raises:
        UserError: it is damaged, or no such file.
    """
    try:
        if len(data) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            pickles = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise ValueError(f"it has {len(pickles)} pickles in place of one")
            (entry,) = pickles
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > _LARGEST:
                raise ValueError(f"its pickle is compressed, or has more than {_LARGEST:,} bytes")
            return _SettingsUnpickler(io.BytesIO(archive.read(entry))).load()
    except Exception as error:  # whatever a pickle can lead to that was cut or made by hand
        raise UserError(f"{where} is damaged, or not a file of torch.save: {error or type(error).__name__}") from None
