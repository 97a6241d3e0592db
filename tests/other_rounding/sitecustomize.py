"""Other rounding in every process that Python starts with this folder on its path, as on another processor.

Which kernel multiplies matrices, and in which order it adds up, depends on the processor and on the shapes. Here each
product on a CPU is off by about the error of its format, by a pattern that follows from the shapes alone: the same
product has the same bits again, and part of it as a product of its own has others. What a test compares too closely
fails under it. Compiled code and fused attention are as they are.
"""

from __future__ import annotations

import sys
import warnings
import zlib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_KEPT: list[object] = []
"""torch drops what a library has registered together with it."""


def _install(torch: Any) -> None:
    library = torch.library.Library("aten", "IMPL")
    patterns: dict[str, Tensor] = {}

    def off(product: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The product of a and b in place, with errors; exact zeros stay."""
        if not product.is_floating_point() or product.dtype == torch.float64:
            return product
        key = repr([(tuple(factor.shape), factor.stride(), factor.dtype) for factor in (a, b)])
        if key not in patterns:
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            patterns[key] = torch.rand(product.shape, generator=generator) * 2 - 1
        # Sums are in fp32, with errors in proportion to their terms, and the result is rounded to its format.
        terms = multiply(a.float().abs(), b.float().abs()) * torch.finfo(torch.float32).eps / 2
        noise = patterns[key] * (terms + product.float().abs() * torch.finfo(product.dtype).eps / 2)
        return product.add_(noise.where(noise.isfinite(), 0))

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
        (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out=out)
        return out

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return off(multiply(a, b), a, b)

    def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        out = a.new_empty(a.shape[0], b.shape[1])
        return off(torch.addmm(c, a, b, beta=beta, alpha=alpha, out=out), a, b)

    def bmm(a: Tensor, b: Tensor) -> Tensor:
        return off(multiply(a, b), a, b)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for kernel in (mm, addmm, bmm):
            library.impl(kernel.__name__, kernel, "CPU")
    _KEPT.append(library)


class _AfterTorch(MetaPathFinder):
    """Installs it when torch has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec("torch")
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _install(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _AfterTorch())
