"""Layers whose matrix products are in fp8 (Micikevicius et al. 2022): modules are replaced, names and weights stay.

Weights, their gradients and the optimizer's moments are what they are without fp8, so that checkpoints do not know of
it. Only products are rounded: their factors get a scale that lets them fill the format's range.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch
from torch import nn

from pipeline.common.errors import UserError, install_extra
from pipeline.config.train import Fp8Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.fp8.matrices import fp8_matrices, gathers_fp8
from pipeline.train.model.decoder import Decoder

_CAPABILITY: dict[str, tuple[int, int]] = {
    "tensorwise": (8, 9),
    "rowwise": (9, 0),
    "delayed": (8, 9),
    "current": (8, 9),
    "mxfp8": (10, 0),
}
"""Compute capability that a recipe needs."""
_PACKAGES = {
    "torchao": ("torchao.float8", "torchao", "fp8"),
    "te": ("transformer_engine.pytorch", "Transformer Engine", "te"),
}
"""Module, name, and the extra that installs it, by backend."""


def check_fp8(config: Fp8Config, device: torch.device) -> None:
    """Look for what fp8 needs of device and packages, before anything is built.

    Raises:
        UserError: It is not there.
    """
    key = "train.precision.fp8"
    if device.type != "cuda" and not config.emulate:
        raise UserError(
            f"{key} needs a GPU that multiplies in fp8, but this run is on a CPU: leave the section out, or for a test "
            f"of small models set {key}.emulate=true (torchao), which is slower than without fp8"
        )
    if device.type == "cuda" and not config.emulate:
        found, needed = torch.cuda.get_device_capability(device), _CAPABILITY[config.scaling]
        if found < needed:
            raise UserError(
                f"{key}.recipe={config.scaling} needs a GPU of compute capability {_dotted(needed)} or above, but "
                f"{torch.cuda.get_device_name(device)} has {_dotted(found)}: {_other(config, found)}"
            )
    module, package, extra = _PACKAGES[config.backend]
    try:
        importlib.import_module(module)
    except Exception as error:  # Transformer Engine's own checks raise errors of other kinds
        raise UserError(
            f"{key}.backend={config.backend} needs {package}, which cannot be imported ({type(error).__name__}: "
            f"{error}): install the extra `{extra}` ({install_extra(extra)}), or "
            "leave the section out"
        ) from error


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _other(config: Fp8Config, capability: tuple[int, int]) -> str:
    simpler = "tensorwise" if config.backend == "torchao" else "current"
    if capability >= _CAPABILITY[simpler] and config.scaling != simpler:
        return f"set train.precision.fp8.recipe={simpler}"
    return "leave train.precision.fp8 out"


def use_fp8(part: Decoder, config: Fp8Config, layout: Layout) -> None:
    """Replace those modules of a part whose products are to be in fp8, in place.

    Comes before the cut by tp, which puts hooks on modules and cuts their weights.

    Args:
        part: On the meta device.
        config: The `train.precision.fp8:` section.
        layout: The degrees.
    """
    chosen = fp8_matrices(config, part.spec, layout.tp)
    names = {f"layers.{index}.{matrix.name}" for index in part.part.layers for matrix in chosen.get(index, ())}
    if config.backend == "te":
        from pipeline.train.fp8.te import use_transformer_engine

        use_transformer_engine(part, names, config.scaling)
    else:
        _use_torchao(part, names, config, gather=gathers_fp8(config, part.spec, layout))


def _use_torchao(part: Decoder, names: set[str], config: Fp8Config, *, gather: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(config.scaling)
    recipe = replace(recipe, emulate=config.emulate, enable_fsdp_float8_all_gather=gather)
    convert_to_float8_training(part, module_filter_fn=lambda _, name: name in names, config=recipe)


def refresh_scales(part: nn.Module) -> None:
    """Find the scales with which weights are sent in fp8, of all matrices of a part with one sum over its processes.

    Comes before passes with weights that may have changed; every process calls it. Without it each matrix would have a
    sum of its own each time it is gathered. Nothing happens where no weight is sent in fp8.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(part)
