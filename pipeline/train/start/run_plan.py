"""The plan of a run before its first step: its data, their order, its length, the checkpoint that it resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.open import begun_fingerprint, open_datasets
from pipeline.data.datasets.packing.verify import check_packs
from pipeline.data.datasets.validate import check_datasets
from pipeline.data.loading.masked_sources import check_masked_datasets
from pipeline.data.loading.objectives.choice import uses
from pipeline.data.loading.stream_shape import StreamShape, stream_shape
from pipeline.data.order import run_length
from pipeline.data.order.journal import Journal
from pipeline.data.order.journal_file import saved_journal
from pipeline.data.order.phases import plan_journal, segment_phase
from pipeline.data.order.run_length import RunLength
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.segments import Segment
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.preprocess.source_settings import unused_weights
from pipeline.data.sources.templates.chat_template import template_of_datasets
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.fingerprint import Fingerprints, compare, fingerprints, preference_fingerprint
from pipeline.train.checkpoint.manager import Checkpoint
from pipeline.train.start.reference import ReferenceScores, saved_references
from pipeline.train.start.setup import check_tokenizer
from pipeline.train.start.teacher import TeacherWeights


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run that resumes from a checkpoint, or starts."""

    datasets: dict[str, Dataset]
    """The training split of each source."""
    tokenizer: Tokenizer
    """The model's."""
    journal: Journal
    """The plan of the order: that of the checkpoint up to its step, that of the run file from there on."""
    length: RunLength
    """Steps of the whole run, and what ends it."""
    fingerprints: Fingerprints
    """Fingerprints of what else a resume depends on."""
    warnings: list[str]
    """Things that the user should know before the first step."""
    exhaustions: dict[int, list[str]]
    """Sources that drop out of the blend, in words, by step, counted from 0."""
    chat_template: str | None
    """Template of the conversations that are trained on."""
    teacher: TeacherWeights | None = None
    """The teacher; None: there is none, or nothing is trained with this plan."""
    references: Mapping[str, ReferenceScores] = field(default_factory=dict)
    """Log-probabilities by the reference, by source; empty without `train.preference`, and before they are computed."""

    def with_references(self, config: Config, references: Mapping[str, ReferenceScores]) -> RunPlan:
        """The plan of a run that starts, with log-probabilities that were computed for it."""
        identities = {name: each.identity for name, each in references.items()}
        of_pairs = {"preference": preference_fingerprint(config, identities)}
        return replace(self, references=references, fingerprints=self.fingerprints | of_pairs)

    def segment(self, step: int) -> Segment:
        """Segment of the journal that a step, counted from 0, is in."""
        return self.journal.segments[self.journal.segment_number(step)]

    def stream(self, config: Config, step: int) -> StreamShape:
        """Positions that the objective makes of a window of a step."""
        number = self.journal.segment_number(step)
        objective = uses(config, segment_phase(config, self.journal, number))[0].objective
        return stream_shape(objective, self.journal.segments[number].sequence_length)

    def write_journal(self, run: Path) -> None:
        """Write `journal.json` of a run folder."""
        storage.put_json(RunFiles(run).journal, self.journal.to_json())


def plan_run(
    config: Config,
    checkpoint: Checkpoint | None,
    *,
    check: bool = True,
    saved: Journal | None = None,
    teacher: TeacherWeights | None = None,
) -> RunPlan:
    """Plan a run, after comparing what a checkpoint depends on with what there is now.

    Args:
        config: resolved config.
        checkpoint: the one to resume from.
        check: look whether the files of the datasets are as they were written; one process does it for all.
        saved: the plan that the checkpoint's run has had; by default what the checkpoint and the run folder have.
        teacher: the verified one; without it the checkpoint's own is taken for the same.

    Raises:
        UserError: the data are not as they were written or were made with another tokenizer, the blend cannot be had
            from them, or the run differs from its checkpoint.
    """
    state = checkpoint.state() if checkpoint is not None else {}
    datasets = open_datasets(config, "train", state["fingerprints"]["data"] if state else {})
    if check:
        check_datasets(datasets)
        check_packs(datasets, config.pack_lengths)
    tokenizer = run_tokenizer(config)
    check_tokenizer(datasets, tokenizer)
    check_masked_datasets(config, datasets)
    if checkpoint is not None and saved is None:
        saved = saved_journal(config.run.dir, state["journal"], checkpoint.step)
    journal = plan_journal(config, datasets, saved)
    known = (state.get("fingerprints", {}).get("distill") or {}).get("teacher")
    references: dict[str, ReferenceScores] = {}
    if checkpoint is not None and config.train.preference is not None:
        references = saved_references(config, datasets, state["fingerprints"])
    now = fingerprints(
        config,
        {name: _identity(d, name, journal) for name, d in datasets.items()},
        tokenizer.fingerprint,
        known if teacher is None else teacher.identity,
        {name: each.identity for name, each in references.items()},
    )
    warnings = unused_weights(config, {name: dataset.manifest for name, dataset in datasets.items()})
    warnings += [] if teacher is None else teacher.warnings
    if checkpoint is not None and saved is not None:
        warnings += [
            f"allowed difference from the checkpoint: {line}"
            for line in compare(
                _of_sources(state["fingerprints"], datasets, saved, checkpoint.step),
                _of_sources(now, datasets, saved, checkpoint.step),
                config.resume.allow,
            )
        ]
        # Said before the plans are compared: what lies after an end is not planned.
        run_length.check_end(Sampler(journal), checkpoint.step)
        journal = journal.going_on(saved, checkpoint.step)
    _refuse_unseen_pairs(journal, references)
    template, several = template_of_datasets(dataset.manifest.settings for dataset in datasets.values())
    warnings += [several] if several else []
    sampler = Sampler(journal)
    length = run_length.run_length(config, sampler)
    first = checkpoint.step if checkpoint else 0
    warnings += run_length.warnings(config, journal, sampler, length.steps, first)
    exhaustions: dict[int, list[str]] = {}
    for step, line in run_length.exhaustions(sampler, length.steps):
        exhaustions.setdefault(step, []).append(line)
    return RunPlan(datasets, tokenizer, journal, length, now, warnings, exhaustions, template, teacher, references)


def _refuse_unseen_pairs(journal: Journal, references: Mapping[str, ReferenceScores]) -> None:
    """Refuse phases over pairs that were added to a dataset after its reference was computed."""
    for segment in journal.segments:
        for name, state in segment.sources.items():
            known = len(references[name].scores) if name in references else None
            if known is not None and state.documents is not None and state.documents[1] > known:
                raise UserError(
                    f"train.preference: a phase has documents up to {state.documents[1]:,} of source {name!r}, and the "
                    f"reference has seen the first {known:,}: those were added later. Start a new run on them in "
                    "another run.dir, from a checkpoint of this one"
                )


def _identity(dataset: Dataset, source: str, journal: Journal) -> str | dict[str, str]:
    """Fingerprint of the data that a run began with; if it reads documents that were added since, also of all of it."""
    ends = [segment.sources[source].documents for segment in journal.segments if source in segment.sources]
    if max((end for _, end in filter(None, ends)), default=0) <= dataset.documents:
        return dataset.fingerprint
    return {"begun": dataset.fingerprint, "grown": dataset.whole.fingerprint}


def _of_sources(values: Fingerprints, datasets: Mapping[str, Dataset], journal: Journal, step: int) -> Fingerprints:
    """`values` with the data of those sources alone that the steps before `step` are made of.

    What later steps read may be added or replaced until then, like the phases that they are in. What was read of a
    dataset that grew is the same if it is a generation of the dataset.
    """
    ends: dict[str, int] = {}
    for segment, _ in journal.drawn(step):
        for name, state in segment.sources.items():
            ends[name] = max(ends.get(name, 0), state.documents[1] if state.documents else 0)
    found = {name: value for name, value in values["data"].items() if name in ends}
    for name in found.keys() & datasets.keys():
        begun, lineage = begun_fingerprint(found[name]), datasets[name].lineage
        grown = found[name]["grown"] if isinstance(found[name], dict) else begun
        is_newer = ends[name] > datasets[name].documents
        found[name] = {"begun": begun, "grown": lineage[-1] if grown in lineage else grown} if is_newer else begun
    of_pairs = values.get("preference")
    if isinstance(of_pairs, dict) and isinstance(of_pairs.get("references"), dict):
        kept = {name: each for name, each in of_pairs["references"].items() if name in ends}
        values = {**values, "preference": {**of_pairs, "references": kept}}
    return {**values, "data": found}
