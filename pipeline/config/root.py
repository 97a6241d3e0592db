"""The whole run file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, PrivateAttr, model_validator

from pipeline.common.errors import UserError
from pipeline.common.objects.urls import ObjectUrl, parse_folder
from pipeline.common.run_files import RunFiles
from pipeline.config.base import Section
from pipeline.config.blend import BlendConfig, PhaseConfig, StageConfig
from pipeline.config.data import DataConfig
from pipeline.config.eval import EvalConfig, GenerateConfig, ServeConfig
from pipeline.config.heldout import HeldOutSetConfig, SetName
from pipeline.config.model import ModelConfig
from pipeline.config.notify import Notifications
from pipeline.config.objective import ObjectiveConfig, objective_kind
from pipeline.config.parallel import ParallelConfig
from pipeline.config.run import LaunchConfig, ResumeConfig, RunConfig
from pipeline.config.slurm import SlurmConfig
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.config.train import TrainConfig


@dataclass(frozen=True)
class CodeOrigins:
    """Files that name values which are executed, by key. All are equal, as configs are compared by their keys alone."""

    files: Mapping[str, tuple[Path, ...]] = field(default_factory=dict, compare=False)


class Config(Section):
    """A run file after includes, overrides and validation."""

    run: RunConfig
    """Folder and seed of the run."""
    launch: LaunchConfig = LaunchConfig()
    """Processes of the run."""
    data: DataConfig
    """Documents and datasets."""
    blend: BlendConfig = BlendConfig()
    """Shares of the sources in each step."""
    heldout_sets: dict[SetName, HeldOutSetConfig] = Field(default_factory=dict)
    """Named sets of held-out documents, besides the split of `train.validation` and of `eval`: scored while training,
    and by `pipeline eval`."""
    stage: StageConfig = StageConfig()
    """Node-local copy of the data."""
    tokenizer: TokenizerConfig
    """Tokenizer."""
    model: ModelConfig
    """Model."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout over processes."""
    train: TrainConfig
    """Training."""
    resume: ResumeConfig = ResumeConfig()
    """Resuming."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    generate: GenerateConfig = GenerateConfig()
    """Generation."""
    serve: ServeConfig = ServeConfig()
    """Serving."""
    slurm: SlurmConfig = SlurmConfig()
    """Jobs on a cluster."""
    notify: Notifications = Field(default_factory=list)
    """Messages about the end and the troubles of the run."""

    _origins: CodeOrigins = PrivateAttr(default=CodeOrigins())

    def origins(self, key: str) -> tuple[Path, ...]:
        """Files that name the value of a key that is executed; none where the command line or a program names it."""
        return self._origins.files.get(key, ())

    def note_origins(self, files: Mapping[str, tuple[Path, ...]]) -> None:
        """Keep them for whoever would execute the values."""
        self._origins = CodeOrigins(files)

    @model_validator(mode="after")
    def _splits_exist(self) -> Config:
        made = any(source.dataset is None for source in self.data.sources)
        for key, name in (("eval.split", self.eval.split), ("train.validation.split", self.train.validation.split)):
            if made and name not in self.data.splits:
                have = ", ".join(self.data.splits) or "none"
                raise ValueError(
                    f"{key}: {name!r} is not in data.splits ({have}); add '{name}: 0' there to hold nothing out"
                )
        return self

    @model_validator(mode="after")
    def _sets_exist(self) -> Config:
        of_run = {source.name: source for source in self.data.sources}
        never_trained = [source.name for source in self.data.heldout_sources]
        for name, each in self.heldout_sets.items():
            for source in each.sources:
                if source not in of_run and source not in never_trained:
                    near = difflib.get_close_matches(source, [*of_run, *never_trained], n=1)
                    hint = f"; did you mean {near[0]}?" if near else ""
                    raise ValueError(
                        f"heldout_sets.{name}.sources: {source!r} is neither one of data.sources ({', '.join(of_run)}) "
                        f"nor of data.heldout_sources ({', '.join(never_trained) or 'none'}){hint}"
                    )
                if source in of_run and each.split == "train":
                    raise ValueError(
                        f"heldout_sets.{name}.split: 'train' of source {source!r} is what the run trains on; name one "
                        f"of data.splits ({', '.join(self.data.splits)})"
                    )
                if source in of_run and of_run[source].dataset is None and each.split not in self.data.splits:
                    raise ValueError(
                        f"heldout_sets.{name}.split: {each.split!r} is not in data.splits "
                        f"({', '.join(self.data.splits)}); name one of them"
                    )
        folder = self.data.dir or RunFiles(self.run.dir).data
        trained = {str(each.dataset or f"{folder}/{each.name}") for each in self.data.sources}
        for number, one in enumerate(self.data.heldout_sources):
            if one.split == "train" and str(one.dataset) in trained:
                raise ValueError(
                    f"data.heldout_sources.{number}: {one.dataset} is one of data.sources, whose split 'train' is "
                    "trained on; name another split of it"
                )
        used = {source for each in self.heldout_sets.values() for source in each.sources}
        if unused := [source for source in never_trained if source not in used]:
            raise ValueError(
                f"data.heldout_sources: no set has {unused[0]!r}; name it in heldout_sets.NAME.sources, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _best_is_known(self) -> Config:
        rules, key = self.train.checkpoint, "train.checkpoint.keep_best"
        if rules.keep_best is None:
            if rules.best_of is not None:
                raise ValueError(
                    f"train.checkpoint.best_of: {rules.best_of!r} is for keep_best, which is not set; set {key}, or "
                    "remove best_of"
                )
            return self
        if rules.best_of is None:
            validation, cadence = self.train.validation, "train.validation"
            every, samples = validation.every_steps, validation.samples
        elif rules.best_of in self.heldout_sets:
            chosen, cadence = self.heldout_sets[rules.best_of], f"heldout_sets.{rules.best_of}"
            every, samples = self.set_every(rules.best_of), chosen.samples
        else:
            raise ValueError(
                f"train.checkpoint.best_of: {rules.best_of!r} is not one of heldout_sets "
                f"({', '.join(self.heldout_sets) or 'none'})"
            )
        if not samples:
            raise ValueError(
                f"{key}: the loss that decides is not measured while training ({cadence}.samples: 0); raise that, or "
                "name another set in train.checkpoint.best_of"
            )
        if rules.every_steps % every:
            raise ValueError(
                f"{key}: checkpoints of every {rules.every_steps} steps (train.checkpoint.every_steps) are not always "
                f"validated, which happens every {every} steps ({cadence}.every_steps); make the one a multiple of the "
                "other"
            )
        return self

    @model_validator(mode="after")
    def _blend_names(self) -> Config:
        names = dict.fromkeys(source.name for source in self.data.sources)
        used = [
            (f"blend.phases.{number}.{key}", name)
            for number, phase in enumerate(self.blend.phases)
            for key, given in (
                ("weights", phase.weights if isinstance(phase.weights, dict) else ()),
                ("sources", phase.sources or ()),
                ("slices", phase.slices),
            )
            for name in given
        ]
        used += [(f"blend.skip.{i}.source", skip.source) for i, skip in enumerate(self.blend.skip) if skip.source]
        for key, name in used:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"{key}: {name!r} is not one of data.sources ({', '.join(names)}){hint}")
        for number, phase in enumerate(self.blend.phases):
            if isinstance(phase.weights, dict) and phase.sources is not None and set(phase.sources) != {*phase.weights}:
                raise ValueError(
                    f"blend.phases.{number}.sources: weights names other sources ({', '.join(phase.weights)}); remove "
                    "`sources`"
                )
        return self

    @model_validator(mode="after")
    def _average_exists(self) -> Config:
        if self.eval.weights == "ema" and self.train.ema is None:
            raise ValueError(
                "eval.weights: 'ema' needs train.ema, since no average is kept without it; set train.ema.decay as in "
                "the run (its config.yaml), or set eval.weights: model"
            )
        return self

    @model_validator(mode="after")
    def _multi_token_prediction(self) -> Config:
        if self.model.mtp is None:
            if self.train.loss.mtp is not None:
                raise ValueError(
                    "train.loss.mtp is the weight of multi-token prediction, which the model does not have: set "
                    "model.mtp.depth, or leave train.loss.mtp out"
                )
            return self
        for key, objective in self.objectives():
            if objective.type != "causal":
                raise ValueError(
                    f"model.mtp does not go with {key}.type: {objective.type}, which rearranges a window, while the "
                    f"targets of model.mtp lie behind it, too: set {key}.type: causal, or leave model.mtp out"
                )
        return self

    @model_validator(mode="after")
    def _objectives_fit(self) -> Config:
        has_encoder, direction = self.model.encoder is not None, self.model.direction
        sources = [source.name for source in self.data.sources]
        for key, objective in self.objectives():
            kind = objective_kind(objective.type)
            if kind.encoder and not has_encoder:
                raise ValueError(
                    f"{key}.type: {objective.type} trains an encoder with a decoder, and there is no model.encoder: "
                    f"give model.encoder.layers, or set {key}.type: causal"
                )
            if has_encoder and not kind.encoder:
                raise ValueError(
                    f"{key}.type: {objective.type} has no text for model.encoder: set {key}.type: spans or ul2, or "
                    "leave model.encoder out"
                )
            if kind.direction != direction:
                other = "masked" if direction == "both" else "causal"
                raise ValueError(
                    f"{key}.type: {objective.type} needs model.direction: {kind.direction}, and it is "
                    f"{direction}: set model.direction: {kind.direction}, or {key}.type: {other}"
                )
            name = key.rpartition(".by_source.")[2]
            if name != key and name not in sources:
                raise ValueError(f"{key}: {name!r} is not one of data.sources ({', '.join(sources)})")
        return self

    @model_validator(mode="after")
    def _packs_fit(self) -> Config:
        for number, (phase, packed) in enumerate(self._phases()):
            if not packed:
                continue
            key = "train.objective" if phase.objective is None else f"blend.phases.{number}.objective"
            packing = "data.loader.packing" if phase.packing is None else f"blend.phases.{number}.packing"
            for objective in (phase.objective or self.train.objective).all:
                kind = objective_kind(objective.type)
                if not kind.packs:
                    has = (
                        "whose encoder and decoder have sizes of their own"
                        if kind.encoder
                        else "which takes windows alone"
                    )
                    raise ValueError(
                        f"{packing}: best_fit does not go with {key}.type: {objective.type}, {has}: set {packing}: "
                        "windows"
                    )
                if kind.direction == "both" and not self.model.document_attention:
                    raise ValueError(
                        f"{packing}: best_fit with {key}.type: {objective.type} needs model.document_attention: true, "
                        f"since tokens would see the padding of their pack: set it, or {packing}: windows"
                    )
        return self

    def _phases(self) -> Iterator[tuple[PhaseConfig, bool]]:
        """The phases, or one for a run without, each with whether its samples are packs."""
        for phase in self.blend.phases or [PhaseConfig()]:
            yield phase, (phase.packing or self.data.loader.packing) == "best_fit"

    def objectives(self) -> Iterator[tuple[str, ObjectiveConfig]]:
        """All objectives with the keys that they stand at."""
        places = [("train.objective", self.train.objective)]
        for number, phase in enumerate(self.blend.phases):
            if phase.objective is not None:
                places.append((f"blend.phases.{number}.objective", phase.objective))
        for key, objective in places:
            yield key, objective
            yield from ((f"{key}.by_source.{name}", each) for name, each in objective.by_source.items())
        for name, one in self.heldout_sets.items():
            if one.objective is not None:
                yield f"heldout_sets.{name}.objective", one.objective

    @model_validator(mode="after")
    def _together(self) -> Config:
        rows = self.model.max_positions
        if self.model.positions == "learned" and rows is not None and rows < self.max_sequence_length:
            raise ValueError(
                f"model.max_positions {rows} is less than the longest sequence_length {self.max_sequence_length}"
            )
        for name in self.heldout_sets if self.model.positions == "learned" else ():
            if self.set_length(name) > self.max_positions:
                raise ValueError(
                    f"heldout_sets.{name}.sequence_length: {self.set_length(name)} is more than the "
                    f"{self.max_positions} learned positions of the model (model.max_positions, or the longest "
                    "sequence_length of the training); lower it"
                )
        return self

    @model_validator(mode="after")
    def _evaluated_windows(self) -> Config:
        stride = self.eval.stride
        if stride is not None and stride > self.train.sequence_length:
            raise ValueError(
                f"eval.stride: {stride} is more than train.sequence_length {self.train.sequence_length}, so tokens "
                "between two windows would not count; lower it, or leave it out for windows that do not overlap"
            )
        for name in self.heldout_sets:
            if stride is not None and stride > self.set_length(name):
                raise ValueError(
                    f"eval.stride: {stride} is more than heldout_sets.{name}.sequence_length {self.set_length(name)}, "
                    "so tokens between two windows would not count; lower it, or raise that"
                )
        by_objective = [one.type for one in self.train.objective.all if one.chooses]
        by_objective += [o.type for s in self.heldout_sets.values() if (o := s.objective) is not None and o.chooses]
        for key, given in (("stride", stride is not None), ("documents", self.eval.documents)):
            if given and by_objective:
                raise ValueError(
                    f"eval.{key} does not go with train.objective.type: {by_objective[0]}, which chooses in whole "
                    f"windows what is scored: leave eval.{key} out"
                )
        for key, length in (("eval", self.eval.max_length), ("serve", self.serve.max_length)):
            if length is not None and self.model.positions == "learned" and length > self.max_positions:
                raise ValueError(
                    f"{key}.max_length: {length} is more than the {self.max_positions} learned positions of the model "
                    "(model.max_positions, or the longest sequence_length); lower it"
                )
        return self

    @property
    def pack_lengths(self) -> list[int]:
        """Sequence lengths that packs are needed of, ascending; none where all phases read windows."""
        return sorted(
            {phase.sequence_length or self.train.sequence_length for phase, packed in self._phases() if packed}
        )

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest window that the run reads; a model has positions for them."""
        return max([self.train.sequence_length, *(phase.sequence_length or 0 for phase in self.blend.phases)])

    def set_length(self, name: str) -> int:
        """Tokens of a window of a set of `heldout_sets`."""
        return self.heldout_sets[name].sequence_length or self.train.sequence_length

    def set_every(self, name: str) -> int:
        """Steps from one look at a set of `heldout_sets` to the next while training."""
        return self.heldout_sets[name].every_steps or self.train.validation.every_steps

    @property
    def data_dir(self) -> Path:
        """Folder of the datasets.

        Raises:
            UserError: they are in a bucket, where they are read alone.
        """
        if isinstance(self.data.dir, str):
            raise UserError(
                f"data.dir: {self.data.dir} is in a bucket, where datasets can only be read: set data.dir to a folder "
                "for this command (`pipeline data pull` writes datasets of a bucket to a disk, `pipeline data push` "
                "those of a disk to a bucket)"
            )
        return self.data.dir or RunFiles(self.run.dir).data

    @property
    def data_url(self) -> ObjectUrl | None:
        """URL of the folder of the datasets, if they are in a bucket."""
        return parse_folder(self.data.dir) if isinstance(self.data.dir, str) else None

    @property
    def max_positions(self) -> int:
        """Rows of a learned position embedding."""
        return self.model.max_positions or self.max_sequence_length
