"""Quantized weights in folders of Hugging Face's models, read as the numbers that they stand for.

Some models are published only so: GPT-OSS in MXFP4 (OCP Microscaling Formats 1.0), DeepSeek-V3 and Kimi K2 in fp8 with
a scale per block (arXiv 2412.19437, section 3.3). Both are decoded in fp32 and rounded once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.common.format import shape_text
from pipeline.train.checkpoint.tensors import Stored
from pipeline.train.checkpoint.weight_files import DTYPES
from pipeline.train.checkpoint.weight_source import tensors_in
from pipeline.train.huggingface.config_source import ConfigSource

KEY = "quantization_config"
"""Of config.json."""
_FP8 = {"F8_E4M3": torch.float8_e4m3fn}
_BLOCK = 128
"""Rows and columns with one scale, where config.json does not say how many, as transformers takes it."""
_GROUP = 32
"""Elements of MXFP4 with one scale, in 16 bytes."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1; the highest of four bits is the sign."""
_AT_ONCE = 2**22
"""Elements that are decoded at a time."""
_WAY_OUT = (
    "take a folder of the model that is not quantized, or write one with transformers: "
    "AutoModelForCausalLM.from_pretrained(DIR).dequantize() and save_pretrained, where it has that for this method"
)

Range = tuple[slice, ...]
"""Numbers of each dimension, from and to."""
Index = tuple[slice | int, ...]
"""The same, or one number, without the dimension then."""
Read = Callable[[str, Index], Tensor]
"""Reads a range of a tensor by its name."""


@dataclass(frozen=True)
class Quantization:
    """Format of quantized weights."""

    method: Literal["mxfp4", "fp8"]
    block: tuple[int, int] = (_BLOCK, _BLOCK)
    """Rows and columns with one scale (fp8)."""


def read_quantization(source: ConfigSource) -> Quantization | None:
    """The quantization that a config.json speaks of; None if there is none.

    Raises:
        UserError: one that is not read here.
    """
    given = source.get(KEY)
    if not given:
        return None
    if not isinstance(given, dict):
        source.refuse(KEY, given, "it must be an object")
    method = given.get("quant_method")
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method != "fp8":
        source.refuse(f"{KEY}.quant_method", method, f"only mxfp4 and fp8 in blocks are read; {_WAY_OUT}")
    for key, wanted in (("fmt", "e4m3"), ("activation_scheme", "dynamic"), ("expert_dtype", "fp8")):
        if given.get(key, wanted) != wanted:
            source.refuse(f"{KEY}.{key}", given[key], f"only {wanted} is read; {_WAY_OUT}")
    block = given.get("weight_block_size", [_BLOCK, _BLOCK])
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0 and bool not in map(type, block):
            return Quantization("fp8", (rows, columns))
    source.refuse(f"{KEY}.weight_block_size", block, f"it must be two whole numbers above 0; {_WAY_OUT}")


@dataclass(frozen=True)
class _Encoded(ABC):
    """A tensor of the model that is encoded in several tensors of the files."""

    names: tuple[str, str]
    """Names of values and of scales."""
    shape: tuple[int, ...]
    """Shape of what they stand for."""

    @abstractmethod
    def pieces(self, index: Range) -> Iterator[Range]:
        """The range in small ranges."""

    @abstractmethod
    def decode(self, parts: Read, index: Range) -> tuple[Tensor, Tensor]:
        """A range in fp32, and the scales that were used."""


@dataclass(frozen=True)
class _Mxfp4(_Encoded):
    """Experts' matrices [E, C, R] from blocks [E, R, C / 32, 16] and the exponents of their scales [E, R, C / 32]."""

    ends: ClassVar = ("_blocks", "_scales")

    def pieces(self, index: Range) -> Iterator[Range]:
        experts, columns, rows = index
        for expert in range(experts.start, experts.stop):
            for part in _cut(rows, columns.stop - columns.start):
                yield slice(expert, expert + 1), columns, part

    def decode(self, parts: Read, index: Range) -> tuple[Tensor, Tensor]:
        experts, columns, rows = index
        groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
        blocks, exponents = (parts(name, (experts, rows, groups)) for name in self.names)
        scales = _powers_of_two()[exponents.int()]
        # The first element of a pair is in the lower half of its byte.
        values = (_fp4_pairs()[blocks.int()].flatten(-2) * scales[..., None]).flatten(-2)
        first = columns.start - groups.start * _GROUP
        return values[..., first : first + columns.stop - columns.start].transpose(1, 2), scales


@dataclass(frozen=True)
class _Fp8(_Encoded):
    """A matrix in fp8 (e4m3) and a scale per block of rows and columns; the last blocks may be smaller."""

    block: tuple[int, int]

    end: ClassVar = "_scale_inv"

    def pieces(self, index: Range) -> Iterator[Range]:
        rows, columns = index
        for part in _cut(rows, columns.stop - columns.start):
            yield part, columns

    def decode(self, parts: Read, index: Range) -> tuple[Tensor, Tensor]:
        # A block may be larger than the matrix, by more than fits into a tensor's numbers.
        numbers = [
            torch.arange(part.start, part.stop) // min(size, part.stop)
            for part, size in zip(index, self.block, strict=True)
        ]
        needed = tuple(slice(int(each[0]), int(each[-1]) + 1) for each in numbers)
        values, scales = parts(self.names[0], index).float(), parts(self.names[1], needed).float()
        of_rows, of_columns = (each - each[0] for each in numbers)
        return values * scales[of_rows][:, of_columns], scales


class FolderTensors:
    """Tensors of a folder's files by name; of quantized ones what they stand for.

    Args:
        folder: of the files.
        names: of the files.
        quantization: of the model.
        dtype: of quantized tensors.

    Raises:
        UserError: a file is damaged, or a quantized tensor is not whole.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], quantization: Quantization | None, dtype: torch.dtype
    ) -> None:
        self._folder = folder
        fp8 = quantization is not None and quantization.method == "fp8"
        self._files, stored = tensors_in(folder, names, DTYPES | _FP8 if fp8 else DTYPES)
        self._encoded = {} if quantization is None else self._find(stored, quantization)
        parts = {part for each in self._encoded.values() for part in each.names}
        decoded = {name: Stored(each.shape, dtype) for name, each in self._encoded.items()}
        self.tensors = {name: each for name, each in stored.items() if name not in parts} | decoded
        """Shapes and types, by name."""

    @contextmanager
    def opened(self) -> Iterator[Read]:
        """A function that reads a range of a tensor; of dimensions without one everything. Files stay open meanwhile.

        Raises:
            UserError: a quantized tensor has values that are not finite.
        """
        with ExitStack() as stack:
            yield partial(self._read, _Parts(stack, self._folder, self._files))

    def _read(self, parts: Read, name: str, index: Index = ()) -> Tensor:
        encoded = self._encoded.get(name)
        if encoded is None:
            return parts(name, index)
        index = (*index, *(slice(0, size) for size in encoded.shape[len(index) :]))
        ranges = [_range(each, size) for each, size in zip(index, encoded.shape, strict=True)]
        out = torch.empty([each.stop - each.start for each in ranges], dtype=self.tensors[name].dtype)
        for piece in encoded.pieces(tuple(ranges)) if out.numel() else ():
            values, scales = encoded.decode(parts, piece)
            target = out[tuple(_shifted(part, each.start) for part, each in zip(piece, ranges, strict=True))]
            target.copy_(values)
            if not target.isfinite().all():
                self._fail(encoded.names, scales)
        return out[tuple(0 if isinstance(each, int) else slice(None) for each in index)]

    def _find(self, stored: dict[str, Stored], quantization: Quantization) -> dict[str, _Encoded]:
        return self._mxfp4(stored) if quantization.method == "mxfp4" else self._fp8(stored, quantization.block)

    def _fail(self, names: Sequence[str], scales: Tensor) -> NoReturn:
        name, what = (names[0], "values") if scales.isfinite().all() else (names[-1], "scales")
        raise UserError(
            f"{self._where(name)} has {what} that are not finite numbers, or lead to such; the file is damaged: "
            "download it again"
        )

    def _mxfp4(self, stored: dict[str, Stored]) -> dict[str, _Encoded]:
        found: dict[str, _Encoded] = {}
        blocks_end, scales_end = _Mxfp4.ends
        for name in _bases(stored, blocks_end, scales_end):
            blocks, scales = name + blocks_end, name + scales_end
            self._need(stored, blocks, scales)
            self._need(stored, scales, blocks)
            if name in stored:
                raise UserError(
                    f"{self._where(name)} is there a second time, quantized ({blocks}); do the files belong together?"
                )
            shape = stored[blocks].shape
            if len(shape) != 4 or shape[-1] != _GROUP // 2 or stored[blocks].dtype != torch.uint8:
                self._misfit(blocks, stored[blocks], "experts x rows x groups x 16 of uint8")
            if stored[scales] != Stored(shape[:-1], torch.uint8):
                self._misfit(scales, stored[scales], f"{shape_text(shape[:-1])} of uint8, as {blocks} is")
            found[name] = _Mxfp4((blocks, scales), (shape[0], shape[2] * _GROUP, shape[1]))
        return found

    def _fp8(self, stored: dict[str, Stored], block: tuple[int, int]) -> dict[str, _Encoded]:
        found: dict[str, _Encoded] = {}
        quantized = [name for name, each in stored.items() if each.dtype == torch.float8_e4m3fn]
        for name in dict.fromkeys((*quantized, *_bases(stored, _Fp8.end))):
            scales = name + _Fp8.end
            self._need(stored, name, scales)
            self._need(stored, scales, name)
            shape, dtype = stored[name].shape, stored[name].dtype
            if len(shape) != 2 or dtype != torch.float8_e4m3fn:
                self._misfit(name, stored[name], f"a matrix of float8_e4m3fn, as it has {scales}")
            blocks = tuple(-(-size // of_block) for size, of_block in zip(shape, block, strict=True))
            if stored[scales].shape != blocks or stored[scales].dtype not in (torch.float32, torch.bfloat16):
                each = f"one for each block of {shape_text(block)} of {name} ({shape_text(shape)})"
                self._misfit(scales, stored[scales], f"{shape_text(blocks)} of float32 or bfloat16, {each}")
            found[name] = _Fp8((name, scales), shape, block)
        return found

    def _need(self, stored: dict[str, Stored], name: str, other: str) -> None:
        if name not in stored:
            raise UserError(
                f"{self._where(other)} has no {name} beside it, in this file or another; is the download complete?"
            )

    def _misfit(self, name: str, found: Stored, wanted: str) -> NoReturn:
        kind = str(found.dtype).removeprefix("torch.")
        raise UserError(
            f"{self._where(name)} is {shape_text(found.shape)} of {kind}, but must be {wanted}; do the files belong "
            "together?"
        )

    def _where(self, name: str) -> str:
        return f"{self._folder / self._files[name]}: {name}"


class _Parts:
    """Reads ranges of tensors that are in the files, which stay open until the stack ends."""

    def __init__(self, stack: ExitStack, folder: Path, files: dict[str, str]) -> None:
        self._stack, self._folder, self._files = stack, folder, files
        self._opened: dict[str, Any] = {}

    def __call__(self, name: str, index: Index) -> Tensor:
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        found = self._opened[file]
        value: Tensor = found.get_slice(name)[index] if index else found.get_tensor(name)
        return value


def _bases(stored: dict[str, Stored], *ends: str) -> list[str]:
    """Names of tensors that have an addition with one of these ends."""
    return list(dict.fromkeys(name.removesuffix(end) for end in ends for name in stored if name.endswith(end)))


def _cut(rows: slice, columns: int) -> Iterator[slice]:
    step = max(1, _AT_ONCE // columns)
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


def _range(part: slice | int, size: int) -> slice:
    if isinstance(part, int):
        return slice(part, part + 1)
    start, stop, _ = part.indices(size)
    return slice(start, stop)


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start - by, part.stop - by)


def _fp4_pairs() -> Tensor:
    """[256, 2]: the two elements in a byte, the lower half first."""
    values = torch.tensor([*_FP4, *(-value for value in _FP4)])
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)


def _powers_of_two() -> Tensor:
    """[256]: scales by their byte (e8m0), of which the last stands for NaN."""
    return torch.tensor([math.ldexp(1.0, exponent - 127) for exponent in range(255)] + [math.nan])
