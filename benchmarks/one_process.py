"""A model that trains in this process: a `Stepper` from the sections of a run file, without a run or data."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.config import Config
from pipeline.train.distributed.process_group import init_process_group
from pipeline.train.distributed.rank import Processes
from pipeline.train.loop.step import Stepper
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.parallelize import build_model
from pipeline.train.parallel.setup import set_up
from pipeline.train.start.setup import ALONE


def stepper_of(
    device: torch.device,
    vocabulary: int,
    *,
    model: dict[str, Any],
    train: dict[str, Any],
    seed: int = 1,
    parallel: dict[str, Any] | None = None,
    ranks: Processes = ALONE,
) -> Stepper:
    """A stepper for batches of one source.

    Args:
        vocabulary: Entries of the tokenizer.
        model: The `model:` section.
        train: The `train:` section but for the duration.
        parallel: The `parallel:` section.
        ranks: This process, of those that train the model.
    """
    config = Config.model_validate(
        {
            "run": {"dir": "/nowhere", "seed": seed},
            "data": {"sources": [{"name": "text", "paths": ["/nowhere"]}]},
            "tokenizer": {"train": {"vocab_size": 300}},
            "model": model,
            "train": {"duration": "1 steps", **train},
            "parallel": parallel or {},
        }
    )
    init_process_group(ranks, device, config.launch.time_limits)
    setup = set_up(config, vocabulary, device)
    built = build_model(config, setup)
    return Stepper(config, setup, built, Optimizers(config, built), sources=["text"])
