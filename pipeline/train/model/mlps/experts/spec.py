"""A mixture of experts as data: a router, many small mlps of which a token takes some, perhaps a shared one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from pipeline.config.layers.experts import ExpertsConfig
from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.parameter_spec import DIM, Axes, Matrix, Stack, WidthAxis
from pipeline.train.model.part_spec import Division, LayerPartSpec
from pipeline.train.model.tensor_names import TensorNames

_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
EXPERTS_NAMES = (
    TensorNames("mlp.gate.weight", ("router.weight",)),
    TensorNames("mlp.gate.e_score_correction_bias", ("router.score_bias",)),
    *(
        TensorNames(f"mlp.experts.{{e}}.{theirs}.weight", (f"experts.{ours}",), experts="numbered")
        for theirs, ours in _MATRICES.items()
    ),
)
"""Names of router and experts in most of Hugging Face's families."""


def shared_names(module: str) -> tuple[TensorNames, ...]:
    """Names of the shared mlp, given that of its module."""
    return tuple(
        TensorNames(f"{module}.{theirs}.weight", (f"shared.{ours}.weight",)) for theirs, ours in _MATRICES.items()
    )


@dataclass(frozen=True)
class RouterSpec:
    """Choice of the experts of a token, and the weights of their results; see `ExpertsConfig` for the keys."""

    count: int
    top_k: int
    score: Literal["softmax", "sigmoid"]
    normalize: bool
    scale: float
    groups: int | None
    top_groups: int | None
    group_score: Literal["top2_sum", "max"]
    bias: bool
    """The logits have a bias."""
    score_bias: bool
    """The choice has a bias, which gradients do not move."""

    @classmethod
    def of(cls, experts: ExpertsConfig) -> RouterSpec:
        """Spec of a section."""
        return cls(
            experts.count,
            experts.top_k,
            experts.score,
            experts.normalize,
            experts.scale,
            experts.groups,
            experts.top_groups,
            experts.group_score,
            experts.router_bias,
            experts.score_bias,
        )


@dataclass(frozen=True)
class ExpertsSpec(LayerPartSpec):
    """Mixture of experts: sum over the chosen ones of weight * expert(x), and perhaps a shared mlp of x."""

    dim: int
    ffn_dim: int
    """Of an expert."""
    router: RouterSpec
    clamp: tuple[float, float] | None
    """Limit and alpha of a clamped SwiGLU; None: SwiGLU."""
    bias: bool
    shared: MlpSpec | None
    shared_gate: bool

    label: ClassVar = "experts"
    module: ClassVar = "pipeline.train.model.mlps.experts.module.Experts"
    huggingface: ClassVar = {"llama": (*EXPERTS_NAMES, *shared_names("mlp.shared_experts"))}

    @classmethod
    def of(cls, model: ModelConfig, layer: LayerConfig) -> ExpertsSpec:
        """Spec of the layers with these keys."""
        experts = layer.experts
        assert experts is not None
        shared = experts.shared_ffn_dim
        return cls(
            dim=model.dim,
            ffn_dim=experts.ffn_dim,
            router=RouterSpec.of(experts),
            clamp=(experts.clamp, experts.alpha) if experts.activation == "clamped_swiglu" else None,
            bias=experts.bias,
            shared=None if shared is None else MlpSpec("swiglu", model.dim, shared, bias=False),
            shared_gate=experts.shared_gate,
        )

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The router, and those of the shared mlp."""
        found = [Matrix("router", self.router.count, self.dim, "positions", self.router.bias, fp8=False)]
        if self.shared is not None:
            key = "experts.shared_ffn_dim"
            found += [
                replace(each, name=f"shared.{each.name}", input_key=key if each.to_residual else None)
                for each in self.shared.matrices
            ]
        if self.shared_gate:
            found.append(Matrix("shared_gate", 1, self.dim, "positions", fp8=False))
        return tuple(found)

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """See `LayerPartSpec`."""
        count, used = self.router.count, self.router.top_k
        key = "experts.ffn_dim"
        return (
            Stack("experts.w1", count, used, self.ffn_dim, self.dim, self.bias),
            Stack("experts.w3", count, used, self.ffn_dim, self.dim, self.bias),
            Stack("experts.w2", count, used, self.dim, self.ffn_dim, self.bias, to_residual=True, input_key=key),
        )

    @property
    def axes(self) -> dict[str, Axes]:
        """See `LayerPartSpec`. The hidden layers of experts keep their size: nothing measures their channels."""
        stream, count = WidthAxis(DIM, self.dim), WidthAxis("experts.count", self.router.count)
        found: dict[str, Axes] = {"router.weight": (count, stream), "shared_gate.weight": (None, stream)}
        found |= dict.fromkeys(("router.bias", "router.score_bias"), (count,))
        for stack in self.stacks:
            outputs = stream if stack.to_residual else None
            found[stack.name] = (count, outputs, None if stack.to_residual else stream)
            found[stack.bias_name] = (count, outputs)
        if self.shared is not None:
            hidden = WidthAxis("experts.shared_ffn_dim", self.shared.ffn_dim)
            for name, axes in self.shared.axes.items():
                found[f"shared.{name}"] = tuple(hidden if each != stream else stream for each in axes)
        return found

    @property
    def tp_inputs(self) -> tuple[str, ...]:
        """Inputs of the shared mlp alone: experts take the tokens where they are."""
        return () if self.shared is None else ("shared",)

    @property
    def divisions(self) -> tuple[Division, ...]:
        """See `LayerPartSpec`."""
        return () if self.shared is None else (Division("experts.shared_ffn_dim", self.shared.ffn_dim),)

    def elementwise_numbers(self, tp: int) -> float:
        """Scores; rows of experts there and back; activations."""
        used = self.router.top_k
        routed = (6 * self.router.count + used * (6 * self.dim + 3 * self.ffn_dim)) / tp
        return routed + (0 if self.shared is None else self.shared.elementwise_numbers(tp))

    def kept_numbers(self, tp: int) -> float:
        """Scores; what experts get, and their hidden layers; the shared mlp's."""
        used = self.router.top_k
        routed = (4 * self.router.count + used * (self.dim + 4 * self.ffn_dim)) / tp
        return routed + (0 if self.shared is None else self.shared.kept_numbers(tp))

    def kept_results(self, keep: Collection[str], tp: int) -> float:
        """Results of the first products; of exchanges, if they are kept."""
        used = self.router.top_k
        products = used * 2 * self.ffn_dim / tp if "matmul" in keep else 0.0
        return products + (0 if self.shared is None else self.shared.kept_results(keep, tp))

    def most_numbers(self, sequence_length: int) -> int:
        """See `LayerPartSpec`."""
        routed = 40 * self.router.top_k * (self.ffn_dim + self.dim) + 40 * self.router.count
        return routed + (0 if self.shared is None else self.shared.most_numbers(sequence_length))
