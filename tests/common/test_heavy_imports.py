from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest

from pipeline.common.imports import heavy_imports


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_while_modules_are_imported(was_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    enabled = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with heavy_imports():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
        assert not frozen, "nothing was imported"

        with pytest.raises(ImportError), heavy_imports():
            monkeypatch.setitem(sys.modules, "imported_just_now", ModuleType("imported_just_now"))
            raise ImportError
        assert gc.isenabled() == was_enabled
        assert frozen == [False], "before anything can be collected"
    finally:
        (gc.enable if enabled else gc.disable)()
