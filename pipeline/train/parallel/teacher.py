"""A frozen teacher beside the model: laid out as the model is, without gradients, moments or a place in checkpoints."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline.config import Config
from pipeline.config.model import ModelConfig
from pipeline.config.train import RecomputeConfig
from pipeline.config.weights import DistillConfig
from pipeline.data.loading.batch import Batch
from pipeline.train.model.context import Context
from pipeline.train.model.decoder_spec import DecoderSpec, decoder_spec
from pipeline.train.model.loss import DeferredLogits, Distillation
from pipeline.train.parallel.mesh import with_experts
from pipeline.train.parallel.parallelize import (
    COMPUTE_DTYPE,
    ParallelModel,
    attention_choice,
    parallelize,
    recurrent_choice,
)
from pipeline.train.parallel.setup import Setup


class Teacher:
    """Gives the logits that a student is to learn.

    Args:
        settings: Of the distillation.
        model: With its weights, in evaluation mode.
    """

    def __init__(self, settings: DistillConfig, model: ParallelModel) -> None:
        self._settings, self._model = settings, model

    @property
    def spec(self) -> DecoderSpec:
        """Specification of the teacher."""
        return self._model.spec

    @torch.no_grad()
    def teach(self, batch: Batch, context: Context) -> Context:
        """The context of a micro-batch in training, with the teacher's part of its criterion.

        Only the input of the teacher's last matrix exists for all positions; the loss makes logits of it in chunks.

        Args:
            batch: What the student gets of the micro-batch.
            context: Of the student.
        """
        assert context.criterion is not None
        seen = replace(context, criterion=None, observer=None, dropout=None, routing=None, on_routed=None, ahead=None)
        logits = self._model.whole(batch.tokens, seen)
        assert isinstance(logits, DeferredLogits)
        distillation = Distillation(logits, self._settings.weight, self._settings.temperature)
        return replace(context, criterion=replace(context.criterion, distillation=distillation))


def teacher_config(config: Config, model: ModelConfig) -> Config:
    """A config whose model is the teacher: computed in its own format, as it is, and sharded between its passes.

    Args:
        config: Of the run.
        model: The teacher's `model:` section.
    """
    settings = config.train.teacher
    assert settings is not None
    # Documents are the data's, whatever those of the teacher's training were.
    model = model.model_copy(
        update={
            "document_attention": config.model.document_attention,
            "dropout": 0.0,
            "vocab_multiple": config.model.vocab_multiple,
        }
    )
    train = {
        "compile": False,
        "recompute": RecomputeConfig(),
        "precision": config.train.precision.model_copy(update={"compute": settings.dtype, "fp8": None}),
        "balance": config.train.balance.model_copy(update={"force": False}),
        "distill": None,
    }
    return config.model_copy(update={"model": model, "train": config.train.model_copy(update=train)})


def build_teacher(config: Config, setup: Setup) -> ParallelModel:
    """The parts of a teacher on this process, without weights yet.

    Args:
        config: Of the teacher, see `teacher_config`.
        setup: Of the student.
    """
    spec = decoder_spec(config.model, setup.spec.vocab_size, config.max_positions)
    mesh = with_experts(setup.mesh, setup.device.type) if spec.expert_layers else setup.mesh
    setup = Setup(setup.device, mesh, spec)
    attention, recurrent = attention_choice(config, setup), recurrent_choice(config, setup)
    # Without a backward pass nothing but this ever frees what was gathered.
    parallel = config.parallel.model_copy(update={"reshard_after_forward": True})
    config = config.model_copy(update={"parallel": parallel})
    model = parallelize(config, setup, COMPUTE_DTYPE[config.train.precision.compute])
    for part in model.parts.values():
        part.kernel = attention.build(config.train.deterministic)
        part.recurrent = recurrent.build()
        part.head.defers = True
    model.train(False)
    return model
