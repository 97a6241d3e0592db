"""From a config to the objects of a run: device, mesh, tokenizer, model. Training and evaluation both start here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipeline.config import Config
from pipeline.data.dataset import Dataset
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import MachineError, UserError
from pipeline.train.allocator import keep_freed_memory
from pipeline.train.checkpoint import storage
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.fingerprint import compare, model_fingerprint
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


def set_up(config: Config, tokenizer: Tokenizer) -> Setup:
    """Threads, device, process group, and the model's specification for a tokenizer."""
    torch.set_num_threads(config.launch.threads or len(os.sched_getaffinity(0)))
    device = choose_device(config.launch.device)
    if device.type == "cpu":
        keep_freed_memory()
    spec = decoder_spec(config.model, tokenizer.vocab_size, config.max_positions)
    return Setup(device, build_mesh(device), tokenizer, spec)


def load_for_inference(config: Config, step: int | None) -> tuple[Setup, Decoder, Checkpoint]:
    """The model of a verified checkpoint, of `step` or the latest one, in evaluation mode.

    The tokenizer is the checkpoint's own, so that text can be continued where the data is not.

    Raises:
        UserError: no such checkpoint, a damaged one, or one of another model than the config's.
    """
    checkpoint = Checkpoints.of_run(config.run.dir).at(step)
    compare(checkpoint.state()["fingerprints"], {"model": model_fingerprint(config)}, config.resume.allow)
    setup = set_up(config, Tokenizer.open(checkpoint.path))
    model = parallelize(setup.spec, setup.mesh, config.train.precision, setup.device)
    storage.read(checkpoint.path, model)
    model.eval()
    return setup, model, checkpoint


def check_tokenizer(datasets: Mapping[str, Dataset], tokenizer: Tokenizer) -> None:
    """Datasets by source must have been tokenized with `tokenizer`; a `UserError` names the one that was not."""
    for name, dataset in datasets.items():
        info = dataset.manifest.tokenizer
        if info.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"source {name!r} ({dataset.folder}) was tokenized with another tokenizer ({info.vocab_size} entries, "
                f"fingerprint {info.fingerprint}) than the model's ({tokenizer.vocab_size} entries, "
                f"{tokenizer.fingerprint}); preprocess it with the model's tokenizer"
            )


@contextmanager
def out_of_memory_means(advice: Callable[[], str]) -> Iterator[None]:
    """A device that runs out of memory inside is a `MachineError` with `advice`, which is asked for then."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MachineError(f"out of memory: {advice()} ({str(error).partition('. ')[0]})") from error
