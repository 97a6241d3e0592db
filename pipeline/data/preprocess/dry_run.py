"""`--dry-run`: what there is to do, with tokens and time estimated from a sample of the documents."""

from __future__ import annotations

import codecs
import shlex
from contextlib import suppress

from rich.console import Console
from rich.table import Table

from pipeline.common import storage
from pipeline.common.console import print_table, say, warn
from pipeline.common.errors import UserError
from pipeline.common.format import counted, duration, percent, rounded, size
from pipeline.common.paths import cache_folder
from pipeline.common.problems import Problems
from pipeline.config.root import Config
from pipeline.data.chat.show import pieces_of, print_trained
from pipeline.data.curate.files import decisions_folder
from pipeline.data.curate.report.write import REPORT_JSON
from pipeline.data.curate.results.apply import active_curation
from pipeline.data.packing.pack_pass import PackPass
from pipeline.data.preprocess.checks import PREPROCESS_CHECKS, PreprocessScope, known_tokenizer
from pipeline.data.preprocess.make_tokenizer import is_unused
from pipeline.data.preprocess.run_tokenizer import OtherTokenizer, check_tokenizer_settings
from pipeline.data.preprocess.source_plan import counting_job, make_plan
from pipeline.data.preprocess.source_sample import SourceSample, take_sample
from pipeline.data.preprocess.split_counts import known_splits, unknown_splits
from pipeline.data.preprocess.status import SourceProgress, read_state
from pipeline.data.sources.compression import FORMATS, MAGIC, StreamError, compression_of, open_stream
from pipeline.data.sources.damage import damaged_error, find_damaged_ends
from pipeline.data.sources.formats import SOURCE_FORMATS
from pipeline.data.sources.globs import File
from pipeline.data.sources.records import NULL_TEXT, printable
from pipeline.data.tokenization.engine_choice import choose_engine
from pipeline.data.tokenization.engines import Engine, open_engine
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.frozen_plan import has_units
from pipeline.data.work.job_run import worker_count
from pipeline.data.work.progress import NOTHING_TO_DO
from pipeline.data.work.units import SourceFiles, cut_units, find_source_files, reading

_BEGINNING = 4096
"""Bytes of a file by which its format is told."""
_FILES_SHOWN = 3
_CHAT_SHOWN = 4000
"""Characters of a conversation."""


def print_dry_run(console: Console, config: Config, *, grow: bool = False) -> None:
    """Look at a run, then print units, bytes, and estimates of tokens and time.

    Args:
        console: where to.
        config: the run.
        grow: files that were added are appended.

    Raises:
        UserError: the stage would be refused, or the sample of a source has bad records and no document.
    """
    found = Problems()
    sources = find_source_files(config, found, grow=grow)
    with reading(config, sources):
        scope = PreprocessScope(config, sources)
        if found.look(PREPROCESS_CHECKS, scope):
            print_sources(console, scope, found)
    found.raise_problems()


def print_sources(console: Console, scope: PreprocessScope, problems: Problems) -> None:
    """Print units, bytes, and estimates of tokens and time of the sources whose files were found.

    Writes nothing but the engine's proof, in the user's cache folder.

    Args:
        console: where to.
        scope: the run.
        problems: gets those that a sample of the documents shows.
    """
    config, sources = scope.config, scope.sources
    if not sources:
        if all(source.dataset is not None for source in config.data.inputs.values()) and not problems.problems:
            say(console, NOTHING_TO_DO)
        return
    settings, train = config.data.preprocess, config.tokenizer.train
    say(console, f"output: {config.data_dir}")
    tokenizer = None
    with suppress(UserError):  # it was said
        tokenizer = known_tokenizer(config)
    origin = "will be trained" if tokenizer is None else "trained"
    say(console, f"tokenizer: {config.tokenizer.path if train is None else f'{origin}, {train.vocab_size:,} entries'}")
    with suppress(UserError):
        try:
            check_tokenizer_settings(config)
        except OtherTokenizer as error:
            if is_unused(config, sources):
                say(console, f"it would be made again: {error.difference}")
    engine: Engine | None = None
    if tokenizer is not None:
        choice = choose_engine(settings.engine, tokenizer, cache_folder() / "engines", set())
        engine = open_engine(tokenizer, choice.which)
        say(console, f"engine: {choice.name} ({choice.why})")
    table = Table(
        "source", "type", "files", "bytes", "units", "tokens (about)", "time (about)", title="preprocess: dry run"
    )
    for column in table.columns[2:]:
        column.justify = "right"
    seconds = 0.0
    samples = {}
    kept = {whole.source.name: _kept_share(config, whole) for whole in sources}
    notes: list[str] = []
    for whole in sources:
        with problems.collecting(), reading(config, [whole]):
            found = whole.generation(-1) if whole.grows else whole
            if settings.on_damaged_file != "fail" and (damaged := find_damaged_ends(found.files, found.reader)):
                notes.append(str(damaged_error(found.source.name, damaged, found.bytes)))
            units = cut_units(found, settings.seed, settings.unit_bytes)
            samples[found.source.name] = sample = take_sample(
                units, counting_job(found, config, unknown_splits(config)), tokenizer, engine
            )
            if sample.bad and not sample.documents:
                problems.problem(_problem(config, found, sample))
            if sample.coverage.unknown_share > settings.max_unknown:
                problems.problem(sample.coverage.refusal(found.source.name, settings.max_unknown, so_far=True))
            scale = found.bytes / sample.disk_bytes if sample.disk_bytes else 0.0
            share = kept[found.source.name]
            workers = worker_count(config, max(len(units), 1))
            took = sample.seconds * scale / workers
            seconds += took
            table.add_row(
                found.source.name,
                found.reader.type,
                f"{len(found.files):,}",
                f"{found.bytes:,}",
                f"{len(units):,}",
                rounded(sample.tokens * scale * (1.0 if share is None else share)),
                duration(took) if engine is not None else "-",
            )
    print_table(console, table)
    for note in notes:
        say(console, note)
    states = {state.name: state for state in read_state(config)}
    for whole in sources:
        found = whole.generation(-1) if whole.grows else whole
        if found.source.name not in samples:
            continue
        more = len(found.files) - _FILES_SHOWN
        files = [file.path for file in found.files[:_FILES_SHOWN]] + ([f"and {more:,} more"] if more > 0 else [])
        say(console, f"{found.source.name}: {', '.join(files)}")
        sample = samples[found.source.name]
        if note := _curation_note(config, whole, kept[found.source.name]):
            say(console, f"{found.source.name}: {note}")
        if sample.bad:
            say(console, f"{found.source.name}: {'; '.join(filter(None, (sample.in_words, _hint(found, sample))))}")
            if sample.bad > config.data.preprocess.bad_share * sample.records:
                warn(console, f"{found.source.name}: that is more than data.preprocess {_limit(config)} allows")
        if 2 * (nulls := sample.rejected[NULL_TEXT]) > sample.records:
            warn(console, f"{found.source.name}: {nulls:,} of {counted(sample.records, 'sampled record')} have no text")
        if line := sample.coverage.in_words:
            say(console, f"{found.source.name}: {line}")
        if note := _html_note(found):
            warn(console, f"{found.source.name}: {note}")
        for each in sample.damaged:
            say(console, f"{found.source.name}: {each}")
        if sample.chat is not None:
            text, spans = sample.chat
            what = "with what is trained on marked" if found.reader.keeps_mask else "all of which is trained on"
            say(console, f"{found.source.name}: the first conversation, {what}:")
            pieces = pieces_of(text[:_CHAT_SHOWN], ((start, min(end, _CHAT_SHOWN)) for start, end in spans))
            print_trained(console, ((printable(part, keep="\n\t"), marked) for part, marked in pieces))
        with problems.collecting():
            if made := _made(config, whole, tokenizer, states[found.source.name]):
                say(console, f"{found.source.name}: {made}")
        for line in PackPass(config).plan_in_words(found.source.name):
            say(console, f"{found.source.name}: {line}")
    read = size(sum(sample.text_bytes for sample in samples.values()))
    if engine is None:
        say(
            console,
            f"Estimated from {read} of text; the tokenizer is not trained yet, so 4 bytes per token are assumed, and "
            "the time is not known.",
        )
    else:
        workers = worker_count(config)
        say(
            console,
            f"Estimated from {read} of text: {duration(seconds)} with {counted(workers, 'worker')}; writing to a "
            "slow disk takes additional time.",
        )
    if any(split.documents for split in config.data.splits.values()):
        say(console, "All documents are read twice, because data.splits has numbers of documents.")


def _kept_share(config: Config, found: SourceFiles) -> float | None:
    """Share of a source's text that its curation keeps; None where all is kept, or decisions are not there yet."""
    active = active_curation(config, found)
    if active is None:
        return None
    report = storage.find_json(decisions_folder(active.folder, active.decide_hash) / REPORT_JSON, "funnel")
    return None if report is None else report["funnel"]["kept_bytes"] / max(report["funnel"]["bytes"], 1)


def _curation_note(config: Config, found: SourceFiles, kept: float | None) -> str:
    """Effect of the curation on the estimates of a source; empty where it removes nothing."""
    curate = config.data.curate
    if curate is None or curate.mode != "apply" or found.held_out:
        return ""
    if kept is None:
        return "not curated yet: the tokens are those of all documents"
    return f"the tokens are those of the documents that data.curate keeps, {percent(kept, 1)} of the text"


def _limit(config: Config) -> str:
    """The limit of bad records, with its key."""
    settings = config.data.preprocess
    return f"max_error_rate {settings.max_error_rate:g}" if settings.on_error == "skip" else "on_error: fail"


def _problem(config: Config, found: SourceFiles, sample: SourceSample) -> str:
    """Problem of a source of which no sampled record is a document."""
    key = next(key for key, source in config.data.inputs.items() if source.name == found.source.name)
    keys = f"{key}.type (now {found.reader.type})"
    if found.reader.has_keys:
        reader = found.reader
        keys = f"{key}.{reader.text_config_key} (now {', '.join(map(repr, reader.text_keys))}) or {keys}"
    advice = _hint(found, sample) or f"correct {keys}, or repair the files"
    return f"{key} ({found.source.name}): {sample.in_words}; the first is in {sample.first_bad}; {advice}"


def _hint(found: SourceFiles, sample: SourceSample) -> str:
    """Format of the file of the first bad record by its first bytes, if it is read as another; else empty."""
    path = sample.first_bad
    if not path or found.reader.numbering == "row":  # of a table, a record was read
        return ""
    bad = next(file for file in found.files if file.path == path)
    with bad.open_to_look(found.reader.remote) as raw:
        head = raw.read(8) or b""
    for other in SOURCE_FORMATS.values():
        if other.magic and head.startswith(other.magic):
            return f"it looks like {other.title}: type: {other.type}"
    for suffix, name in FORMATS.items():
        if head.startswith(MAGIC[name]) and compression_of(path) != name:
            return f"it is {name}-compressed: name it {suffix}"
    return _conversion(path, _beginning(found, bad), found.reader.type)


def _beginning(found: SourceFiles, file: File) -> bytes:
    """First bytes of a file's content; empty where they cannot be read."""
    with suppress(OSError, StreamError), open_stream(file.path, file.open(found.reader.remote), verify=False) as stream:
        return stream.read(_BEGINNING)
    return b""


def _conversion(path: str, head: bytes, kind: str) -> str:
    """The command that makes text or lines of JSON of a file that is neither, if its first bytes say what it is."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return f"it is UTF-16: iconv -f UTF-16 -t UTF-8 {shlex.quote(path)} > NEW"
    lines = head.split(b"\n")
    if kind != "jsonl" or not lines[1:]:
        return ""
    if head.lstrip().startswith(b"["):
        return f"it is one array of JSON, and each line has to be a record: jq -c '.[]' {shlex.quote(path)} > NEW"
    if lines[0].strip() == b"{":
        return f"its records have several lines each, and need one: jq -c . {shlex.quote(path)} > NEW"
    return ""


def _html_note(found: SourceFiles) -> str:
    """Warning for pages of HTML with `type: text`, whose markup would be trained on, and the reverse; else empty."""
    if found.reader.type not in ("text", "html") or not found.files:
        return ""
    head = _beginning(found, found.files[0]).lstrip().lower()
    if found.reader.type == "html":
        if b"<" in head:
            return ""
        return f"{found.files[0].path} does not look like HTML, so that little may be left of it; type: text takes all"
    if not head.startswith((b"<!doctype html", b"<html")):
        return ""
    return (
        f"{found.files[0].path} looks like HTML, which type: text takes as it is, with its markup; type: html takes "
        "the main text out of each page"
    )


def _made(config: Config, found: SourceFiles, tokenizer: Tokenizer | None, state: SourceProgress) -> str:
    """State of a source's datasets; empty if nothing is there, or it speaks against the stage."""
    if not state.units:
        return ""
    if tokenizer is not None:
        # Where documents would have to be counted, files or data.splits differ, and the ends do not matter.
        curation = active_curation(config, found)
        splits = known_splits(config, found, curation) or unknown_splits(config)
        plan = make_plan(found, tokenizer, config, splits, curation)
        if differences := plan.differences(state.folder):
            if found.grows and plan.can_grow and plan.extends(state.folder):
                units = len(plan.units) - plan.earlier[-1][1]
                return f"{counted(units, 'unit')} would be appended; all before would stay as it is"
            return "" if has_units(state.folder) else f"would be planned again: {'; '.join(differences)}"
    if state.state == "finished":
        return "finished"
    return f"{state.done:,} of {counted(state.units, 'unit')} {'is' if state.units == 1 else 'are'} done"
