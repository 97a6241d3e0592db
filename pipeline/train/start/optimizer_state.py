"""Start a new run with the moments of an optimizer beside exported weights, and its count of steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.common.errors import UserError
from pipeline.common.format import shape_text
from pipeline.config import Config
from pipeline.train.checkpoint.exported_loading import load_shards, verify_files
from pipeline.train.checkpoint.exported_optimizer import MOMENTS, ExportedOptimizer
from pipeline.train.checkpoint.state_shapes import state_shapes
from pipeline.train.checkpoint.weight_source import exported_tensors
from pipeline.train.distributed.process_group import broadcast_from_rank0
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.optim.optimizers import Optimizers, make_states
from pipeline.train.parallel.parallelize import ParallelModel

_OPTION = "train.init_from.optimizer"


@dataclass(frozen=True)
class OpenedOptimizer:
    """Moments that fit a model, whose hashes have not been compared."""

    source: ExportedOptimizer
    files: dict[str, dict[str, str]]
    """The file of each tensor, by moments."""
    lines: list[str]
    """Warnings."""

    def load(self, model: ParallelModel, optimizers: Optimizers) -> None:
        """Give optimizers these states; each rank verifies some of the files and reads the rows and columns it has.

        Raises:
            UserError: a file is not as it was written.
        """
        verify_files(self.source.path, self.source.all_files, _OPTION)
        for index, part in model.parts.items():
            states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
            for optimizer in optimizers.by_stage[index]:
                make_states(optimizer)
                states |= optimizer.state
            names = dict(part.named_parameters())
            for moment in MOMENTS:
                of_parameters = ((name, states[parameter][moment]) for name, parameter in names.items())
                load_shards(self.source.folder_of(moment), self.files[moment], of_parameters)
            for parameter in names.values():
                states[parameter]["step"].fill_(self.source.step)


def open_optimizer(config: Config, spec: DecoderSpec) -> OpenedOptimizer:
    """The states that `train.init_from.optimizer` means, in one process.

    Args:
        config: with train.init_from.
        spec: of the model that gets them.

    Raises:
        UserError: there are none, or they do not fit the model or its optimizer.
    """
    wanted = config.train.init_from
    assert wanted is not None and wanted.path is not None
    source, mine = ExportedOptimizer.open(wanted.path), config.train.optimizer
    if mine.type != "adamw":
        raise UserError(
            f"{_OPTION}: {source.path} has the moments of AdamW, and train.optimizer.type is {mine.type}; set it to "
            f"adamw, or {_OPTION}=false"
        )
    shapes, files = state_shapes(spec).parameters, {}
    for moment in MOMENTS:
        folder = source.folder_of(moment)
        files[moment], found = exported_tensors(folder, source.files[moment])
        for name, shape in shapes.items():
            if name not in found:
                raise UserError(f"{_OPTION}: {folder} has no {name}, a parameter of the model; convert it again")
            if found[name].shape != shape or found[name].dtype != torch.float32:
                raise UserError(
                    f"{_OPTION}: {folder}: {name} is {shape_text(found[name].shape)} of {found[name].dtype}, and the "
                    f"model needs {shape_text(shape)} of torch.float32"
                )
        if more := sorted(found.keys() - shapes.keys()):
            raise UserError(f"{_OPTION}: {folder} has {more[0]}, which the model does not have")
    now = {"lr": mine.lr, "betas": list(mine.betas), "eps": mine.eps, "weight_decay": mine.weight_decay}
    lines = [
        f"warning: train.optimizer.{key}: {old} where the moments are from -> {now[key]} here"
        for key, old in source.settings.items()
        if old != now[key]
    ]
    return OpenedOptimizer(source, files, lines)


def opened_everywhere(config: Config, spec: DecoderSpec) -> OpenedOptimizer:
    """`open_optimizer` on every rank, of which rank 0 says what is wrong; every rank calls this."""
    broadcast_from_rank0(lambda: open_optimizer(config, spec).lines)
    return open_optimizer(config, spec)
