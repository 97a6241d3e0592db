"""A config without a run or data, and what a model is built on in this process alone."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.config import Config
from pipeline.config.model import ModelConfig
from pipeline.train.distributed.process_group import init_process_group
from pipeline.train.loop.step import StepResult
from pipeline.train.parallel.setup import Setup, set_up
from pipeline.train.start.setup import ALONE

CPU = torch.device("cpu")


def config_of(model: ModelConfig | dict[str, Any], *, parallel: Any = None, seed: int = 3, **train: Any) -> Config:
    """A model, its layout, and the keys of `train` besides a duration."""
    return Config.model_validate(
        {
            "run": {"dir": "/nowhere", "seed": seed},
            "data": {"sources": [{"name": "text", "paths": ["/nowhere"]}]},
            "tokenizer": {"train": {"vocab_size": 300}},
            "model": model,
            "parallel": parallel or {},
            "train": {"duration": "10 steps", **train},
        }
    )


def setup_of(config: Config, vocab_size: int = 61) -> Setup:
    """What a model of a config is built on, where this process is the whole run."""
    init_process_group(ALONE, CPU, config.launch.time_limits)
    return set_up(config, vocab_size, CPU)


def numbers(result: StepResult) -> dict[str, torch.Tensor]:
    """The tensors of all quantities of a step, by name."""
    return {name: tensor for reading in result.readings for name, tensor in reading.tensors.items()}
