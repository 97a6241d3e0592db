"""Specs of the parts of a layer: data that the model is built from and that everything else about a part is read from.

A kind of mixer or mlp is one folder: its spec, which reports read without torch, and its module. Initial weights,
tensor parallelism, fp8, FLOPs, plans, recomputation and conversion iterate specs and know no kind.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pipeline.config.layers.layer import RopeScalingConfig
from pipeline.train.model.parameter_spec import Axes, HeadNorm, Matrix, NormSpec, Stack, Vector
from pipeline.train.model.tensor_names import PartTable

if TYPE_CHECKING:
    from torch import nn

_MUP_HEAD_DIM = 64
"""muP divides attention logits by head_dim instead of its root; the two agree for heads of this size."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of queries and keys."""

    dims: int
    """Dimensions of a head that are turned, from the first one on."""
    theta: float
    scaling: RopeScalingConfig | None


def yarn_factor(scaling: RopeScalingConfig, mscale: float) -> float:
    """m(mscale) of YaRN: 0.1 * mscale * ln(factor) + 1, and 1 where the context is not longer."""
    return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def default_scale(head_dim: int, *, mup: bool) -> float:
    """Factor on the products of queries and keys: 1 / root of the size of a head, or with muP one over the size."""
    scale: float = _MUP_HEAD_DIM**0.5 / head_dim if mup else head_dim**-0.5
    return scale


def softmax_factor(scaling: RopeScalingConfig | None) -> float:
    """Factor on the products of queries and keys that a scaling of the frequencies brings along (DeepSeek's YaRN)."""
    return 1.0 if scaling is None or scaling.type != "yarn" else yarn_factor(scaling, scaling.mscale_all_dim) ** 2


@dataclass(frozen=True)
class Division:
    """Things of which each rank of tp has equally many: heads, hidden units."""

    key: str
    """Key in the `model:` section, for messages."""
    size: int
    """Number of things."""
    shared_by: int | None = None
    """With fewer things than ranks, ranks share them: then the number of those that share them without tp."""

    def fits(self, tp: int) -> bool:
        """True if tp can cut them, or each is shared by equally many ranks."""
        return self.size % tp == 0 or (self.shared_by is not None and tp % self.size == 0)


@dataclass(frozen=True)
class CpTransfer:
    """Collectives of a mixer over cp in a forward pass. Their gradients take the same ones, reversed."""

    what: str
    """Name of what is sent, in words."""
    calls: int
    numbers: int
    """Numbers sent in all calls, for each token of a rank."""
    repeated_flops: float = 0.0
    """FLOPs in the forward pass, for each token of a rank, that cp adds to those counted."""
    of_sample: int = 0
    """Numbers sent in all calls for each sample, whatever its length. With them, or those below, all ranks get what
    each has, whatever the method."""
    of_sample_fp32: int = 0
    """The same of numbers in fp32."""
    least_piece: int = 0
    """Positions that each piece of a sequence must have at least."""
    least_key: str = ""
    """Key in the `model:` section that this follows from, for messages."""

    @property
    def gathers(self) -> bool:
        """True if all ranks get what each has, whatever the method."""
        return bool(self.of_sample or self.of_sample_fp32)


@dataclass(frozen=True)
class Reach:
    """Keys that a query sees by their distance; those of other documents are hidden besides."""

    back: int | None = None
    """Positions before the query; None: all."""
    ahead: int | None = 0
    """Positions after it; 0: causal; None: all."""

    @classmethod
    def window(cls, size: int | None, *, both: bool = False) -> Reach:
        """Reach of `sliding_window`; None: all.

        Causal it is `size` positions, the query's own among them. To both sides it is half of `size` on each, rounded
        down, and the query's own.
        """
        if both:
            half = None if size is None else size // 2
            return cls(half, half)
        return cls(None if size is None else size - 1)

    def mean_keys(self, length: int, *, causal: bool) -> float:
        """Keys that FLOPs are counted for, of a query of a sequence; see `flops_per_token` for the conventions."""
        after = length if self.ahead is None else min(self.ahead, length)
        window = length if self.back is None else min(self.back + 1, length)
        if causal:
            return window - window**2 / (2 * length) + after - after**2 / (2 * length)
        return min(window + after, length)

    def sees_all(self, length: int) -> bool:
        """True if distance hides no key of a sequence, or causality alone does."""
        back = self.back is None or self.back >= length - 1
        return back and (not self.ahead or self.ahead >= length - 1)


@dataclass(frozen=True)
class KernelUse:
    """Demands of a mixer on the kernel of attention."""

    reach: Reach
    head_dim: int
    value_dim: int
    """Size of a value head, which is `head_dim` in nearly all models."""
    soft_cap: float | None = None
    """Scores become cap * tanh(scores / cap) before the mask."""
    sinks: bool = False
    """True if each head has a logit that takes probability and gives no value."""
    bias: bool = False
    """The products have a bias with a gradient."""
    size_key: str = "model.head_dim"
    """Key that the sizes of heads follow from, for messages."""


Side = Literal["encoder", "decoder"]
RELATIVE = "relative."
"""Begins the names of tables of relative positions, by side."""


@dataclass(frozen=True)
class RelativeSpec:
    """Relative positions of the attention of a side, whose layers share a table [buckets, heads]."""

    side: Side
    buckets: int
    max_distance: int
    heads: int

    @property
    def two_sided(self) -> bool:
        """True if half of the buckets are for keys after the query."""
        return self.side == "encoder"


class LayerPartSpec(ABC):
    """A mixer or an mlp. Kinds are frozen dataclasses; what costs nothing or is not there keeps the default.

    The module that `build` makes has an `nn.Linear` for each matrix, and [B, S, dim] as input and output. An mlp
    computes each position by itself.

    Other packages extend this class, for mlps, and `MixerSpec`, see docs/plugins.md. They have a classmethod `of(model,
    layer, options)` besides: from `model:`, the keys of the layer, and their options, the spec. What a default does not
    answer is refused where it is needed.
    """

    label: ClassVar[str]
    """Name of the kind in messages."""
    module: ClassVar[str]
    """Full name of the module's class, which takes the spec. It imports torch, so it is looked up when it is built."""
    huggingface: ClassVar[Mapping[str, PartTable]] = {}
    """By style of names (see `pipeline.train.huggingface.names`), theirs within a layer and ours within the part,
    one below the other: parameters, or modules, which have a weight and perhaps a bias."""
    model_keys: ClassVar[tuple[str, ...]] = ()
    """Of a plug-in: the keys of `model:` besides `dim` that it reads, like `ffn_dim`; others are refused beside it."""
    dim: int
    """Width of the residual stream."""

    def build(self) -> nn.Module:
        """The module, on the default device."""
        module: nn.Module = resolve_name(self.module)(self)
        return module

    @classmethod
    def same_meaning(cls, model: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of a `model:` section that may differ though weights compute the same, with the value to compare."""
        return {}

    @cached_property
    @abstractmethod
    def matrices(self) -> tuple[Matrix, ...]:
        """Matrices in the order of the forward pass."""

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Matrices of experts, in the order of the forward pass."""
        return ()

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """Parameters besides matrices, stacks, biases and norms."""
        return ()

    @property
    def axes(self) -> Mapping[str, Axes]:
        """Entries of the dimensions of parameters, by name within the part; others keep their sizes in pruning."""
        return {}

    @property
    def tp_inputs(self) -> tuple[str, ...]:
        """Names of the modules within the part whose input tp collects; `""`: the part itself."""
        return ("",)

    @property
    def fp32_modules(self) -> tuple[str, ...]:
        """Names of `Fp32Vectors` within the part, whose vectors stay in fp32 where others are used in 16 bits."""
        return ()

    def fp32_sizes(self, tp: int) -> tuple[int, ...]:
        """Parameters of each of `fp32_modules` on one rank of tp."""
        vectors = [(vector.name.rpartition(".")[0], vector.parameters(tp)) for vector in self.vectors]
        return tuple(sum(size for module, size in vectors if module == name) for name in self.fp32_modules)

    @property
    def head_norms(self) -> tuple[HeadNorm, ...]:
        """Norms within the part."""
        return ()

    def tp_sums(self, tp: int) -> tuple[int, ...]:
        """Fp32 numbers of a token in each all-reduce over tp within the part's forward pass."""
        return tuple(sums for norm in self.head_norms if (sums := norm.sums(tp)))

    @property
    def divisions(self) -> tuple[Division, ...] | None:
        """Numbers that tp must divide; None: tp cannot cut the part."""
        return None

    def extra_flops(self, sequence_length: int, *, causal: bool) -> float:
        """FLOPs of one token in the forward pass besides `matrices`; see `flops_per_token` for the conventions."""
        return 0.0

    def elementwise_numbers(self, tp: int) -> float:
        """Numbers of a token that a rank reads and writes in the forward pass besides products, if compiled.

        By default the results of all products but those that are added to the stream, and the inputs of these.
        """
        within = sum(matrix.on_rank(tp)[0] for matrix in self.matrices if not matrix.to_residual)
        return within + self.kept_numbers(tp)

    def kept_numbers(self, tp: int) -> float:
        """Numbers of a token that a rank keeps for backward at least, besides input and output of the part.

        By default the inputs of products that are added to the stream.
        """
        return sum(matrix.on_rank(tp)[1] for matrix in self.matrices if matrix.to_residual)

    def kept_results(self, keep: Collection[str], tp: int) -> float:
        """Numbers of a token that are kept where only results named by `train.recompute.keep` are."""
        return 0.0

    def most_numbers(self, sequence_length: int) -> int:
        """A generous bound of the numbers of a token that are kept and worked with."""
        return 40 * (self.dim + sum(matrix.rows + matrix.columns for matrix in self.matrices))

    def fits(self, tp: int) -> bool:
        """True if tp can cut the part."""
        if self.divisions is None:
            return tp == 1
        return all(division.fits(tp) for division in self.divisions)

    def uneven(self, tp: int) -> list[str]:
        """Names of matrices and vectors that tp would cut into unequal pieces, though `divisions` fit."""
        sides = {
            each.name: each.rows if each.cut == "rows" else each.columns for each in self.matrices if not each.whole(tp)
        }
        sides |= {each.name: each.shape[0] for each in self.vectors if not each.shared(tp)}
        return [name for name, size in sides.items() if size % tp]

    def matrix(self, name: str) -> Matrix | None:
        """The matrix that a parameter within the part is the weight of."""
        module, _, kind = name.rpartition(".")
        return next((each for each in self.matrices if kind == "weight" and each.name == module), None)

    def stack(self, name: str) -> Stack | None:
        """The stack that a parameter within the part is, or has the biases of."""
        return next((each for each in self.stacks if name in (each.name, each.bias_name)), None)

    def parameters(self, tp: int = 1) -> int:
        """Parameters on one rank of tp."""
        biases = sum(matrix.bias_parameters(tp) for matrix in self.matrices)
        norms = sum(norm.parameters(tp) for norm in self.head_norms)
        vectors = sum(vector.parameters(tp) for vector in self.vectors)
        return self.matrix_parameters(tp) + biases + norms + vectors + self.stack_parameters(tp)

    def matrix_parameters(self, tp: int = 1) -> int:
        """Parameters in matrices on one rank of tp."""
        return sum(matrix.parameters(tp) for matrix in self.matrices)

    def stack_parameters(self, tp: int = 1) -> int:
        """Parameters of experts on one rank of tp, whose ranks have shards of them as those of dp_shard and cp have."""
        return sum(stack.parameters for stack in self.stacks) // tp

    def partial_gradients(self, tp: int) -> Iterator[int]:
        """Sizes of the parameters that all ranks of tp have and of whose gradients each knows a part."""
        for norm in self.head_norms:
            if norm.heads is None:
                yield from norm.spec.parameters(norm.head_dim)
        for vector in self.vectors:
            if vector.shared(tp):
                yield prod(vector.shape)
        for matrix in self.matrices:
            if matrix.whole(tp):
                yield matrix.elements
                if matrix.bias:
                    yield matrix.rows


class MixerSpec(LayerPartSpec):
    """The part of a layer that moves information between positions.

    `build` gives a `pipeline.train.model.context.Mixer`.
    """

    documents_apart: ClassVar[bool] = False
    """Of a plug-in: no position sees one before `LayerContext.bounds_BS`, as `model.document_attention` demands."""
    both_directions: ClassVar[bool] = False
    """Of a plug-in: with `model.direction: both` positions see those after them. Otherwise no mixer may do so."""

    @property
    def kernel(self) -> KernelUse | None:
        """Demand on the kernel of attention; None: it has no attention."""
        return None

    @property
    def rope(self) -> RopeSpec | None:
        """Rotary embedding; None: it has none."""
        return None

    @property
    def relative(self) -> RelativeSpec | None:
        """Relative positions, a bias of the products of queries and keys; None: it has none."""
        return None

    @property
    def recurrent(self) -> bool:
        """True if a state goes from position to position, see `pipeline.train.model.mixers.recurrence`."""
        return False

    def sees_all(self, length: int) -> bool:
        """True if a kernel needs no mask for a sequence of one document."""
        return self.kernel is None or self.kernel.reach.sees_all(length)

    def cp_transfer(self, method: str, tp: int, cp: int) -> CpTransfer | None:
        """Transfers with a value of `parallel.cp_method`; None: it needs whole sequences."""
        return None


NormPlace = Literal["pre", "output", "both", "post"]
Residual = Literal["sequential", "parallel", "parallel_shared"]


@dataclass(frozen=True)
class LayerSpec:
    """A block: mixer and mlp, or one of them, and their norms. See `LayerConfig` for the places."""

    mixer: MixerSpec | None
    mlp: LayerPartSpec | None
    norm: NormSpec
    norm_place: NormPlace = "pre"
    residual: Residual = "sequential"
    residual_scale: float = 1.0
    """Factor on what a part adds to the stream."""
    input_norm: bool = True
    """False: the stream that enters the layer has no norm of its own, see `model.first_norm`."""
    side: Side | None = None
    """Side of an encoder-decoder whose positions it changes; None: the model has no sides."""
    cross: MixerSpec | None = None
    """Attention of a decoder's layer to the encoder's positions."""
    ends_encoder: bool = False
    """True for the encoder's last one, with the norm `encoder_norm` on the stream after it."""

    @cached_property
    def parts(self) -> dict[str, LayerPartSpec]:
        """Parts by name of the module, in the order of the forward pass."""
        all_parts = {"mixer": self.mixer, "cross": self.cross, "mlp": self.mlp}
        return {place: part for place, part in all_parts.items() if part is not None}

    @cached_property
    def dim(self) -> int:
        """Width of the residual stream."""
        return next(iter(self.parts.values())).dim

    @cached_property
    def norms(self) -> tuple[str, ...]:
        """Names of the modules of norms.

        `mixer_norm` and `mlp_norm` are on inputs, `..._out_norm` on outputs, `..._sum_norm` on the stream after them.
        """
        kinds = {"pre": ("norm",), "output": ("out_norm",), "both": ("norm", "out_norm"), "post": ("sum_norm",)}
        names = [f"{place}_{kind}" for place in self.parts for kind in kinds[self.norm_place]]
        names = names[0 if self.input_norm else 1 :]
        names += ["encoder_norm"] if self.ends_encoder else []
        return tuple(name for name in names if name != "mlp_norm" or self.residual != "parallel_shared")

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """Matrices by name of the module within the layer, in the order of the forward pass."""
        return {f"{place}.{each.name}": each for place, part in self.parts.items() for each in part.matrices}

    @cached_property
    def stacks(self) -> dict[str, Stack]:
        """Stacks by name of the parameter within the layer."""
        return {f"{place}.{each.name}": each for place, part in self.parts.items() for each in part.stacks}

    @cached_property
    def norm_sizes(self) -> list[int]:
        """Sizes of the parameters of the norms of the parts."""
        return self.norm.parameters(self.dim) * len(self.norms)

    @property
    def ends_in_sum(self) -> bool:
        """True if nothing reads the result of the last product for a gradient: it is added, and that is all."""
        return self.norm_place == "pre" and not self.ends_encoder

    def fits(self, tp: int) -> bool:
        """True if tp can cut all parts."""
        return all(part.fits(tp) for part in self.parts.values())


@dataclass(frozen=True)
class MtpSpec:
    """A depth of multi-token prediction, see `MtpLayer`: two matrices, a block and three norms."""

    layer: LayerSpec
    norm: NormSpec

    @cached_property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.layer.dim

    @cached_property
    def inputs(self) -> tuple[Matrix, Matrix]:
        """Matrices before the block, which every rank of tp has whole."""
        return tuple(  # type: ignore[return-value]
            Matrix(name, self.dim, self.dim, cut="positions", fp8=False) for name in ("of_embedding", "of_stream")
        )

    @cached_property
    def norm_sizes(self) -> list[int]:
        """Sizes of the parameters of the norms besides those of the block."""
        return self.norm.parameters(self.dim) * 3
