"""The optimizer of a run of Megatron Core: Adam's moments, its count of steps, and the fp32 weights that it updates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.train.checkpoint.tensors import Stored
from pipeline.train.foreign.distributed import DistributedFiles
from pipeline.train.foreign.megatron import MegatronCheckpoint
from pipeline.train.foreign.megatron_arguments import COMMON
from pipeline.train.foreign.megatron_tensors import BucketTensors, UnstackedTensors, model_tensors
from pipeline.train.huggingface.config_source import shortened
from pipeline.train.huggingface.foreign_model import ForeignModel, TensorFiles

MASTERS, MOMENTS = "param", ("exp_avg", "exp_avg_sq")
"""Names of the states of a parameter there."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_BUCKET = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\.(\w+)")
_GROUPS = "optimizer.distributed.dp_group_idx_0.optimizer"
_SAVE_SO = "save it with Megatron's --dist-ckpt-optim-fully-reshardable"
_MOST_STEPS = 2**53
_COMPARED_BYTES = 2**25
"""Bytes of masters that are compared with weights at a time."""


@dataclass(frozen=True)
class AdamSettings:
    """Settings of an optimizer of a run, and how far it came."""

    step: int
    """Updates that it made, for the correction of the moments' bias."""
    lr: float
    """Peak learning rate."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float | None
    samples: int
    """Samples that the run has trained on."""
    tokens: int
    """Tokens of these."""


class OptimizerTensors(ForeignModel):
    """One state of each parameter, by our names: the first moments, say.

    Args:
        checkpoint: that has them.
        state: name of the state there.
        found: the tensors of the state by the names of Megatron's model.
    """

    settings = COMMON
    way_to_untie = MegatronCheckpoint.way_to_untie

    def __init__(self, checkpoint: MegatronCheckpoint, state: str, found: TensorFiles) -> None:
        super().__init__(checkpoint.folder, checkpoint.family, checkpoint.model)
        self._checkpoint, self._state, self._tensors = checkpoint, state, found

    @property
    def positions(self) -> int:
        """See `ForeignModel`."""
        return self._checkpoint.positions

    @property
    def title(self) -> str:
        """See `ForeignModel`."""
        return f"{self._state} of {self.folder}"

    @property
    def _found(self) -> TensorFiles:
        return self._tensors


class MasterWeights(OptimizerTensors):
    """The fp32 weights that the optimizer updates, which round to the weights of the model."""

    def read(self, tensors: Mapping[str, Stored], rows: slice | None = None) -> dict[str, Tensor]:
        """See `ForeignModel`; a `UserError` for one that does not round to the weight of the model."""
        found = super().read(tensors, rows)
        for name, masters in found.items():
            self._compare(name, masters, 0 if rows is None else rows.start)
        return found

    def _compare(self, name: str, masters: Tensor, first: int) -> None:
        """Compare some rows with the model's, a few at a time: both are not to be in memory as a whole."""
        stored = self._checkpoint.tensors[name]
        step = max(1, _COMPARED_BYTES // (masters[:1].numel() * masters.itemsize))
        for start in range(0, len(masters), step):
            part = masters[start : start + step]
            rows = slice(first + start, first + start + len(part))
            if not torch.equal(part.to(stored.dtype), self._checkpoint.read({name: stored}, rows)[name]):
                raise UserError(
                    f"{self.folder}: the {MASTERS} of the optimizer do not round to the weights of the model, first "
                    f"in {name} (by the names here); they are not of the same step, or the order of the parameters in "
                    f"the optimizer's buckets is another one: {_SAVE_SO}"
                )


class MegatronOptimizer:
    """The optimizer of a checkpoint, of which all but the values of the tensors is checked.

    Args:
        checkpoint: that it is of.

    Raises:
        UserError: it has none, not that of all parameters, or one that is not AdamW in fp32.
    """

    def __init__(self, checkpoint: MegatronCheckpoint) -> None:
        self._checkpoint, self._file = checkpoint, checkpoint.folder / COMMON
        self._check_class()
        sections, groups = self._open()
        self.settings = self._settings(groups)
        """Settings of the optimizer."""
        self.masters = MasterWeights(checkpoint, MASTERS, sections[MASTERS])
        """The weights in fp32."""
        self.moments = {name: OptimizerTensors(checkpoint, name, sections[name]) for name in MOMENTS}
        """First and second moments."""

    @property
    def _arguments(self) -> Mapping[str, Any]:
        return self._checkpoint.arguments

    def _refuse(self, key: str, why: str) -> NoReturn:
        raise UserError(f"{self._file} (args): {key}: {shortened(self._arguments.get(key))}; {why}")

    def _check_class(self) -> None:
        if self._arguments.get("optimizer", "adam") != "adam":
            self._refuse("optimizer", "only the states of adam are read; leave --optimizer out for the weights alone")
        if not self._arguments.get("decoupled_weight_decay", True):
            self._refuse("decoupled_weight_decay", "AdamW is supported, whose weight decay is not in the gradient")
        if self._arguments.get("use_precision_aware_optimizer"):
            for key in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
                if str(self._arguments.get(key, "fp32")) not in ("fp32", "float32", "torch.float32"):
                    self._refuse(key, "only weights and moments of the optimizer in fp32 are read")

    def _open(self) -> tuple[dict[str, TensorFiles], Any]:
        """Tensors by state, and the groups of parameters as they were saved."""
        files, common = self._checkpoint.files, self._checkpoint.common
        content = common.get("content_metadata")
        kind = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
        if not any(name.startswith("optimizer.") or _STATE.match(name) for name in files.tensors):
            raise UserError(
                f"{files.folder} has no state of an optimizer (--no-save-optim); leave --optimizer out for the weights "
                "alone"
            )
        if kind == "dp_reshardable":
            return dict(self._from_buckets(files)), files.read_settings(f"{_GROUPS}/shard_0_1")
        if kind is None:
            raise UserError(
                f"{self._file} has no content_metadata.distrib_optim_sharding_type: only the states of the distributed "
                f"optimizer are read (--use-distributed-optimizer); {_SAVE_SO}"
            )
        if kind != "fully_reshardable":
            raise UserError(
                f"{self._file} (content_metadata): distrib_optim_sharding_type: {shortened(kind)} is not read; "
                f"{_SAVE_SO}"
            )
        return dict(self._in_layout_of_model(files)), common.get("optimizer")

    def _in_layout_of_model(self, files: DistributedFiles) -> Iterator[tuple[str, TensorFiles]]:
        weights = model_tensors(files)
        for state in (MASTERS, *MOMENTS):
            names: dict[str, str] = {}
            for full in files.tensors:
                found = _STATE.fullmatch(full)
                if found is None or found[1] != state:
                    continue
                if found[2] in names:
                    raise UserError(f"{files.folder} has {state} of {found[2]} twice: {names[found[2]]} and {full}")
                names[found[2]] = full
            for name in weights:
                full = f"optimizer.state.{state}.{name}"
                if name not in names:
                    raise UserError(
                        f"{files.folder} has no {full}: a parameter without it was not trained, and the others are not "
                        "taken alone; leave --optimizer out for the weights"
                    )
                if files.tensors[names[name]].shape != files.tensors[name].shape:
                    raise UserError(
                        f"{files.folder}: {names[name]} is {files.tensors[names[name]].shape}, and {name} "
                        f"{files.tensors[name].shape}; do the files belong together?"
                    )
            self._check_types(files, names.values())
            if more := sorted(names.keys() - weights.keys()):
                raise UserError(f"{files.folder} has {names[more[0]]}, and no weight {more[0]}")
            yield state, UnstackedTensors(files, names, self._checkpoint.model.layers)

    def _from_buckets(self, files: DistributedFiles) -> Iterator[tuple[str, TensorFiles]]:
        buckets: dict[str, dict[int, str]] = {state: {} for state in (MASTERS, *MOMENTS)}
        for full in files.tensors:
            if (found := _BUCKET.fullmatch(full)) is None or found[4] not in buckets:
                continue
            if (found[1], found[2]) != ("0", "0") or int(found[3]) in buckets[found[4]]:
                raise UserError(
                    f"{files.folder} has {full}: the flat buckets (dp_reshardable) of an optimizer are read only of a "
                    f"run with tensor and pipeline parallelism of 1, and without experts; {_SAVE_SO}"
                )
            buckets[found[4]][int(found[3])] = full
        weights = UnstackedTensors(files, model_tensors(files), self._checkpoint.model.layers).tensors
        shapes = {name: each.shape for name, each in weights.items()}
        implementation = str(self._arguments.get("transformer_impl", "transformer_engine"))
        for state, numbered in buckets.items():
            names = [numbered[number] for number in sorted(numbered)]
            self._check_types(files, names)
            try:
                yield state, BucketTensors(files, names, shapes, implementation)
            except ValueError as error:
                raise UserError(
                    f"{files.folder}: the {state} of the optimizer are flat (dp_reshardable), and not those of the "
                    f"parameters in their order: {error}; {_SAVE_SO}"
                ) from None

    @staticmethod
    def _check_types(files: DistributedFiles, names: Any) -> None:
        for name in names:
            if files.tensors[name].dtype != torch.float32:
                raise UserError(
                    f"{files.folder}: {name} is of {files.tensors[name].dtype}; only states in fp32 are read"
                )

    def _settings(self, optimizers: Any) -> AdamSettings:
        groups = list(_parameter_groups(optimizers))
        where = f"{self._file} (optimizer.param_groups)"
        if not groups or any("step" not in group for group in groups):
            raise UserError(f"{where} has no step, the updates that the optimizer made; was it the distributed one?")

        def same(key: str) -> Any:
            values = [group.get(key) for group in groups]
            if any(value != values[0] for value in values):
                raise UserError(f"{where}: {key}: groups differ: {shortened(values)}; one optimizer is read")
            return values[0]

        step, betas, eps = same("step"), same("betas"), same("eps")
        if not _is_number(step) or step != int(step) or not 0 < step < _MOST_STEPS:
            raise UserError(f"{where}: step: {shortened(step)} is not a number of updates")
        if not isinstance(betas, tuple) or len(betas) != 2 or not all(_is_number(b) and 0 <= b < 1 for b in betas):
            raise UserError(f"{where}: betas: {shortened(betas)} are not two numbers below 1")
        decays = [float(group["weight_decay"]) for group in groups if _is_number(group.get("weight_decay"))]
        samples, length = self._count("consumed_train_samples"), self._count("seq_length")
        return AdamSettings(
            step=int(step),
            lr=self._number("lr"),
            betas=(float(betas[0]), float(betas[1])),
            eps=self._number("adam_eps") if not _is_number(eps) or eps <= 0 else float(eps),
            weight_decay=max(decays, default=0.0),  # vectors are in a group without it
            clip_norm=self._number("clip_grad") or None,
            samples=samples,
            tokens=samples * length,
        )

    def _count(self, key: str) -> int:
        value = self._arguments.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**40:
            self._refuse(key, "it must be a whole number, for the place in the schedule")
        return value

    def _number(self, key: str) -> float:
        value = self._arguments.get(key)
        if not _is_number(value) or not 0 <= value < 1e6:
            self._refuse(key, "it must be a number")
        return float(value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2.0**63


def _parameter_groups(found: Any, depth: int = 3) -> Iterator[dict[Any, Any]]:
    """Groups of one optimizer, or of several that are numbered."""
    if isinstance(found, list) and len(found) == 1:  # as an object of one piece is saved
        (found,) = found
    if not isinstance(found, dict) or depth < 0:
        return
    if isinstance(groups := found.get("param_groups"), list):
        yield from (group for group in groups if isinstance(group, dict))
        return
    for key, value in found.items():
        if key == "optimizer" or isinstance(key, int):
            yield from _parameter_groups(value, depth - 1)
