"""`pipeline data adopt`: make a dataset out of `.bin/.idx` files of Megatron-LM and its kin, without a second copy."""

from __future__ import annotations

import errno
import glob
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import ValidationError

from pipeline.common import links, storage
from pipeline.common.console import Console, byte_progress
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.common.hashing import CHUNK_BYTES, file_hash, value_hash
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets.files import MANIFEST_FILE, TRAIN
from pipeline.data.datasets.foreign import (
    SHOWN,
    Scan,
    bytes_of_tokens,
    open_foreign,
    rows_with_tokens,
    scan,
    write_closed,
    write_index,
)
from pipeline.data.datasets.indexed import PROVENANCE, HashedFile, IndexedPart, part_files, part_prefix
from pipeline.data.datasets.left_out import read_left_out, write_without
from pipeline.data.datasets.manifest import (
    CODE_VERSION,
    PART,
    WEIGHT_KEY,
    WEIGHTED_PART,
    Manifest,
    read_manifest,
    write_dataset,
)
from pipeline.data.datasets.merge import StreamedIndex, check_space
from pipeline.data.datasets.verify import index_is_sound
from pipeline.data.datasets.weights import WEIGHT, weights_file, weights_problem, write_weights
from pipeline.data.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer

Link = Literal["symlink", "hardlink", "copy", "move"]
"""How a dataset gets files; those that were made for it are moved."""
_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class AdoptReport:
    """Result of an adoption.

    Attributes:
        folder: of the source; the dataset is its sub-folder `split`.
        copied: parts whose tokens were written anew, because of `append_eod` or by `link: copy`.
        dropped: documents without tokens, which were left out.
        appended: documents that got the end-of-document token.
        first_inner: where the first end-of-document tokens inside of documents are.
    """

    folder: Path
    split: str
    manifest: Manifest
    copied: int
    dropped: int
    appended: int
    first_inner: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        manifest = self.manifest
        dataset = self.folder / self.split
        how = f"{self.copied} copied, {manifest.parts - self.copied} linked" if self.copied else "linked"
        lines = [
            f"{dataset}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, {manifest.text_bytes:,} bytes "
            f"of text, {counted(manifest.parts, 'part')} ({how})"
        ]
        if self.dropped:
            lines.append(f"{self.dropped:,} documents without tokens were left out")
        if self.appended:
            lines.append(f"{self.appended:,} documents got {manifest.tokenizer.end_of_document_token!r} at their end")
        if manifest.inner_ends:
            lines.append(
                f"{manifest.tokenizer.end_of_document_token!r} occurs inside of documents, {manifest.inner_ends:,} "
                "times, as part of the text or as an end that the .idx does not have; these tokens are kept: "
                + "; ".join(self.first_inner)
            )
        if manifest.coverage.unknown_share:
            lines.append(manifest.coverage.in_words)
        if manifest.has_weights:
            lines.append("its documents have loss weights; `weight_key: weight` beside `dataset` uses them")
        lines.append(
            f"to use it: `dataset: {self.folder}` in data.sources, and in tokenizer: `path: "
            f"{dataset / TOKENIZER_FILE}`, `end_of_document: {manifest.tokenizer.end_of_document_token!r}`"
        )
        if self.split == TRAIN and not (self.folder / "heldout" / MANIFEST_FILE).exists():
            lines.append(
                f"validation and `pipeline eval` read {self.folder / 'heldout'}: adopt files with held-out documents "
                "there with --split heldout"
            )
        return "\n".join(lines)


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
    console: Console | None = None,
) -> AdoptReport:
    """Make FOLDER/SPLIT a dataset of foreign files, a part each, in the order given. They are read once to check them.

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
    files = _open_all(prefixes)
    if leave_out is not None:
        return _adopt_without(leave_out, files, folder / split, opened, append_eod, source, console or Console())
    adoption = _Adoption(folder / split, opened, link, append_eod, _have_weights(files))
    return _checked(adoption, files, opened, append_eod, source, console or Console())


def _checked(
    adoption: _Adoption,
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
    (name, part), has_weights = files[0], _have_weights(files)
    if not index_is_sound(part, shortest=0):
        raise UserError(f"{part.idx_path} is damaged: lengths, offsets and document bounds do not agree")
    left_out = read_left_out(leave_out, part)
    beside = next(folder for folder in final.parents if folder.is_dir())
    check_space(beside, part.tokens * part.dtype.itemsize + 20 * part.documents)
    with tempfile.TemporaryDirectory(prefix=".adopt-", dir=beside) as place:
        prefix = Path(place, "kept")
        with byte_progress(console, "copy", part.tokens * part.dtype.itemsize) as advance:
            kept = write_without(part, left_out, prefix, advance)
        if has_weights:
            weights = np.fromfile(weights_file(part.bin_path.with_suffix("")), WEIGHT)
            weights[kept].tofile(weights_file(prefix))
        adoption = _Adoption(final, opened, "move", append_eod, has_weights, kept)
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
    paths = [weights_file(part.bin_path.with_suffix("")) for _, part in files]
    missing = [path for path in paths if not path.exists()]
    if len(missing) == len(paths):
        return False
    if missing:
        raise UserError(
            f"{missing[0]} is missing, but other files have loss weights beside them: give all files such weights, or "
            "move those that are there elsewhere"
        )
    for path, (_, part) in zip(paths, files, strict=True):
        if problem := weights_problem(path, part.documents):
            raise UserError(f"{problem}; write a little-endian float32 for each document, or move the file elsewhere")
    return True


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


class _Adoption:
    """Writes a dataset into a folder with a temporary name, which gets its final one when everything is there."""

    def __init__(
        self,
        final: Path,
        tokenizer: Tokenizer,
        link: Link,
        append_eod: bool,
        has_weights: bool,
        kept: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.final = final
        self._kept = kept
        """Numbers that the documents have in the file that they were taken from."""
        self._tokenizer = tokenizer
        self._link = link
        self._append_eod = append_eod
        self._has_weights = has_weights

    def run(self, files: list[tuple[str, IndexedPart]], found: list[Scan], source: str) -> AdoptReport:
        folder = self.final.parent
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(self.final)
        check_space(folder, sum(self._bytes(part, one) for (_, part), one in zip(files, found, strict=True)))
        tmp = storage.temporary(self.final)
        table = np.zeros(len(files), WEIGHTED_PART if self._has_weights else PART)
        settings: dict[str, Any] = {"adopted": [name for name, _ in files], "append_eod": self._append_eod}
        if self._kept is not None:
            settings["kept"] = {
                "documents": len(self._kept),
                "numbers": xxhash.xxh3_128_hexdigest(self._kept.tobytes()),
            }
        inputs = [[one.bin_hash, one.documents, one.sequences] for one in found]
        if self._has_weights:
            settings[WEIGHT_KEY] = "weight"
            inputs += [[file_hash(weights_file(part.bin_path.with_suffix("")))] for _, part in files]
        about = {
            "source": source,
            "split": self.final.name,
            "text_bytes": sum(one.text_bytes for one in found),
            "unknown_tokens": sum(one.unknown_tokens for one in found),
            "dtype": files[0][1].dtype.name,
            "inner_ends": sum(one.inner_ends for one in found),
            "settings": settings,
            "config_hash": value_hash([settings, self._tokenizer.fingerprint, inputs]),
            "code_version": CODE_VERSION,
        }
        try:
            with storage.naming(self.final):
                links.make_folder(tmp)
                for number, ((name, part), one) in enumerate(zip(files, found, strict=True)):
                    prefix = part_prefix(tmp, number)
                    storage.make_below(tmp, prefix.parent)
                    table[number] = self._part(prefix, number, name, part, one)
                manifest, _ = write_dataset(tmp, table, self._tokenizer, about)
                storage.commit(tmp, self.final)
        except BaseException:
            links.remove_tree(tmp, ignore_errors=True)
            raise
        return AdoptReport(
            folder,
            self.final.name,
            manifest,
            copied=sum(self._copies(one) for one in found),
            dropped=sum(part.documents - one.documents for (_, part), one in zip(files, found, strict=True)),
            appended=sum(one.documents - one.closed for one in found) if self._append_eod else 0,
            first_inner=[
                f"{part.bin_path}, document {document}, token {token}"
                for (_, part), one in zip(files, found, strict=True)
                for document, token in one.first_inner
            ][:SHOWN],
        )

    def _is_open(self, one: Scan) -> bool:
        return self._append_eod and one.closed < one.documents

    def _copies(self, one: Scan) -> bool:
        return self._link in ("copy", "move") or self._is_open(one)

    def _bytes(self, part: IndexedPart, one: Scan) -> int:
        """Bytes of a part on disk, links not counted."""
        size = (PROVENANCE.itemsize + WEIGHT.itemsize * self._has_weights) * one.documents
        if self._link == "copy" or self._is_open(one):
            size += (part.tokens + one.documents) * part.dtype.itemsize
        return size + StreamedIndex.file_size(one.sequences, one.documents)

    def _part(self, prefix: Path, number: int, name: str, part: IndexedPart, one: Scan) -> tuple[int, ...]:
        """Make the files of a part; its `PART` record."""
        bin_path, idx_path, prov_path = part_files(prefix)
        opened: bytearray | None = None
        tokens = one.tokens
        if self._is_open(one):
            file, opened = write_closed(part, self._tokenizer.end_of_document, prefix)
            bin_hash, tokens = file.hash, tokens + sum(opened)
        else:
            bin_hash = one.bin_hash
            self._refer(part.bin_path, bin_path, bin_hash)
        if opened is not None or (one.documents, one.sequences) != (part.documents, part.sequences):
            write_index(part, one, opened, idx_path)
            idx_hash = file_hash(idx_path)
        else:
            idx_hash = file_hash(part.idx_path)
            self._refer(part.idx_path, idx_path, idx_hash)
        with HashedFile(prov_path) as provenance:
            for rows in rows_with_tokens(part):
                records = np.zeros(len(rows), PROVENANCE)
                records["unit"] = number
                there = rows if self._kept is None else self._kept[rows]
                records["row"] = there
                records["id_hash"] = [xxhash.xxh3_64_intdigest(f"{name}#{row}".encode()) for row in there.tolist()]
                provenance.write(records.tobytes())
            provenance.commit()
        record = tokens, one.documents, number, 0, bin_hash, idx_hash, provenance.hash, 0
        if not self._has_weights:
            return record
        weights = np.fromfile(weights_file(part.bin_path.with_suffix("")), WEIGHT)
        kept = np.concatenate([weights[:0], *(weights[rows] for rows in rows_with_tokens(part))])
        with write_weights(prefix, kept) as file:
            file.commit()
        return *record, file.hash

    def _refer(self, source: Path, target: Path, expected: int) -> None:
        """Link or copy a file that was checked."""
        source = source.resolve()
        if self._link == "move":
            links.replace(source, target)
        elif self._link == "symlink":
            target.symlink_to(source)
        elif self._link == "hardlink":
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                    raise
                raise UserError(
                    f"{source} cannot have a hard link in {target.parent} ({error.strerror}); use --link "
                    "symlink or --link copy"
                ) from None
        else:
            with storage.open_regular(source) as file, HashedFile(target) as copy:
                while chunk := file.read(CHUNK_BYTES):
                    copy.write(chunk)
                if copy.hash != expected:
                    raise UserError(f"{source} changed while it was read; adopt it when no process writes to it")
                copy.commit()


def _remove_stale(final: Path) -> None:
    """Remove what adoptions that were killed left half-written."""
    for path in final.parent.glob(f".{final.name}.*{storage.TEMPORARY_SUFFIX}"):
        if storage.is_stale(path):
            links.remove_tree(path, ignore_errors=True)
