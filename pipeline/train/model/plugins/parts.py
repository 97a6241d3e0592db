"""Mixers and mlps of other packages: their specs, and checks that a module is what its spec says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pipeline.common.errors import UserError
from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig
from pipeline.config.plugins import Plugin, find_plugin
from pipeline.train.model.part_spec import LayerPartSpec, MixerSpec

if TYPE_CHECKING:
    from torch import nn

_BASES: Mapping[str, Any] = {"mixers": MixerSpec, "mlps": LayerPartSpec}
"""Class that those of plug-ins extend, by kind of plug-in."""


def plugin_spec(kind: Literal["mixers", "mlps"], model: ModelConfig, layer: LayerConfig) -> Any:
    """The spec of the mixer or mlp of a layer whose key names a plug-in.

    Raises:
        UserError: The plug-in refuses the values, or makes what cannot be a part of a layer.
    """
    name, options = (layer.mixer, layer.mixer_options) if kind == "mixers" else (layer.mlp, layer.mlp_options)
    plugin = find_plugin(kind, name)
    found: Any = plugin.load(_BASES[kind])
    if found.build is LayerPartSpec.build and not getattr(found, "module", None):
        raise UserError(_refusal(plugin, f"{found.__name__} names no module, and has no build()"))
    if not callable(getattr(found, "of", None)):
        raise UserError(_refusal(plugin, f"{found.__name__} has no classmethod of(model, layer, options)"))
    try:
        spec = found.of(model, layer, options)
    except ValueError as error:
        raise UserError(f"model.{kind.removesuffix('s')} {plugin}: {error}") from error
    _check_spec(plugin, spec, model)
    return spec


def _refusal(plugin: Plugin, why: str) -> str:
    part = plugin.kind.removesuffix("s")
    return f"the {part} {plugin}: {why}; this is an error of the plug-in, see docs/plugins.md"


def _check_spec(plugin: Plugin, spec: Any, model: ModelConfig) -> None:
    """Raise a `UserError` where a spec cannot be a part of a layer."""
    if not isinstance(spec, _BASES[plugin.kind]):
        raise UserError(_refusal(plugin, f"of() gave {type(spec).__name__}, not a {_BASES[plugin.kind].__name__}"))
    try:
        hash(spec)
    except TypeError:
        raise UserError(_refusal(plugin, f"{type(spec).__name__} is not a dataclass with frozen=True")) from None
    if not getattr(spec, "label", None):
        raise UserError(_refusal(plugin, f"{type(spec).__name__} has no label"))
    if getattr(spec, "dim", None) != model.dim:
        raise UserError(_refusal(plugin, f"dim of the spec is not model.dim, {model.dim}"))
    if spec.stacks:
        raise UserError(_refusal(plugin, "stacks are those of mlp: experts alone"))


def check_module(part: LayerPartSpec, module: nn.Module) -> None:
    """Compare the module of another package's part with its spec, which everything else about it is read from.

    Raises:
        UserError: It has other parameters, or something that training cannot keep equal over layouts and resumes.
    """
    if type(part).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return
    problem = _problem(part, module)
    if problem is not None:
        raise UserError(
            f"{part.label} ({type(part).__module__}.{type(part).__qualname__}): {problem}; this is an error of the "
            "plug-in, see docs/plugins.md"
        )


def _problem(part: LayerPartSpec, module: nn.Module) -> str | None:
    from torch import nn  # reports read specs without it

    wanted = _shapes(part)
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(remove_duplicate=False)}
    for name in dict.fromkeys([*wanted, *found]):
        if name not in found:
            return f"its module has no parameter {name}, which the spec lists"
        if name not in wanted:
            return f"its module has the parameter {name}, which is in no matrix, vector or head norm of the spec"
        if wanted[name] != found[name]:
            return f"its parameter {name} has the shape {found[name]}, and in the spec {wanted[name]}"
    for matrix in part.matrices:
        if not isinstance(module.get_submodule(matrix.name), nn.Linear):
            return f"its matrix {matrix.name} is not an nn.Linear"
    for vector in part.vectors:
        if vector.heads is not None and not hasattr(module.get_submodule(vector.name.rpartition(".")[0]), "own_rows"):
            return f"the module of the vector {vector.name}, which has heads, has no attribute own_rows"
    if buffer := next((name for name, _ in module.named_buffers()), None):
        return f"its module has the buffer {buffer}, and initial weights are those of parameters alone"
    if dropped := next((name for name, each in module.named_modules() if isinstance(each, _dropouts())), None):
        return f"its module {dropped} drops at random, which no layout or recomputation repeats; model.dropout does it"
    return None


def _dropouts() -> tuple[type[nn.Module], ...]:
    from torch import nn

    return nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


def _shapes(part: LayerPartSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that a spec lists, by name within the part."""
    shapes: dict[str, tuple[int, ...]] = {}
    for matrix in part.matrices:
        shapes[f"{matrix.name}.weight"] = (matrix.rows, matrix.columns)
        if matrix.bias:
            shapes[f"{matrix.name}.bias"] = (matrix.rows,)
    for norm in part.head_norms:
        for name, size in zip(
            ("weight", "bias"), norm.spec.parameters(norm.head_dim * (norm.heads or 1)), strict=False
        ):
            shapes[f"{norm.name}.{name}"] = (size,)
    return shapes | {vector.name: tuple(vector.shape) for vector in part.vectors}
