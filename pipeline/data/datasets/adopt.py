"""`pipeline data adopt`: make a dataset out of `.bin/.idx` files of Megatron-LM and its kin, without a second copy."""

from __future__ import annotations

import glob
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from pipeline.common.console import Console, byte_progress
from pipeline.common.errors import UserError
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets.adoption import Adoption, AdoptReport, Link
from pipeline.data.datasets.files import MANIFEST_FILE, TRAIN
from pipeline.data.datasets.foreign import (
    Scan,
    bytes_of_tokens,
    open_foreign,
    scan,
)
from pipeline.data.datasets.indexed import IndexedPart, document_lengths, part_files
from pipeline.data.datasets.left_out import read_left_out, write_without
from pipeline.data.datasets.manifest import (
    read_manifest,
)
from pipeline.data.datasets.merge import check_space
from pipeline.data.datasets.target_mask import mask_blocks, mask_file, mask_problem, part_mask, write_mask_blocks
from pipeline.data.datasets.token_files import IdType, TokenFormat, token_file_bytes, write_pairs
from pipeline.data.datasets.verify import index_is_sound
from pipeline.data.datasets.weights import WEIGHT, weights_file, weights_problem
from pipeline.data.tokenization.tokenizer import Tokenizer

_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def adopt(
    prefixes: list[Path],
    folder: Path,
    *,
    tokenizer: Path,
    end_of_document: str = "<|endoftext|>",
    special_tokens: list[str] | None = None,
    split: str = TRAIN,
    source: str | None = None,
    link: Link = "symlink",
    append_eod: bool = False,
    leave_out: Path | None = None,
    form: Literal["megatron"] | TokenFormat = "megatron",
    ids: IdType | None = None,
    console: Console | None = None,
) -> AdoptReport:
    """Make FOLDER/SPLIT a dataset of foreign files, a part each, in the order given. They are read once to check them.

    Trained targets, PREFIX.mask as `docs/data-format.md` has it, are taken up where they lie beside all files.
    Loss weights of documents, PREFIX.weight with a little-endian float32 for each, are taken up where they lie beside
    all of the files. A source of a run file uses them with `weight_key: weight`.

    Args:
        prefixes: paths without a suffix, or with one of the two; folders and globs stand for the files in them.
        folder: of the source; several calls with different splits fill one.
        tokenizer: a `tokenizer.json`, or a folder that has one: the one that the files were made with.
        end_of_document: the token that closes every document.
        special_tokens: further special tokens.
        split: name of the split.
        source: name of the source in the manifest; by default that of the folder.
        link: how the parts refer to the files: by symbolic links, hard links, or as copies.
        append_eod: write copies in which documents that do not end with `end_of_document` do.
        leave_out: file of `numpy.save` with numbers of documents of the only prefix: a copy without them is written.
        form: format of the files; those of another suite are copied.
        ids: type of ids, where files of another suite do not say it.
        console: for the progress bar.

    Raises:
        UserError: the files are damaged, of another tokenizer, or have no ends of documents; or the folder has such a
            split already. Nothing is written then.
    """
    folder = Path(os.path.abspath(folder))
    opened = _load_tokenizer(tokenizer, end_of_document, special_tokens or [])
    if not _SPLIT_NAME.fullmatch(split):
        raise UserError(f"--split: {split!r} is not a valid name of a split; use letters, digits, - and _")
    _check_folder(folder, split, opened)
    console = console or Console()
    if form != "megatron":
        if leave_out is not None:
            raise UserError("--leave-out: its numbers are of documents of a .bin and .idx, and --format is another one")
        return _adopt_converted(form, ids, prefixes, folder / split, opened, append_eod, source, console)
    files = _open_all(prefixes)
    if leave_out is not None:
        return _adopt_without(leave_out, files, folder / split, opened, append_eod, source, console)
    adoption = Adoption(folder / split, opened, link, append_eod, _have_weights(files), _have_masks(files))
    return _checked(adoption, files, opened, append_eod, source, console)


def _checked(
    adoption: Adoption,
    files: list[tuple[str, IndexedPart]],
    opened: Tokenizer,
    append_eod: bool,
    source: str | None,
    console: Console,
) -> AdoptReport:
    """Check files, and make a dataset of them."""
    token_bytes = bytes_of_tokens(opened)
    size = sum(part.bin_path.stat().st_size for _, part in files)
    with byte_progress(console, "check", size) as advance:
        found = [scan(part, opened, token_bytes, advance) for _, part in files]
    if not append_eod:
        _check_ends(files, found, opened)
    elif opened.end_of_document > np.iinfo(files[0][1].dtype).max:
        raise UserError(
            f"--append-eod: {opened.end_of_document_token!r} (id {opened.end_of_document}) does not fit into the "
            f"{files[0][1].dtype.name} of {files[0][1].bin_path}"
        )
    return adoption.run(files, found, source or adoption.final.parent.name)


def _adopt_without(
    leave_out: Path,
    files: list[tuple[str, IndexedPart]],
    final: Path,
    opened: Tokenizer,
    append_eod: bool,
    source: str | None,
    console: Console,
) -> AdoptReport:
    """Adopt a copy of files that lacks some documents. It is made beside the folder of the source, and moved there."""
    if len(files) > 1:
        raise UserError(f"--leave-out: its numbers are of the documents of one file, and there are {len(files)}")
    (name, part), has_weights, has_mask = files[0], _have_weights(files), _have_masks(files)
    if not index_is_sound(part, shortest=0):
        raise UserError(f"{part.idx_path} is damaged: lengths, offsets and document bounds do not agree")
    left_out = read_left_out(leave_out, part)
    with _place_beside(final, part.tokens * part.dtype.itemsize + 20 * part.documents) as place:
        prefix = Path(place, "kept")
        with byte_progress(console, "copy", part.tokens * part.dtype.itemsize) as advance:
            kept = write_without(part, left_out, prefix, advance)
        if has_weights:
            weights = np.fromfile(weights_file(part.bin_path.with_suffix("")), WEIGHT)
            weights[kept].tofile(weights_file(prefix))
        if has_mask:
            _write_kept_mask(part, kept, prefix)
        adoption = Adoption(final, opened, "move", append_eod, has_weights, has_mask, kept)
        return _checked(adoption, [(name, IndexedPart(prefix))], opened, append_eod, source, console)


def _load_tokenizer(path: Path, end_of_document: str, special_tokens: list[str]) -> Tokenizer:
    values = {"path": str(path), "end_of_document": end_of_document, "special_tokens": special_tokens}
    try:
        return Tokenizer.load(path, TokenizerConfig.model_validate(values))
    except ValidationError as error:
        problems = "; ".join(str(problem["msg"]) for problem in error.errors())
        raise UserError(f"--end-of-document, --special-token: {problems}") from None
    except UserError as error:
        text = str(error)
        for key, option in (
            ("tokenizer.path", "--tokenizer"),
            ("tokenizer.end_of_document", "--end-of-document"),
            ("tokenizer.special_tokens", "--special-token"),
        ):
            text = text.replace(key, option)
        raise UserError(text) from None


def _check_folder(folder: Path, split: str, tokenizer: Tokenizer) -> None:
    final = folder / split
    if final.is_symlink() or (final.exists() and (not final.is_dir() or any(final.iterdir()))):
        raise UserError(f"{final} exists already; give another folder or another --split, or remove it")
    for manifest in sorted(folder.glob(f"*/{MANIFEST_FILE}")):
        info = read_manifest(manifest.parent).tokenizer
        if info.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"--tokenizer: {manifest.parent} has another tokenizer ({info.vocab_size} entries, fingerprint "
                f"{info.fingerprint}) than this one ({tokenizer.vocab_size} entries, {tokenizer.fingerprint}); the "
                "splits of a source have one"
            )


def _open_all(arguments: list[Path]) -> list[tuple[str, IndexedPart]]:
    """Name and files of every prefix. The name is the path below the folder that all of them are in."""
    prefixes = [prefix for argument in arguments for prefix in _prefixes(argument)]
    if len({prefix.resolve() for prefix in prefixes}) < len(prefixes):
        twice = next(prefix for number, prefix in enumerate(prefixes) if prefix in prefixes[:number])
        raise UserError(f"{twice} is given twice")
    files = [open_foreign(prefix) for prefix in prefixes]
    for part in files[1:]:
        if part.dtype != files[0].dtype:
            raise UserError(
                f"{part.idx_path} has ids of {part.dtype.name}, but {files[0].idx_path} of {files[0].dtype.name}; a "
                "dataset has one type: adopt them as two sources, into two folders"
            )
    base = os.path.commonpath([prefix.parent for prefix in prefixes])
    return [(os.path.relpath(prefix, base), part) for prefix, part in zip(prefixes, files, strict=True)]


def _prefixes(argument: Path) -> list[Path]:
    path = Path(os.path.abspath(argument.expanduser()))
    if path.is_dir():
        found = {file.with_suffix("") for file in path.iterdir() if file.suffix == ".idx"}
        if not found:
            raise UserError(
                f"{argument} has no .idx file; give the prefix of a .bin and .idx, or a folder with such files"
            )
    elif path.suffix in (".bin", ".idx") and path.exists():
        found = {path.with_suffix("")}
    elif any(file.exists() for file in part_files(path)[:2]) or not glob.has_magic(str(path)):
        found = {path}
    else:
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        matches += [Path(match) for match in glob.glob(f"{path}.idx", recursive=True)]
        found = {match.with_suffix("") for match in matches if match.suffix in (".bin", ".idx")}
        if not found:
            raise UserError(f"{argument} matches no .bin or .idx file")
    return sorted(found, key=lambda prefix: [int(t) if t.isdecimal() else t for t in re.split(r"(\d+)", str(prefix))])


def _have_weights(files: list[tuple[str, IndexedPart]]) -> bool:
    """True if all files have loss weights beside them, as many as documents; none of them may be without, else."""
    return _have(
        files,
        weights_file,
        lambda path, part: weights_problem(path, part.documents),
        "loss weights",
        "write a little-endian float32 for each document",
    )


def _have_masks(files: list[tuple[str, IndexedPart]]) -> bool:
    """True if all files have trained targets beside them; none of them may be without, else."""
    return _have(
        files,
        mask_file,
        lambda path, part: mask_problem(path, document_lengths(part)),
        "trained targets",
        "write a little-endian u32 for each document and a byte for each token",
    )


def _have(
    files: list[tuple[str, IndexedPart]],
    file_of: Callable[[Path], Path],
    problem_of: Callable[[Path, IndexedPart], str | None],
    what: str,
    how: str,
) -> bool:
    """True if all files have a further one beside them, which fits."""
    paths = [file_of(part.bin_path.with_suffix("")) for _, part in files]
    missing = [path for path in paths if not path.exists()]
    if len(missing) == len(paths):
        return False
    if missing:
        raise UserError(
            f"{missing[0]} is missing, but other files have {what} beside them: give all files such {what}, or "
            "move those that are there elsewhere"
        )
    for path, (_, part) in zip(paths, files, strict=True):
        if problem := problem_of(path, part):
            raise UserError(f"{problem}; {how}, or move the file elsewhere")
    return True


def _write_kept_mask(part: IndexedPart, kept: npt.NDArray[np.int64], prefix: Path) -> None:
    """Write the trained targets of some documents of a file, whose numbers ascend."""
    counts, mask = part_mask(part.bin_path.with_suffix(""), part.documents, part.tokens, mapped=True)
    runs = [run for run in np.split(kept, np.flatnonzero(np.diff(kept) != 1) + 1) if len(run)]
    ranges = ((part.document_start(int(run[0])), part.document_start(int(run[-1]) + 1)) for run in runs)
    blocks = (block for start, end in ranges for block in mask_blocks(mask[start:end]))
    with write_mask_blocks(prefix, counts[kept], blocks) as file:
        file.commit()


def _check_ends(files: list[tuple[str, IndexedPart]], found: list[Scan], tokenizer: Tokenizer) -> None:
    documents, closed = sum(one.documents for one in found), sum(one.closed for one in found)
    if closed == documents:
        return
    token = f"{tokenizer.end_of_document_token!r} (id {tokenizer.end_of_document})"
    if closed == 0:
        last = {number for one in found if one.last_ids for number in one.last_ids}
        if len(last) == 1 and documents > 1:
            number = last.pop()
            raise UserError(
                f"no document ends with {token}, but all {documents:,} end with {tokenizer.decode([number])!r} (id "
                f"{number}); give that one with --end-of-document, if it ends documents"
            )
        raise UserError(
            f"none of {documents:,} documents ends with {token}: the files were made without an end-of-document token "
            "(without --append-eod). --append-eod writes copies that have it; or give the token that ends documents "
            "with --end-of-document"
        )
    first = next(
        f"{part.bin_path}, document {one.first_open}"
        for (_, part), one in zip(files, found, strict=True)
        if one.first_open is not None
    )
    raise UserError(
        f"{documents - closed:,} of {documents:,} documents do not end with {token}; the first is {first}. "
        "--append-eod writes copies in which they do"
    )


def _adopt_converted(
    form: TokenFormat,
    ids: IdType | None,
    paths: list[Path],
    final: Path,
    opened: Tokenizer,
    append_eod: bool,
    source: str | None,
    console: Console,
) -> AdoptReport:
    """Adopt copies of token files of another suite."""
    size = token_file_bytes(form, paths)
    with _place_beside(final, size) as place:
        with byte_progress(console, "copy", size) as advance:
            pairs = write_pairs(form, paths, ids, opened.vocab_size, opened.end_of_document, Path(place), advance)
        files = [(name, IndexedPart(prefix)) for name, prefix in pairs]
        adoption = Adoption(final, opened, "move", append_eod, has_weights=False, has_mask=False)
        return _checked(adoption, files, opened, append_eod, source, console)


@contextmanager
def _place_beside(final: Path, size: int) -> Iterator[str]:
    """A temporary folder on the disk of a dataset, with room for `size` bytes."""
    beside = next(folder for folder in final.parents if folder.is_dir())
    check_space(beside, size)
    with tempfile.TemporaryDirectory(prefix=".adopt-", dir=beside) as place:
        yield place
