"""Specs of the parameters of a part of a layer, and their cut over tp: matrices, stacks of experts, vectors, norms."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple


class WidthAxis(NamedTuple):
    """Entries of one dimension of a parameter, each of which pruning keeps or leaves out whole."""

    key: str
    """Key of their number below `model:`, like `heads`."""
    size: int
    """Number of entries."""
    block: int = 1
    """Consecutive elements of one entry."""


Axes = tuple[WidthAxis | None, ...]
"""Entries of each dimension; None: it stays as it is."""
DIM = "dim"
"""Key of the channels of the residual stream."""


@dataclass(frozen=True)
class NormSpec:
    """A normalization over the last dimension."""

    kind: Literal["rmsnorm", "layernorm"]
    eps: float
    bias: bool = True
    """A layernorm has a bias."""
    offset: float = 0.0
    """Added to the weight."""

    def parameters(self, dim: int) -> list[int]:
        """Sizes of the parameters of a normalization of `dim` elements."""
        return [dim] * (2 if self.kind == "layernorm" and self.bias else 1)


@dataclass(frozen=True)
class Matrix:
    """A weight that the input of an `nn.Linear` is multiplied with, once in a forward pass."""

    name: str
    """Name of the module within the part, like `wq`."""
    rows: int
    """Outputs."""
    columns: int
    """Inputs."""
    cut: Literal["rows", "columns", "whole", "positions"]
    """Dimension that tp cuts. By rows: each rank has the whole input and computes some of the outputs. By columns: each
    rank has some of the input, and the results are added up over tp. So a matrix whose input comes from one that is cut
    by rows is cut by columns. Of others each rank has all, and gradients are sums over tp. Whole: it computes all
    outputs, which it uses for some heads. By positions: it multiplies some of the tokens."""
    bias: bool = False
    heads: int | None = None
    """Number of heads in the rows; several tp ranks may share one head. None: tp divides the rows."""
    to_residual: bool = False
    """True if its result is added to the residual stream, and nothing else reads it."""
    feeds_rate: bool = False
    """True if its result becomes a rate of a state: of decay, a step of time, or the share of an old value that is
    replaced. An error of rounding there grows with each position, and its rows are no map between spaces, so neither
    fp8 nor Muon has it."""
    fp8: bool = True
    """The product may be in fp8; see `takes_fp8`."""
    of_whole: bool = False
    """True if its input comes from a `whole` matrix, so that each rank keeps its part of the gradient of that."""
    of_encoder: bool = False
    """True if it multiplies the encoder's positions, in a decoder's layer."""
    input_key: str | None = None
    """Key below `model:` that gives `columns`, of a size that need not grow with the width of the model: a rank, the
    hidden size of an expert. muP asks whether it does (`init.mup_fixed`). None: it grows."""
    muon: bool = True
    """Muon may have it; see `takes_muon`. False: its rows are of some heads each, and no map between spaces."""

    @property
    def takes_fp8(self) -> bool:
        """True if the product may be in fp8."""
        return self.fp8 and not self.feeds_rate

    @property
    def takes_muon(self) -> bool:
        """True if Muon may have it."""
        return self.muon and not self.feeds_rate

    @property
    def elements(self) -> int:
        """Elements of the whole matrix."""
        return self.rows * self.columns

    def shared(self, tp: int) -> bool:
        """True if every rank of tp has all of it, and uses the rows of one head."""
        return self.heads is not None and self.heads % tp > 0

    def on_rank(self, tp: int) -> tuple[int, int]:
        """Rows and columns that a rank of tp multiplies with."""
        if self.shared(tp):
            assert self.heads is not None
            return self.rows // self.heads, self.columns
        if self.cut in ("whole", "positions"):
            return self.rows, self.columns
        return (self.rows // tp, self.columns) if self.cut == "rows" else (self.rows, self.columns // tp)

    def whole(self, tp: int) -> bool:
        """True if every rank of tp has all of it."""
        return self.cut in ("whole", "positions") or self.shared(tp)

    def parameters(self, tp: int) -> int:
        """Elements that a rank of tp has, without the bias."""
        return self.elements if self.whole(tp) else self.elements // tp

    def bias_parameters(self, tp: int) -> int:
        """Elements of the bias that a rank of tp has."""
        if not self.bias:
            return 0
        return self.rows // tp if self.cut == "rows" and not self.whole(tp) else self.rows


@dataclass(frozen=True)
class Stack:
    """Matrices of experts, one parameter [count, rows, columns]; a token is multiplied with some of them.

    tp does not cut them: its ranks are places with other tokens, as those of dp_shard and cp are.
    """

    name: str
    """Name of the parameter within the part, like `experts.w1`."""
    count: int
    """Experts."""
    used: int
    """Experts that a token is multiplied with."""
    rows: int
    """Outputs of one."""
    columns: int
    """Inputs of one."""
    bias: bool = False
    """True if each has a bias; `bias_name` is a parameter [count, rows]."""
    to_residual: bool = False
    """See `Matrix`."""
    input_key: str | None = None
    """See `Matrix`."""

    @property
    def elements(self) -> int:
        """Elements of all."""
        return self.count * self.rows * self.columns

    @property
    def used_elements(self) -> int:
        """Elements that a token is multiplied with."""
        return self.used * self.rows * self.columns

    @property
    def used_parameters(self) -> int:
        """Elements that a token is multiplied with, and biases."""
        return self.used_elements + (self.used * self.rows if self.bias else 0)

    @property
    def bias_name(self) -> str:
        """Name of the parameter of the biases within the part: `experts.b1` of `experts.w1`."""
        module, _, name = self.name.rpartition(".")
        return f"{module}.b{name[1:]}"

    @property
    def parameters(self) -> int:
        """Elements with biases."""
        return self.elements + (self.count * self.rows if self.bias else 0)


@dataclass(frozen=True)
class Normal:
    """Normal initial values; equal ones with `std` 0."""

    mean: float = 0.0
    std: float = 0.0


@dataclass(frozen=True)
class Uniform:
    """Initial values that are equally likely between two bounds, or a function of such values."""

    low: float
    high: float
    then: Literal["log", "inverse_softplus_of_exp"] | None = None
    """`log` of them; or what has their exponential as its softplus: steps of time, uniform in their logarithm."""


@dataclass(frozen=True)
class Vector:
    """A parameter that is in no `nn.Linear`: taps of a convolution, sinks, decays. tp cuts its rows.

    The module that has one with `heads` has an attribute `own_rows`: the slice of those that it uses, where all ranks
    have all of them, and otherwise None.
    """

    name: str
    """Within the part; with a dot that of a module within it."""
    shape: tuple[int, ...]
    initial: Normal | Uniform = Normal()
    heads: int | None = None
    """See `Matrix`."""

    def shared(self, tp: int) -> bool:
        """See `Matrix`."""
        return self.heads is not None and self.heads % tp > 0

    def parameters(self, tp: int) -> int:
        """Elements that a rank of tp has."""
        return prod(self.shape) // (1 if self.shared(tp) else tp)


@dataclass(frozen=True)
class HeadNorm:
    """A norm of each head, with parameters that all ranks of tp have; or of all heads together, cut over tp.

    The result of a `whole` matrix is normalized as one head is.
    """

    name: str
    """Name of the module within the part."""
    spec: NormSpec
    head_dim: int
    heads: int | None = None
    """Heads that are normalized together; None: each by itself."""
    groups: int = 1
    """Equal runs of these heads, each of which is normalized by itself."""

    def sums(self, tp: int) -> int:
        """Numbers of a token that are summed over tp, where a rank does not have all of what it normalizes."""
        return 0 if self.heads is None or self.groups % tp == 0 else self.groups

    def parameters(self, tp: int) -> int:
        """Parameters on a rank of tp."""
        return sum(self.spec.parameters(self.head_dim * (self.heads or tp) // tp))
