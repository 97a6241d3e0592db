"""The tokenizer of a run, loaded or trained: once, before it is kept in the data folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import key, value_hash
from pipeline.config.root import Config
from pipeline.data.curate.cleaning.clean import Cleaner
from pipeline.data.curate.files import CURATE
from pipeline.data.preprocess.run_tokenizer import (
    ORIGIN_FILE,
    OtherTokenizer,
    check_same,
    check_tokenizer_settings,
    named_tokenizer,
    open_kept,
    run_file_settings,
    saved_origin,
    tokenizer_folder,
    what_differs,
)
from pipeline.data.preprocess.splits import Splits
from pipeline.data.sources.reader import Reader, UnitReader
from pipeline.data.sources.records import START, Piece, Position, Unit
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.frozen_plan import has_units, make_data_dir, remove_unused_plan
from pipeline.data.work.units import SourceFiles

SAMPLE_BYTES = 2**18
"""Text that a piece of a file gives to the sample each time that it is drawn."""
_CANDIDATE_BYTES = 2**34
"""Bytes of a corpus; of a larger one, a keyed fraction of the pieces is looked at, so that their list stays small."""
_Candidate = tuple[int, Piece]
"""Number of a source, and a piece of one of its files."""


def prepare_tokenizer(
    config: Config,
    sources: list[SourceFiles],
    splits: Mapping[str, Splits],
    check: Callable[[Tokenizer], None] = lambda _: None,
) -> Tokenizer:
    """Load or train the tokenizer and save it, or open the saved one if it is the one that the config asks for.

    Args:
        config: the run.
        sources: with their files; those that are never trained on are left out.
        splits: of each source; a tokenizer is trained on documents of the training split.
        check: raises if the tokenizer must not be used. Called before it is saved.

    Raises:
        OtherTokenizer: the saved one is another.
        UserError: there is nothing to train on.
    """
    folder, sources = tokenizer_folder(config), [found for found in sources if not found.held_out]
    saved = saved_origin(folder)
    if config.tokenizer.path is not None:
        tokenizer = named_tokenizer(config)
        origin: dict[str, Any] = {"path": str(config.tokenizer.path), "fingerprint": tokenizer.fingerprint}
        if saved is not None:
            check_same(config, tokenizer, saved)
            kept = open_kept(folder)
            check(kept)
            if kept.special_tokens != tokenizer.special_tokens:  # the file had them; the run file names them since
                make_data_dir(config, folder)
                tokenizer.save(folder)
                return tokenizer
            return kept
    else:
        settings = _training_settings(config, sources)
        if saved is not None:
            if saved.get("train") != settings:
                raise OtherTokenizer(config, what_differs(config, saved, settings))
            kept = open_kept(folder)
            check(kept)
            return kept
        tokenizer = Tokenizer.train(sample_texts(config, sources, splits), config.tokenizer)
        origin = {"train": settings, "fingerprint": tokenizer.fingerprint}
    check(tokenizer)
    make_data_dir(config, folder)
    tokenizer.save(folder)
    storage.put_json(folder / ORIGIN_FILE, origin)
    return tokenizer


def check_kept_tokenizer(config: Config, sources: list[SourceFiles]) -> None:
    """Compare the kept tokenizer with the one that the run file asks for, as `prepare_tokenizer` does.

    Raises:
        OtherTokenizer: it is another one, and something was made with it.
        UserError: there is nothing to train on, or a file is damaged.
    """
    try:
        check_tokenizer_settings(config)
        if config.tokenizer.path is not None:
            return
        settings = _training_settings(config, [found for found in sources if not found.held_out])
        saved = saved_origin(tokenizer_folder(config))
        if saved is not None and saved.get("train") != settings:
            raise OtherTokenizer(config, what_differs(config, saved, settings))
    except OtherTokenizer:
        if not is_unused(config, sources):
            raise


def _training_settings(config: Config, sources: list[SourceFiles]) -> dict[str, Any]:
    if not sources:
        raise UserError(
            "tokenizer.train: no source has paths, so there is no text to train on; set tokenizer.path to the "
            "tokenizer.json of one of the datasets"
        )
    files = {
        found.source.name: value_hash(
            [
                found.reader.type,
                _text_settings(found.reader),
                # What was added later is not what it was trained on.
                [[file.name, file.size] for file in found.generations[0]],
            ]
        )
        for found in sources
    }
    return run_file_settings(config) | {"the files of data.sources": files}


def _text_settings(reader: Reader) -> Any:
    """Settings that say where the text of a source's documents is."""
    if reader.options is not None:
        return reader.plan_settings()
    if reader.template is not None:
        return reader.template.settings()
    return reader.text_key if reader.has_keys else ""


def is_unused(config: Config, sources: list[SourceFiles]) -> bool:
    """Tell whether nothing was made with the kept tokenizer but plans of sources."""
    return bool(sources) and not any(map(has_units, _source_folders(config)))


def remove_unused_tokenizer(config: Config, sources: list[SourceFiles]) -> bool:
    """Forget the kept tokenizer and all plans if it is unused; returns whether it is."""
    # The plans go first: workers that open another tokenizer after this do not find theirs.
    if not is_unused(config, sources) or not all(map(remove_unused_plan, _source_folders(config))):
        return False
    links.remove(tokenizer_folder(config) / ORIGIN_FILE, missing_ok=True)
    return True


def _source_folders(config: Config) -> list[Path]:
    others = {tokenizer_folder(config)}
    if config.data.curate is not None:
        others.add(config.data_dir / CURATE)
    return [path for path in config.data_dir.iterdir() if path.is_dir() and path not in others]


def sample_texts(config: Config, sources: list[SourceFiles], splits: Mapping[str, Splits]) -> Iterator[str]:
    """Documents of the training split from a keyed sample of all files, about `tokenizer.train.max_bytes` of text.

    The sample is made of whole small files, of lines from pieces of large ones, and of beginnings of compressed files
    and of pieces of tables, so only about as much is read. The more text one of those is expected to have, the more it
    gives.

    Raises:
        UserError: there is no document to train on.
    """
    assert config.tokenizer.train is not None
    wanted = config.tokenizer.train.max_bytes
    edit = _edits(config)
    draws = _draws(config, sources)
    reached: dict[_Candidate, Position | None] = {}
    rejected = Counter[str]()
    taken = asked = begin = 0
    while taken < wanted:
        # There may be less text than expected; then there is another turn. Because turns grow, they are few, and few
        # times what was read before is decompressed again.
        count = max(-(-(wanted - taken) // SAMPLE_BYTES), asked)
        asked += count
        turn = Counter(draws[begin : begin + count])
        begin += count
        if not turn:  # there may be more text than expected, too
            unread = [candidate for candidate, position in reached.items() if position is not None]
            turn = Counter(dict.fromkeys(unread, -(-count // max(len(unread), 1))))
        if not turn:
            break
        for candidate, times in turn.items():
            start = reached.get(candidate, START)
            if start is None:
                continue
            number, piece = candidate
            found = sources[number]
            reader = UnitReader(Unit(0, found.source.name, (piece,)), replace(found.reader, verify=False), start)
            reached[candidate] = None
            for document in reader:
                if document.reason is not None:
                    rejected[document.reason] += 1
                elif edit is not None:
                    document.text = edit(document.text)
                raw = document.text.encode()
                if document.reason is None and splits[found.source.name].of(raw, document.id) == 0:
                    taken += len(raw)
                    yield document.text
                    if taken >= wanted:
                        return
                if piece.chunked and reader.input_bytes >= times * SAMPLE_BYTES:
                    reached[candidate] = reader.position
                    break
    if not taken:
        why = ", ".join(f"{reason}: {count:,}" for reason, count in rejected.most_common())
        raise UserError(
            f"tokenizer.train: none of the {sum(len(found.files) for found in sources)} files of data.sources has a "
            f"good document for the training split{f' (rejected: {why})' if why else ''}; check paths, type, text_key "
            "and weight_key of the sources, and data.splits"
        )


def _edits(config: Config) -> Callable[[str], str] | None:
    """Edits of curation that documents get: what is masked, no tokenizer learns. Removed documents may be sampled."""
    curate = config.data.curate
    if curate is None or curate.mode != "apply":
        return None
    cleaner = Cleaner(curate.clean, curate.seed)
    return None if cleaner.changes_nothing else cleaner.clean


def _draws(config: Config, sources: list[SourceFiles]) -> list[_Candidate]:
    """Pieces of files in a keyed order; one that is expected to have n times SAMPLE_BYTES of text is there n times.

    Of a large corpus it is a keyed fraction of that.
    """
    assert config.tokenizer.train is not None
    total = sum(found.reader.expected_text_bytes(file) for found in sources for file in found.files)
    enough = max(4 * config.tokenizer.train.max_bytes, _CANDIDATE_BYTES)
    limit = min(2**64 * enough // max(total, 1), 2**64)
    draws: list[tuple[int, int, Piece]] = []
    for number, found in enumerate(sources):
        for file in found.files:
            expected = found.reader.expected_text_bytes(file)
            for (piece,) in found.reader.cut([file], found.reader.sample_bytes):
                name = (config.data.preprocess.seed, "tokenizer", found.source.name, file.name, piece.start)
                first = key(*name)
                bytes = expected * (piece.end - piece.start) // max(file.size, 1)
                times = max(bytes // SAMPLE_BYTES, 1) if piece.chunked else 1
                if times == 1:
                    draws += [(first, number, piece)] if first < limit else []
                else:
                    some = (times * limit + 2**64 - 1 - first) >> 64  # rounded up or down, by the key
                    draws += [(key(*name, i) * limit >> 64, number, piece) for i in range(some)]
    draws.sort(key=lambda draw: draw[:2])
    return [(number, piece) for _, number, piece in draws]
