"""A teacher's part in the resource plan of a run: its weights, its logits, and its forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.common.format import size
from pipeline.config import Config
from pipeline.config.parallel import PipelineConfig
from pipeline.train.distributed.layout import Layout
from pipeline.train.host.devices import Device
from pipeline.train.model.decoder import ModelPart
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import flops_per_token, num_parameters
from pipeline.train.parallel.footprint import COMPUTE_BYTES, end_parameters, layer_sizes
from pipeline.train.parallel.step_shapes import StepShape
from pipeline.train.planning.timing import forward_seconds
from pipeline.train.start.teacher import planned_teacher

_FP32_LOGITS = 3
"""Numbers in fp32 that the divergence has for a logit at once: of the student, of the teacher, and weights."""


@dataclass(frozen=True)
class TeacherPlan:
    """The teacher of a run, by its specification alone."""

    config: Config
    """Of the teacher, see `teacher_config`."""
    spec: DecoderSpec

    @classmethod
    def of(cls, config: Config, spec: DecoderSpec) -> TeacherPlan | None:
        """The teacher of a run with a model; None without one.

        Raises:
            UserError: There is no teacher where the run file says.
        """
        found = planned_teacher(config, spec.vocab_size)
        return None if found is None else cls(*found)

    def bytes(self, layout: Layout, shape: StepShape) -> int:
        """Memory that a process needs for it, besides that of a step without.

        Shards of its weights, embedding and head whole, the stream of a micro-batch, and logits of a chunk. While it
        computes its layers, nothing of the model's activations is there, which need more.
        """
        width, part = COMPUTE_BYTES[self.config.train.precision.compute], ModelPart.whole(self.spec)
        ends = end_parameters(self.spec, part, layout.tp)
        parameters = ends + sum(layer_sizes(self.spec, part, layout.tp).values())
        held = -(-parameters // layout.shards) + (ends if layout.shards > 1 else 0)
        tokens = -(-shape.micro_batch_size * shape.stream.length // layout.cp)
        columns = self.spec.vocab_padded // layout.tp
        chunk = min(tokens, self.config.train.loss.tokens_at_once(columns))
        logits = chunk * columns * (width + _FP32_LOGITS * COMPUTE_BYTES["fp32"])
        return width * (held + tokens * self.spec.dim) + logits

    def flops(self, shape: StepShape, *, causal: bool) -> float:
        """FLOPs of its forward pass on a token; conventions as in `flops_per_token`."""
        return flops_per_token(self.spec, shape.stream, causal=causal) / 3

    def seconds(self, layout: Layout, shape: StepShape, device: Device) -> float:
        """Seconds of its passes in a step."""
        parallel = self.config.parallel.model_copy(update={"pipeline": PipelineConfig()})
        config = self.config.model_copy(update={"parallel": parallel})
        return shape.micro_batches * forward_seconds(config, layout, self.spec, shape, device)

    def lines(self, layout: Layout, shape: StepShape, model_flops: float) -> Iterator[str]:
        """The teacher in words.

        Args:
            layout: Of the run.
            shape: Of the steps that need the most memory.
            model_flops: FLOPs of training the model alone on a token, attention counted whole.
        """
        own = self.flops(shape, causal=False)
        yield (
            f"teacher: {num_parameters(self.spec):,} parameters in {self.config.train.precision.compute}, "
            f"{size(self.bytes(layout, shape))} per process with its logits; its forward pass is {own / 1e9:,.4g} G "
            f"FLOPs per token, so a token takes {1 + own / model_flops:.2f} times the work of training without it"
        )
