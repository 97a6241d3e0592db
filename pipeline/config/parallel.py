"""`parallel:`: how the model and the data are laid out over processes, one per device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.base import MAX_PROCESSES, Section
from pipeline.config.layers.mixers import MAX_LAYERS

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]

CpMethod = Literal["all_gather", "ulysses"]

ZERO_BUBBLE = ("interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules that compute the gradients of weights later than those of inputs."""
V_SHAPED = ("zbv", "dualpipev")
"""Schedules whose second stages run back from the last rank to the first: rank 0 has the first and the last stage."""


class PipelineConfig(Section):
    """Pipeline stages: their layers and the order of their passes."""

    schedule: ScheduleName = "1f1b"
    """Order of forward and backward passes of the micro-batches."""
    virtual_stages: int | None = Field(default=None, ge=1, le=MAX_LAYERS)
    """Stages on one rank. 1 for gpipe and 1f1b, exactly 2 for zbv and dualpipev, 2 or more (by default 2) for the
    interleaved schedules."""
    layers_per_stage: list[Annotated[int, Field(ge=0, le=MAX_LAYERS)]] | None = None
    """Number of layers of each stage, first to last; by default balanced, counting embedding and head. 0 is allowed for
    a first stage with only the embedding, and a last one with only the head."""

    @property
    def stages_per_rank(self) -> int:
        """`virtual_stages`, or the schedule's own number."""
        return self.virtual_stages or (1 if self.schedule in ("gpipe", "1f1b") else 2)


class OverlapConfig(Section):
    """Overlap of communication and computation."""

    forward_prefetch: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """With dp_shard, number of layers whose weights are gathered ahead of the current one in the forward pass. 0: a
    layer's weights are gathered when its turn comes, which on a GPU overlaps with the layer before, as long as the host
    is ahead of the GPU. Use 1 or more for small layers or a slow network; it takes the memory of these layers'
    weights."""
    backward_prefetch: int = Field(default=1, ge=1, le=MAX_LAYERS)
    """Layers whose parameters are gathered ahead in the backward pass, with reshard_after_forward. 1 is torch's own
    behaviour."""
    reduce: Literal["each", "last"] | None = None
    """With dp_shard and several micro-batches, when gradients are reduced: in the backward pass of each micro-batch
    (`each`), which keeps them sharded, or of the last one (`last`), which sends less and keeps whole fp32 gradients
    meanwhile. By default `each` without a pipeline and `last` with one. Zero-bubble schedules reduce after all backward
    passes, and need `last`."""
    async_tp: bool = False
    """With tp, sequence_parallel and compiled layers on GPUs of one node: cut gathers and sums of a layer into pieces,
    which are sent while the matrix product computes other pieces."""


class ParallelConfig(Section):
    """Degrees of parallelism. Processes = pp x dp_replicate x dp_shard x cp x tp, tp innermost, pp outermost."""

    tp: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Tensor parallel: every matrix is cut over N processes."""
    pp: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Pipeline parallel: the layers are cut into stages over N processes. Also set train.micro_batch_size: a step needs
    several micro-batches."""
    cp: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Context parallel: every sequence is cut over N processes."""
    cp_method: CpMethod = "all_gather"
    """Method by which attention sees the whole sequence with cp. `all_gather`: each process has two pieces of the
    sequence, one from either end, and gathers all keys and values. `ulysses`: each has one piece, and exchanges it for
    some heads of the whole sequence; heads, and key and value heads, are cut over tp x cp."""
    ep: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Expert parallel: the experts of a layer are distributed over N of the processes that share a model's weights, and
    tokens are sent to them and back. It does not multiply the number of processes: it must divide dp_shard x cp x tp.
    tp does not cut experts."""
    dp_replicate: int = Field(default=1, ge=-1, le=MAX_PROCESSES)
    """Data parallel with a whole copy of the weights on each process, or on each group of dp_shard. -1: all remaining
    processes."""
    dp_shard: int = Field(default=-1, ge=-1, le=MAX_PROCESSES)
    """Data parallel with weights, gradients and optimizer states sharded over N processes. -1: all remaining
    processes."""
    sequence_parallel: bool = True
    """With tp, norms and residual stream are cut along the sequence too, which saves memory and sends the same number
    of bytes. Sequence lengths must be multiples of tp."""
    reshard_after_forward: bool | None = None
    """With dp_shard, true frees whole weights after forward and gathers them again for backward (ZeRO-3); false keeps
    them until backward has ended, in a pipeline until the end of the step (like ZeRO-2). By default true without a
    pipeline and false with one. Zero-bubble schedules (interleaved_zero_bubble, zbv, dualpipev) need false."""
    overlap: OverlapConfig = OverlapConfig()
    """Overlap of communication and computation."""
    pipeline: PipelineConfig = PipelineConfig()
    """The pipeline, with pp."""

    @property
    def splits_backward(self) -> bool:
        """True if backward passes have two halves: gradients of inputs, and later those of weights."""
        return self.pp > 1 and self.pipeline.schedule in ZERO_BUBBLE

    @model_validator(mode="after")
    def _degrees(self) -> ParallelConfig:
        for name in ("dp_replicate", "dp_shard"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be a number of processes, at least 1, or -1 for the rest")
        if self.dp_replicate == -1 and self.dp_shard == -1 and "dp_shard" in self.model_fields_set:
            raise ValueError("only one of dp_replicate and dp_shard can be -1")
        return self
