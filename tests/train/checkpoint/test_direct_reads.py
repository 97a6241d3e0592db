"""Tensors that are read straight into the memory of the model are those that `torch.load` gives."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from pipeline.common.errors import UserError
from pipeline.train.torch_compat.checkpoint_files import CheckpointReader


class Planner:
    """Gives the targets, by name."""

    def __init__(self, targets: dict[str, Tensor]) -> None:
        self.targets = targets

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        return self.targets[item.dest_index.fqn]

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        assert tensor.data_ptr() == self.targets[item.dest_index.fqn].data_ptr()


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls of `torch.load`."""
    found: list[object] = []
    original = torch.load

    def load(file: Any, **options: Any) -> Any:
        found.append(file)
        return original(file, **options)

    monkeypatch.setattr(torch, "load", load)
    return found


def saved(folder: Path, tensors: dict[str, Any]) -> Metadata:
    """All in one file, as torch's writer puts them there; bytes are taken as they are."""
    places, data = {}, b""
    for name, tensor in tensors.items():
        file = io.BytesIO()
        if isinstance(tensor, bytes):
            file.write(tensor)
        else:
            torch.save(tensor, file)
        places[MetadataIndex(name)] = _StorageInfo("file", len(data), len(file.getvalue()))
        data += file.getvalue()
    (folder / "file").write_bytes(data)
    return Metadata({}, storage_data=places)


def read(folder: Path, metadata: Metadata, targets: dict[str, Tensor], parts: dict[str, Any] | None = None) -> None:
    """Read `targets`, each whole or from `parts`: its offsets in what is stored."""
    items = []
    for name, target in targets.items():
        offsets = torch.Size((parts or {}).get(name, [0] * target.dim()))
        index = MetadataIndex(name)
        items.append(ReadItem(LoadItemType.TENSOR, index, offsets, index, offsets, target.shape))
    reader = CheckpointReader(folder, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(LoadPlan(items), Planner(targets)).wait()  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(6, 5), (7,), (), (2, 3, 4)])
def test_only_the_first_of_each_form_is_loaded_by_torch(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path, loads: list[object]
) -> None:
    tensors = {name: (100 * torch.randn(shape)).abs().to(dtype) for name in "abc"}
    targets = {name: torch.zeros(shape, dtype=dtype) for name in tensors}
    read(tmp_path, saved(tmp_path, tensors), targets)
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors)
    assert len(loads) == 1


def test_parts_are_read(tmp_path: Path, loads: list[object]) -> None:
    tensors = {name: torch.randn(6, 5) for name in "abcd"}
    shapes = {"a": (6, 5), "b": (2, 5), "c": (3, 2), "d": (0, 5)}
    offsets = {"b": (3, 0), "c": (1, 2), "d": (2, 0)}
    targets = {name: torch.zeros(shape) for name, shape in shapes.items()}
    read(tmp_path, saved(tmp_path, tensors), targets, offsets)
    assert torch.equal(targets["b"], tensors["b"][3:5]) and torch.equal(targets["c"], tensors["c"][1:4, 2:4])
    assert len(loads) == 3, "rows lie in one piece, columns do not"


def test_targets_of_other_kinds_are_filled(tmp_path: Path) -> None:
    tensors = {name: torch.randn(4, 3) for name in "abc"}
    targets = {"a": torch.zeros(4, 3), "b": torch.zeros(3, 4).T, "c": torch.zeros(4, 3, dtype=torch.float64)}
    read(tmp_path, saved(tmp_path, tensors), targets)
    assert all(torch.equal(targets[name], tensors[name].to(targets[name].dtype)) for name in tensors)


@pytest.mark.parametrize("kind", ["transposed", "part of a storage", "one number many times"])
def test_tensors_whose_bytes_lie_otherwise_are_loaded_by_torch(kind: str, tmp_path: Path, loads: list[object]) -> None:
    make = {
        "transposed": lambda: torch.randn(3, 4).T,
        "part of a storage": lambda: torch.randn(9, 3)[2:6],
        "one number many times": lambda: torch.randn(1, 1).expand(4, 3),
    }[kind]
    tensors = {name: make() for name in "ab"}
    targets = {name: torch.zeros(4, 3) for name in tensors}
    read(tmp_path, saved(tmp_path, tensors), targets)
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors)
    assert len(loads) == 2


def test_another_shape_than_the_list_has_is_refused(tmp_path: Path) -> None:
    metadata = saved(tmp_path, {name: torch.randn(4, 3) for name in "ab"})
    for targets in ({"a": torch.zeros(4, 3), "b": torch.zeros(5, 3)}, {"a": torch.zeros(5, 3)}):
        with pytest.raises(ValueError, match="in place of"):
            read(tmp_path, metadata, targets)


def test_an_entry_that_leads_outside_is_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.save(torch.randn(4, 3), file)
    data = bytearray(file.getvalue())
    for entry in _central_entries(data):
        data[entry + 42 : entry + 46] = (2**31).to_bytes(4, "little")  # where its local header is
    metadata = saved(tmp_path, {"a": torch.randn(4, 3), "b": bytes(data), "c": torch.randn(4, 3)})
    with pytest.raises(UserError, match="there is no tensor at byte"):
        read(tmp_path, metadata, {name: torch.zeros(4, 3) for name in "abc"})


def _central_entries(data: bytearray) -> list[int]:
    places, place = [], data.find(b"PK\1\2")
    while place >= 0:
        places.append(place)
        place = data.find(b"PK\1\2", place + 1)
    return places


def test_the_form_has_the_size_of_the_elements(tmp_path: Path) -> None:
    """The same description with fewer elements than it speaks of."""
    file = io.BytesIO()
    torch.save(torch.randn(4, 3), file)
    data = bytearray(file.getvalue())
    for entry in _central_entries(data):
        if data[entry + 46 :].startswith(b"archive/data/0"):
            data[entry + 20 : entry + 28] = (40).to_bytes(4, "little") * 2  # instead of 48
    metadata = saved(tmp_path, {"a": torch.randn(4, 3), "b": bytes(data), "c": torch.randn(4, 3)})
    with pytest.raises(Exception, match="(?i)size|length|corrupt|record"):
        read(tmp_path, metadata, {name: torch.zeros(4, 3) for name in "abc"})
