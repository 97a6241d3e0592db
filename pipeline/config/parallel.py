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
    """Number of layers of each stage, first to last; by default balanced, embedding and head counted. 0 is for a first
    stage with the embedding alone, and a last one with the head alone."""

    @property
    def stages_per_rank(self) -> int:
        """`virtual_stages`, or the schedule's own number."""
        return self.virtual_stages or (1 if self.schedule in ("gpipe", "1f1b") else 2)


class OverlapConfig(Section):
    """Communication that runs beside computation."""

    forward_prefetch: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """With dp_shard, layers whose weights are gathered ahead of the one at work in the forward pass. 0: each layer's
    when its turn comes, which on a GPU is beside the layer before, as long as the host is ahead of it. More are asked
    for before the layer is computed: for layers too small for the host, or a slow network, at the memory of these
    layers' weights."""
    backward_prefetch: int = Field(default=1, ge=1, le=MAX_LAYERS)
    """The same in the backward pass, where weights were given back after forward. 1 is what torch does by itself."""
    reduce: Literal["each", "last"] | None = None
    """With dp_shard and several micro-batches: add gradients up over the processes in the backward pass of each
    micro-batch (`each`), which keeps them sharded, or in that of the last one (`last`), which sends less and keeps
    whole fp32 gradients meanwhile. By default `each` without a pipeline and `last` with one. Zero-bubble schedules add
    up after all backward passes, and need `last`."""
    async_tp: bool = False
    """With tp, sequence_parallel and compiled layers on GPUs of one node: cut gathers and sums of a layer in pieces,
    which are sent while the matrix product beside them computes others."""


class ParallelConfig(Section):
    """Degrees of parallelism. Processes = pp x dp_replicate x dp_shard x cp x tp, tp innermost, pp outermost."""

    tp: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Tensor parallel: every matrix is cut over N processes."""
    pp: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Pipeline parallel: the layers are cut into stages over N processes. Set train.micro_batch_size with it: a
    step needs several micro-batches."""
    cp: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Context parallel: every sequence is cut over N processes."""
    cp_method: CpMethod = "all_gather"
    """With cp, how attention sees the whole sequence. `all_gather`: each process has two pieces of it, one from either
    end, and collects all keys and values. `ulysses`: each has one piece, and exchanges it for some heads of the whole
    sequence; heads, and key and value heads, are cut over tp x cp."""
    ep: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Expert parallel: the experts of a layer are dealt to N of the processes that share a model's weights, and tokens
    travel to them and back. It is not an axis of its own: it must divide dp_shard x cp x tp. tp cuts no expert."""
    dp_replicate: int = Field(default=1, ge=-1, le=MAX_PROCESSES)
    """Data parallel with a whole copy of the weights on each process, or on each group of dp_shard. -1: the rest."""
    dp_shard: int = Field(default=-1, ge=-1, le=MAX_PROCESSES)
    """Data parallel with weights, gradients and optimizer states sharded over N processes. -1: the rest."""
    sequence_parallel: bool = True
    """With tp, norms and residual stream are cut along the sequence too, which saves memory and sends no more. Sequence
    lengths must be multiples of tp."""
    reshard_after_forward: bool | None = None
    """With dp_shard, give whole weights back after forward and gather them again for backward (ZeRO-3), or keep them
    until backward has ended, in a pipeline that of the step (like ZeRO-2). By default true without a pipeline and false
    with one. Zero-bubble schedules (interleaved_zero_bubble, zbv, dualpipev) need false."""
    overlap: OverlapConfig = OverlapConfig()
    """Communication beside computation."""
    pipeline: PipelineConfig = PipelineConfig()
    """With pp, the pipeline."""

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
