"""The objects of a run, made from its config: device, mesh, tokenizer, model. Training and evaluation start here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.common.console import alarm
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.parallel import ParallelConfig
from pipeline.config.train import AttentionConfig, RecomputeConfig, RecurrenceConfig
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint import dcp_storage
from pipeline.train.checkpoint.exported import Evaluated, ExportedWeights, WeightsOf
from pipeline.train.checkpoint.fingerprint import compare, model_fingerprint
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.checkpoint.resume_point import source_point
from pipeline.train.distributed import process_group
from pipeline.train.distributed.cpu_affinity import available, bind, far_from_gpu
from pipeline.train.distributed.process_group import Processes, broadcast_from_rank0, visible_gpus
from pipeline.train.distributed.rank import LAUNCHER
from pipeline.train.host.cpu_allocator import keep_freed_memory
from pipeline.train.host.cpu_matmul import choose_products
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import num_parameters
from pipeline.train.parallel.parallelize import ParallelModel, attention_choice, parallelize, recurrent_choice
from pipeline.train.parallel.runner import Runner, build_runner
from pipeline.train.parallel.setup import Setup, set_up
from pipeline.train.start.exported_model import check_exported, open_exported
from pipeline.train.torch_compat.compiler import close_torch_folder

Fill = Callable[[ParallelModel], object]
"""Fills a model with weights."""
_MOST_THREADS = 2**16
_SMALLEST_WEIGHT = 2
"""Bytes of a weight in a checkpoint at least."""


@dataclass(frozen=True)
class InferenceModel:
    """The model that loaded weights belong to, in evaluation mode, on this process's place in its layout."""

    setup: Setup
    model: ParallelModel
    runner: Runner
    tokenizer: Tokenizer
    """The one of the weights; where that is not known, the run's."""
    source: Evaluated


def init_rank(config: Config, ranks: Processes, log: Callable[[str], None] = lambda line: None) -> torch.device:
    """Threads, device and process group of this rank; returns the device.

    Args:
        config: resolved config.
        ranks: the place of this process.
        log: gets what was chosen for the machine, a line.
    """
    device = choose_device(config.launch.device, ranks)
    if config.launch.bind == "auto" and (bound := bind(ranks, device, os.environ)):
        log(bound)
    if far := far_from_gpu(ranks, device):
        alarm("warning:", far)  # every rank, of which `log` hears the first one alone
    products = set_arithmetic(config, ranks, device)
    if device.type == "cpu":
        memory = "freed memory kept" if keep_freed_memory() else "no way to keep freed memory"
        log(f"{torch.get_num_threads()} threads, {memory}, {products}")
    process_group.init_process_group(ranks, device, config.launch.time_limits)
    return device


def set_arithmetic(config: Config, ranks: Processes, device: torch.device) -> str:
    """Threads of this process, and the library of its products; the choice and its reason, for the log."""
    close_torch_folder()
    # Ranks need not have got equal parts.
    cores = min(cores_of(ranks, os.environ), len(os.sched_getaffinity(0)))
    torch.set_num_threads(config.launch.threads or threads_of_shell(os.environ) or cores)
    if device.type == "cpu":
        return choose_products()
    # Not what an earlier run in this process chose for the CPU: here that means TF32.
    torch.set_float32_matmul_precision("highest")
    return "products of a GPU"


def threads_of_shell(environment: Mapping[str, str]) -> int | None:
    """Threads by `OMP_NUM_THREADS`, if a person has set it: torchrun sets it to 1 where it is not set.

    Raises:
        UserError: it is not a number of threads.
    """
    given = environment.get("OMP_NUM_THREADS", "")
    words = given.partition(",")[0].strip()  # others are of nested regions
    if not given or (words == "1" and "TORCHELASTIC_RUN_ID" in environment):
        return None
    if not words.isdecimal() or not 0 < int(words) <= _MOST_THREADS:
        raise UserError(
            f"OMP_NUM_THREADS is {given!r}, which is not a number of threads; set a whole number from 1 on, or unset it"
        )
    return int(words)


def cores_of(ranks: Processes, environment: Mapping[str, str]) -> int:
    """Cores that this rank may use: its part of those that its process may run on.

    In a task of srun no more than `--cpus-per-task`, since the scheduler may not bind tasks to their cores. Where it
    does, and each rank is a task, they are this rank's alone.
    """
    cores = len(available())
    asked = environment.get("SLURM_CPUS_PER_TASK", "")
    if not asked.isdecimal():
        return max(1, cores // ranks.local_world_size)
    place = (environment.get("SLURM_PROCID"), environment.get("SLURM_NTASKS"))
    launched = LAUNCHER in environment or "TORCHELASTIC_RUN_ID" in environment
    is_task = place == (str(ranks.rank), str(ranks.world_size)) and not launched
    return max(1, min(cores, int(asked)) // (1 if is_task else ranks.local_world_size))


def choose_device(wanted: str, ranks: Processes) -> torch.device:
    """The device of `launch.device` for this rank: on a GPU node the one with its local number."""
    gpus = visible_gpus()
    if wanted == "cuda" and not gpus:
        raise UserError("launch.device is cuda, but torch sees no CUDA device here; use launch.device=cpu or auto")
    if gpus and wanted != "cpu":
        if ranks.local_world_size > gpus:
            raise UserError(
                f"{ranks.local_world_size} processes of this node want a GPU each, but torch sees "
                f"{gpus}; lower their number (launch.processes, eval.processes) to that, or use "
                "launch.device=cpu"
            )
        return torch.device("cuda", ranks.local_rank)
    return torch.device("cpu")


def be_deterministic() -> None:
    """Let a GPU use only algorithms that give the same bits each time, from now on."""
    # cuBLAS reads it when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # With it torch writes every new tensor twice; nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


ALONE = Processes(rank=0, world_size=1, local_rank=0, local_world_size=1)
"""A process that has all of the model."""


def check_has_weights(checkpoint: Checkpoint, spec: DecoderSpec) -> None:
    """Refuse a model that its checkpoint has not the bytes for, before memory is taken for it."""
    needed, size = _SMALLEST_WEIGHT * num_parameters(spec), checkpoint.size
    if needed > size:
        raise UserError(
            f"{checkpoint.path} has {size:,} bytes, but the model that it names has weights of {needed:,} bytes at "
            "least: they do not belong together"
        )


def load_for_inference(
    config: Config, which: WeightsOf, ranks: Processes = ALONE, parallel: ParallelConfig | None = None
) -> InferenceModel:
    """The model of verified weights in evaluation mode; every rank calls this.

    Of a checkpoint they are those that `eval.weights` names. The tokenizer is that of the weights, so that text can be
    continued where the data is not.

    Args:
        config: resolved config.
        which: checkpoint or folder; rank 0 says which checkpoint is the latest.
        ranks: the place of this process, which joins the others if it has not yet.
        parallel: how the model is laid out over them, a layout that `rules` allows; by default whole in one process.

    Raises:
        UserError: no such weights, damaged ones, those of another model than the config's, or a checkpoint without the
            weights that are asked for.
    """
    device = init_rank(config, ranks)
    opened = _open_exported(config, which) if isinstance(which, Path) else _open_checkpoint(config, which)
    return _inference_model(config, opened, device, parallel or ParallelConfig())


def in_memory(config: Config, weights: ExportedWeights, tokenizer: Tokenizer, fill: Fill) -> InferenceModel:
    """The model of weights that are in the memory of this process, which is alone.

    Args:
        config: resolved config, of the same model.
        weights: what results say of them.
        tokenizer: that they go with.
        fill: fills a model with them.
    """
    device = init_rank(config, ALONE)
    opened = _Opened(weights, tokenizer, lambda spec: None, fill)
    return _inference_model(config, opened, device, ParallelConfig())


def _inference_model(config: Config, opened: _Opened, device: torch.device, parallel: ParallelConfig) -> InferenceModel:
    """The model of opened weights in evaluation mode; every rank calls this."""
    config = for_inference(config, parallel)
    setup = set_up(config, opened.tokenizer.vocab_size, device)
    broadcast_from_rank0(lambda: opened.check(setup.spec))
    model = build_for_inference(config, setup, opened.load)
    return InferenceModel(setup, model, build_runner(config, setup, model), opened.tokenizer, opened.source)


def build_for_inference(config: Config, setup: Setup, load: Fill) -> ParallelModel:
    """A model with weights, in evaluation mode; every rank calls this.

    Args:
        config: from `for_inference`.
        setup: of that config.
        load: fills it.
    """
    model = parallelize(config, setup)
    kernel = attention_choice(config, setup).build(config.train.deterministic)
    recurrent = recurrent_choice(config, setup).build()
    for part in model.parts.values():
        part.kernel = kernel
        part.recurrent = recurrent
    load(model)
    model.train(False)
    return model


@dataclass(frozen=True)
class _Opened:
    """Verified weights that have not been read yet."""

    source: Evaluated
    tokenizer: Tokenizer
    check: Callable[[DecoderSpec], None]
    """Raises if they do not belong to a model; called on rank 0."""
    load: Fill
    """Called on every rank."""


def _open_checkpoint(config: Config, step: int | None) -> _Opened:
    checkpoint = source_point(Checkpoints.of_run(config.run.dir), step)
    # Rank 0 alone says what is wrong.
    broadcast_from_rank0(
        lambda: compare(checkpoint.state()["fingerprints"], {"model": model_fingerprint(config)}, config.resume.allow)
    )
    return _Opened(
        checkpoint,
        Tokenizer.open(checkpoint.path),
        lambda spec: check_has_weights(checkpoint, spec),
        lambda model: dcp_storage.read(checkpoint, model, weights=config.eval.weights),
    )


def _open_exported(config: Config, folder: Path) -> _Opened:
    weights, tokenizer = open_exported(config, folder)
    return _Opened(weights.source, tokenizer, lambda spec: check_exported(config, weights, spec), weights.load)


def for_inference(config: Config, parallel: ParallelConfig) -> Config:
    """A config whose model is laid out by `parallel`, without what only its training passes have."""
    unused = {
        "compile": False,
        "recompute": RecomputeConfig(),
        "precision": config.train.precision.model_copy(update={"fp8": None}),
        # The training's own choice may not be installed here.
        "attention": AttentionConfig(),
        "recurrence": RecurrenceConfig(),
        # Whatever a training for measurements of speed did.
        "balance": config.train.balance.model_copy(update={"force": False}),
    }
    return config.model_copy(update={"parallel": parallel, "train": config.train.model_copy(update=unused)})


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
