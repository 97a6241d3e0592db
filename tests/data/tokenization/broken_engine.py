"""A stand-in for a broken release of a foreign library: a package on the path, with the interface of gigatoken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_CODE = """
import os, time, zlib
import numpy as np
import tokenizers

class PanicException(BaseException):
    pass

class Backend:
    def __init__(self, definition):
        self.engine = tokenizers.Tokenizer.from_str(definition)

    def encode(self, raw):
        text = raw.decode()
        ids = np.array(self.engine.encode(text, add_special_tokens=False).ids, np.uint32)
        {fault}
        return ids

def load_hf_json(definition):
    {load}
    return Backend(definition)
"""

FAULTS = {
    "none": "",
    "one text in 1,000": "if len(ids) and zlib.crc32(text.encode()) % 1000 == 0: ids[-1] += 1",
    "one script": "if any('\\u10d0' <= c <= '\\u10ff' for c in text): ids[0] += 1",
    "one id more": "if text.endswith('\\u2029'): ids = np.append(ids, 5).astype(np.uint32)",
    "wraps": "ids += 65536 * (len(ids) > 3)",
    "panics": "if len(text) > 60000: raise PanicException('stack')",
    "aborts": "if len(text) > 60000: os.abort()",
    "hangs": "time.sleep(100)",
}


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str = "none", load: str = "") -> None:
    """Put it before the real one, for this process and those it starts."""
    package = folder / "gigatoken"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "gigatoken_rs.py").write_text(_CODE.format(fault=FAULTS[fault] or "pass", load=load or "pass"))
    info = folder / "gigatoken-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gigatoken\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(folder))
    real = [name for name in sys.modules if name.split(".")[0] == "gigatoken"]
    for name in {"gigatoken", "gigatoken.gigatoken_rs", *real}:
        monkeypatch.setitem(sys.modules, name, sys)  # so that what is imported from here on goes afterwards
        del sys.modules[name]
