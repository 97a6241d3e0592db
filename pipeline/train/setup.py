"""From a config to the objects of a run: device, mesh, tokenizer, model. Training and evaluation both start here."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from pipeline.config import Config
from pipeline.data.preprocess import run_tokenizer
from pipeline.data.tokenizer import Tokenizer
from pipeline.train.checkpoint import storage
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.model.config import DecoderSpec, decoder_spec
from pipeline.train.model.decoder import Decoder
from pipeline.train.parallel.mesh import Mesh, build_mesh, choose_device
from pipeline.train.parallel.parallelize import parallelize


@dataclass(frozen=True)
class Setup:
    """What exists before the first weight."""

    device: torch.device
    mesh: Mesh
    tokenizer: Tokenizer
    spec: DecoderSpec


def set_up(config: Config) -> Setup:
    """Threads, device, process group, tokenizer of the run, and the model's specification."""
    torch.set_num_threads(config.launch.threads or len(os.sched_getaffinity(0)))
    device = choose_device(config.launch.device)
    tokenizer = run_tokenizer(config)
    spec = decoder_spec(config.model, tokenizer.vocab_size, config.max_positions)
    return Setup(device, build_mesh(device), tokenizer, spec)


def load_for_inference(config: Config, step: int | None) -> tuple[Setup, Decoder, Checkpoint]:
    """The model of a verified checkpoint, of `step` or the latest one, in evaluation mode."""
    checkpoint = Checkpoints(config.run.dir / "checkpoints").at(step)
    setup = set_up(config)
    model = parallelize(setup.spec, setup.mesh, config.train.precision, setup.device)
    storage.read(checkpoint.path, model)
    model.eval()
    return setup, model, checkpoint
