"""Held-out loss of weights, by source and together: each token of the held-out splits once, or a fixed sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from pipeline.common import storage
from pipeline.common.console import Console, print_table, say, warn
from pipeline.common.format import percent
from pipeline.config import Config
from pipeline.config.objective import mixed_values, objective_values
from pipeline.config.parsing.code_keys import TASK_KEYS, refuse_code_of_others
from pipeline.data.datasets.token_bytes import text_bytes
from pipeline.data.loading.heldout import HeldOut, sample
from pipeline.eval.benchmarks import Benchmarks, run_benchmarks
from pipeline.eval.checks import EVAL_CHECKS, checked_engine
from pipeline.eval.continuations import Continuations, write_continuations
from pipeline.eval.encoders import masked_alone
from pipeline.eval.engine import GenerationEngine, engine_loss, measuring, open_engine
from pipeline.eval.heldout_data import heldout_splits, named_sets
from pipeline.eval.reports import WINDOWS, evaluated_by, identity, report_path
from pipeline.eval.table import write_table
from pipeline.train.checkpoint.exported import Evaluated, ExportedWeights, WeightsOf, described
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.distributed.process_group import Processes, broadcast_from_rank0
from pipeline.train.loop.validation import HeldOutLoss
from pipeline.train.start.exported_model import with_tokenizer
from pipeline.train.start.setup import ALONE, check_tokenizer


@dataclass(frozen=True)
class Score:
    """Loss on some held-out text, in its usual dresses."""

    documents: int
    """Documents of which tokens are scored."""
    targets: int
    """Tokens scored; the end-of-document token that closes each document is one of them."""
    text_bytes: int | None
    """UTF-8 bytes of the original text of the scored tokens. Of a sample they are counted token by token; None where
    the tokenizer does not let them be counted, or the objective or a mask chooses which tokens are scored."""
    loss: float
    """Nats per token."""
    perplexity: float
    """exp(loss), a token."""
    bits_per_byte: float | None
    """All bits spent, those for the ends of documents included, over the bytes of the text; None where these are not
    known, or none."""


@dataclass(frozen=True)
class PseudoScore:
    """Loss on some tokens of which each is masked alone."""

    targets: int
    """Tokens scored."""
    loss: float
    """Nats per token."""
    perplexity: float
    """exp(loss), the pseudo-perplexity."""


@dataclass(frozen=True)
class SetScores:
    """Held-out loss on a set of `heldout_sets`."""

    sources: dict[str, Score]
    blended: Score
    """All sources together, weighted by their tokens."""


@dataclass(frozen=True)
class EvalReport:
    """Held-out loss of a checkpoint, or of weights in a folder."""

    step: int | None
    """Step of the checkpoint; None for weights in a folder."""
    made_with: dict[str, Any]
    """All that the figures depend on: weights, held-out data, windows, precision."""
    sources: dict[str, Score]
    """By source of `eval.split`; empty where there are only named sets."""
    blended: Score
    """All sources together, weighted by their tokens."""
    export: dict[str, Any] | None = None
    """Origin of weights in a folder."""
    pseudo: dict[str, PseudoScore] = field(default_factory=dict)
    """By source, of an encoder."""
    sets: dict[str, SetScores] = field(default_factory=dict)
    """By name of the set."""
    continuations: Continuations | None = None
    """Texts of `eval.continuations`."""
    coverage: dict[str, dict[str, float]] = field(default_factory=dict)
    """By source whose text the tokenizer does not keep: shares of it that are `unknown` and `lost`. Bits per byte are
    over all bytes of the text, as it was before, so they are too low there."""

    def to_json(self) -> dict[str, Any]:
        """For the file of the report."""
        values = asdict(self)
        if self.export is None:
            del values["export"]
        if not self.pseudo:
            del values["pseudo"]
        if not self.sets:
            del values["sets"]
        if not self.coverage:
            del values["coverage"]
        if self.continuations is None:
            del values["continuations"]
        return values


def score(loss: HeldOutLoss, documents: int, text_bytes: int | None) -> Score:
    """From a summed loss to what people compare."""
    return Score(
        documents=documents,
        targets=loss.targets,
        text_bytes=text_bytes,
        loss=loss.mean,
        perplexity=_exp(loss.mean),
        bits_per_byte=loss.nats / math.log(2) / text_bytes if text_bytes else None,
    )


def evaluate(
    config: Config,
    which: WeightsOf = None,
    console: Console | None = None,
    *,
    keep: bool = True,
    ranks: Processes = ALONE,
) -> EvalReport:
    """Score weights on the held-out split, then on what else `eval` names (see `run_benchmarks`).

    Results are also written to `eval/` in the run folder; of the benchmarks those that are there already are shown.

    Every process of the evaluation calls this and gets the result; rank 0 alone speaks and writes.

    Args:
        config: resolved config.
        which: checkpoint or folder, by default the latest checkpoint.
        console: where to print.
        keep: whether the result is written down.
        ranks: the place of this process among those of the evaluation.

    Raises:
        UserError: no such weights, damaged ones, nothing held out, or a layout that is not possible.
    """
    return evaluate_everything(
        config, lambda: open_engine(config, which, ranks), console, keep=keep, ranks=ranks
    ).heldout


class Figures(NamedTuple):
    """Results of an evaluation."""

    heldout: EvalReport
    benchmarks: Benchmarks


def evaluate_everything(
    config: Config,
    load: Callable[[], GenerationEngine],
    console: Console | None = None,
    *,
    keep: bool = True,
    ranks: Processes = ALONE,
) -> Figures:
    """`evaluate` of an engine that is opened by `load`, when the data has been looked at; with all its figures."""
    console = console if console and ranks.rank == 0 else Console(quiet=ranks.rank > 0)
    refuse_code_of_others(config, *TASK_KEYS)
    with checked_engine(config, ranks, EVAL_CHECKS, load) as (engine, beat):
        continuations = write_continuations(engine, console, beat)  # first: what is wrong with a prompt shows at once
        report = replace(heldout_report(engine, console, beat), continuations=continuations)
        assert engine.source is not None
        for table in _tables(report, described(engine.source, config.eval.weights)):
            print_table(console, table)
        for name, each in report.coverage.items():
            kinds = f"{percent(each['unknown'])} has no token, {percent(each['lost'])} is changed or dropped"
            warn(console, f"bits per byte of {name} are too low: they count all bytes of its text, of which {kinds}")
        if keep and ranks.rank == 0:
            path = report_path(config, evaluated_by(engine.source))
            path.parent.mkdir(exist_ok=True)
            storage.put_json(path, report.to_json())
            if not isinstance(engine.source, ExportedWeights):
                write_table(config.run.dir)
            say(console, f"written to {path}")
        beat()
        benchmarks = run_benchmarks(engine, console, keep=keep, beat=beat)
    if not keep:
        warn(console, f"{config.run.dir} cannot be written to; the result is not kept")
    return Figures(report, benchmarks)


def heldout_report(engine: GenerationEngine, console: Console, beat: Callable[[], None] = lambda: None) -> EvalReport:
    """Score the weights of an engine on the held-out windows that `eval` names. Every rank calls this.

    Args:
        engine: with weights that are kept.
        console: for a progress bar.
        beat: called after each batch.
    """
    config, found = engine.config, engine.source
    assert found is not None, "a report is of weights that are kept"
    splits, sets = heldout_splits(config), named_sets(config)
    for each in (splits, *sets.values()):
        datasets = {name: split.dataset for name, split in each.items()}
        broadcast_from_rank0(partial(check_tokenizer, datasets, engine.tokenizer))
    main = _scores(engine, splits, console, beat)
    return EvalReport(
        step=found.step,
        made_with=_made_with(config, found),
        sources=main.sources,
        blended=main.blended,
        export=found.origin() if isinstance(found, ExportedWeights) else None,
        pseudo=_pseudo_scores(engine, splits, console, beat),
        sets={name: _scores(engine, each, console, beat, name) for name, each in sets.items()},
        coverage=_coverage([splits, *sets.values()]),
    )


def _coverage(scored: Sequence[Mapping[str, HeldOut]]) -> dict[str, dict[str, float]]:
    """Shares of the text of each source that its tokens do not stand for, where there are any."""
    found = {name: split.dataset.manifest.coverage for splits in scored for name, split in splits.items()}
    return {
        name: {"unknown": each.unknown_share, "lost": each.lost_share}
        for name, each in found.items()
        if each.unknown_share or each.lost_share
    }


def _scores(
    engine: GenerationEngine, splits: Mapping[str, HeldOut], console: Console, beat: Callable[[], None], of: str = ""
) -> SetScores:
    """Score the windows of a split or of a set that `eval` names, by source; `of` is the name of the set."""
    config = engine.config
    losses: dict[str, HeldOutLoss] = {}
    sampled = sample(splits, config.eval.samples)
    # As many tokens at once as windows of the training have.
    length = config.set_length(of) if of else config.train.sequence_length
    batch_size = max(1, config.eval.batch_size * config.train.sequence_length // length)
    for name, windows in sampled.items():
        with measuring(engine, console, f"{of}: {name}" if of else name, len(windows), beat) as done:
            losses[name] = engine_loss(engine, splits[name], windows, batch_size, done)
    texts = {name: _text_of(splits[name], windows, engine) for name, windows in sampled.items()}
    sizes = [size for _, size in texts.values()]
    if not sampled:
        return SetScores({}, Score(0, 0, None, math.nan, math.nan, None))
    return SetScores(
        sources={name: score(losses[name], *texts[name]) for name in sampled},
        blended=score(
            sum(losses.values(), HeldOutLoss(0.0, 0)),
            sum(documents for documents, _ in texts.values()),
            None if None in sizes else sum(size or 0 for size in sizes),
        ),
    )


def _pseudo_scores(
    engine: GenerationEngine, splits: Mapping[str, HeldOut], console: Console, beat: Callable[[], None]
) -> dict[str, PseudoScore]:
    """By source, of an encoder; empty for others."""
    config, found = engine.config, dict[str, PseudoScore]()
    if not _measures_pseudo(config):
        return found
    for name, split in splits.items():
        rows = masked_alone(config, name, split.dataset)
        tokens = rows.spread(config.eval.pseudo_tokens)
        with measuring(engine, console, f"{name}, tokens masked alone", len(tokens), beat) as done:
            loss = engine_loss(engine, rows, tokens, config.eval.batch_size, done)
        found[name] = PseudoScore(loss.targets, loss.mean, _exp(loss.mean))
    return found


def _measures_pseudo(config: Config) -> bool:
    return config.eval.pseudo_tokens > 0 and config.model.direction == "both"


def _exp(nats: float) -> float:
    # Beyond exp(700) a float has no more to say.
    return math.exp(min(nats, 700.0))


def _text_of(split: HeldOut, windows: Sequence[int], engine: GenerationEngine) -> tuple[int, int | None]:
    """Documents of the tokens that count in some windows, and the bytes of their original text if known."""
    dataset = split.dataset
    # What an objective or a mask has scored is not the text: it leaves out tokens.
    is_text = split.objective is None and not split.masked
    if len(windows) == len(split):
        return dataset.documents, dataset.text_bytes if is_text else None

    def read() -> tuple[int, int | None]:
        spans = split.targets(windows)[:, 1:]
        documents = {
            document
            for first, end in spans.tolist()
            for document in range(dataset.document_at(first), dataset.document_at(end - 1) + 1)
        }
        return len(documents), text_bytes(dataset, engine.tokenizer, spans) if is_text else None

    documents, size = broadcast_from_rank0(read)
    return documents, size


def read_report(config: Config, of: int | Path) -> EvalReport | None:
    """The evaluation of a step or of weights in a folder, if it was made of these weights on this data in this way.

    None means: evaluate.
    """
    try:
        file = with_tokenizer(config, ExportedWeights.open(of))[0] if isinstance(of, Path) else of
        value: dict[str, Any] = storage.get_json(report_path(config, file))
        source = Checkpoints.of_run(config.run.dir).at(file) if isinstance(file, int) else file
        if {**WINDOWS, **value["made_with"]} != _made_with(config, source):
            return None
        texts = value.get("continuations")
        wanted = config.eval.continuations
        if wanted is not None and (texts is None or texts["made_with"] != wanted.model_dump(mode="json")):
            return None
        return EvalReport(
            value["step"],
            value["made_with"],
            {name: Score(**row) for name, row in value["sources"].items()},
            _score(value["blended"]),
            value.get("export"),
            {name: PseudoScore(**row) for name, row in value.get("pseudo", {}).items()},
            {
                name: SetScores(
                    {source: Score(**row) for source, row in each["sources"].items()}, Score(**each["blended"])
                )
                for name, each in value.get("sets", {}).items()
            },
            None if texts is None else Continuations(**texts),
            value.get("coverage", {}),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _score(row: dict[str, Any]) -> Score:
    """A score of a file, in which null stands for NaN."""
    return Score(**{**row, **{key: math.nan for key in ("loss", "perplexity") if row[key] is None}})


def _made_with(config: Config, source: Evaluated) -> dict[str, Any]:
    stride, length = config.eval.stride, config.train.sequence_length
    objective = config.train.objective
    scored = {"objective": mixed_values(objective)} if any(one.chooses for one in objective.all) else {}
    pseudo = {"pseudo_tokens": config.eval.pseudo_tokens} if _measures_pseudo(config) else {}
    sets = {
        name: {
            "data": {source: split.dataset.fingerprint for source, split in splits.items()},
            "sequence_length": config.set_length(name),
            **({} if (own := config.heldout_sets[name].objective) is None else {"objective": objective_values(own)}),
        }
        for name, splits in named_sets(config).items()
    }
    return {
        **scored,
        **pseudo,
        **({"sets": sets} if sets else {}),
        **identity(config, source),
        "data": {name: split.dataset.fingerprint for name, split in heldout_splits(config).items()},
        "split": config.eval.split,
        "sequence_length": length,
        "samples": config.eval.samples,
        "stride": None if stride == length else stride,
        "documents": config.eval.documents,
        "compute": config.train.precision.compute,
    }


def _tables(report: EvalReport, weights: str) -> Iterator[Table]:
    """A table for the split, and one for each set."""
    how = _how(report.made_with)
    if report.sources:
        yield _table(f"held-out loss{weights}{how}", report.sources, report.blended, report.pseudo)
    for name, each in report.sets.items():
        length = report.made_with["sets"][name]["sequence_length"]
        windows = "" if length == report.made_with["sequence_length"] else f", windows of {length:,} tokens"
        yield _table(f"held-out loss of {name}{weights}{windows}{how}", each.sources, each.blended, {})


def _table(title: str, sources: Mapping[str, Score], blended: Score, pseudo: Mapping[str, PseudoScore]) -> Table:
    table = Table("source", title=title, title_justify="left")
    columns = ["documents", "tokens", "loss", "perplexity", "bits per byte"]
    for column in [*columns, *["pseudo-perplexity"] * bool(pseudo)]:
        table.add_column(column, justify="right")
    rows = dict(sources)
    if len(rows) > 1:
        rows["all"] = blended
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row.documents:,}",
            f"{row.targets:,}",
            f"{row.loss:.4f}",
            f"{row.perplexity:,.2f}",
            "-" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}",
            *([f"{pseudo[name].perplexity:,.2f}" if name in pseudo else "-"] if pseudo else []),
        )
    return table


def _how(made_with: dict[str, Any]) -> str:
    """Description of the windows, where they are not the usual ones."""
    words = []
    if "objective" in made_with:
        words.append(
            f"of the targets of train.objective.type: {made_with['objective']['type']}, which are not a text: no bits "
            "per byte"
        )
    if made_with["documents"]:
        words.append("each document alone")
    if made_with["stride"] is not None:
        words.append(f"stride {made_with['stride']:,}")
    if made_with["samples"] is not None:
        words.append(f"a sample of {made_with['samples']:,} windows")
    return "".join(f", {each}" for each in words)
