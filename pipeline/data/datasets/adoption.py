"""A dataset of files that were made elsewhere, which is written as a whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.common.hashing import CHUNK_BYTES, file_hash, value_hash
from pipeline.data.datasets.files import MANIFEST_FILE, TRAIN
from pipeline.data.datasets.foreign import (
    SHOWN,
    Scan,
    rows_with_tokens,
    write_closed,
    write_index,
)
from pipeline.data.datasets.indexed import PROVENANCE, HashedFile, IndexedPart, part_files, part_prefix
from pipeline.data.datasets.manifest import (
    CODE_VERSION,
    WEIGHT_KEY,
    Manifest,
    part_record,
    write_dataset,
)
from pipeline.data.datasets.merge import StreamedIndex, check_space
from pipeline.data.datasets.target_mask import Bytes, mask_bytes, mask_file, part_mask, write_mask_blocks
from pipeline.data.datasets.weights import WEIGHT, weights_file, write_weights
from pipeline.data.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer

Link = Literal["symlink", "hardlink", "copy", "move"]
"""How a dataset gets files; those that were made for it are moved."""


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
        if manifest.has_mask:
            lines.append(f"{manifest.trained_tokens:,} of its tokens are trained targets, by the mask beside the files")
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


class Adoption:
    """Writes a dataset into a folder with a temporary name, which gets its final one when everything is there."""

    def __init__(
        self,
        final: Path,
        tokenizer: Tokenizer,
        link: Link,
        append_eod: bool,
        has_weights: bool,
        has_mask: bool,
        kept: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.final = final
        self._kept = kept
        """Numbers that the documents have in the file that they were taken from."""
        self._tokenizer = tokenizer
        self._link = link
        self._append_eod = append_eod
        self._has_weights = has_weights
        self._has_mask = has_mask
        self._trained = 0

    def run(self, files: list[tuple[str, IndexedPart]], found: list[Scan], source: str) -> AdoptReport:
        folder = self.final.parent
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(self.final)
        check_space(folder, sum(self._bytes(part, one) for (_, part), one in zip(files, found, strict=True)))
        tmp = storage.temporary(self.final)
        table = np.zeros(len(files), part_record(weights=self._has_weights, mask=self._has_mask))
        settings: dict[str, Any] = {"adopted": [name for name, _ in files], "append_eod": self._append_eod}
        if self._kept is not None:
            settings["kept"] = {
                "documents": len(self._kept),
                "numbers": xxhash.xxh3_128_hexdigest(self._kept.tobytes()),
            }
        inputs: list[list[Any]] = [[one.bin_hash, one.documents, one.sequences] for one in found]
        if self._has_weights:
            settings[WEIGHT_KEY] = "weight"
            inputs += [[file_hash(weights_file(part.bin_path.with_suffix("")))] for _, part in files]
        if self._has_mask:
            inputs += [["mask", file_hash(mask_file(part.bin_path.with_suffix("")))] for _, part in files]
        about: dict[str, Any] = {
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
                if self._has_mask:
                    about["trained_tokens"] = self._trained
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
        if self._has_mask:
            size += mask_bytes(one.documents, part.tokens + one.documents)
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
        record = [tokens, one.documents, number, 0, bin_hash, idx_hash, provenance.hash, 0]
        if self._has_weights:
            weights = np.fromfile(weights_file(part.bin_path.with_suffix("")), WEIGHT)
            kept = np.concatenate([weights[:0], *(weights[rows] for rows in rows_with_tokens(part))])
            with write_weights(prefix, kept) as file:
                file.commit()
            record.append(file.hash)
        if self._has_mask:
            record.append(self._write_mask(prefix, part, opened))
        return tuple(record)

    def _write_mask(self, prefix: Path, part: IndexedPart, opened: bytearray | None) -> int:
        """Write the trained targets of a part; returns the hash of the file.

        Args:
            prefix: of the part.
            part: the files that it is made of.
            opened: by `write_closed`: an end-of-document token that was appended is not a trained target.
        """
        counts, mask = part_mask(part.bin_path.with_suffix(""), part.documents, part.tokens, mapped=True)
        groups = list(rows_with_tokens(part))
        self._trained += int(counts.sum(dtype=np.int64))

        def blocks() -> Iterator[Bytes]:
            done = 0
            for rows in groups:
                starts, ends = part.starts_of(rows), part.starts_of(rows + 1)
                own = np.array(mask[starts[0] : ends[-1]] if len(rows) else mask[:0])
                if opened is not None:
                    is_open = np.frombuffer(opened, np.uint8)[done : done + len(rows)] == 1
                    own = np.insert(own, ends[is_open] - starts[0], 0)
                done += len(rows)
                yield own

        kept = np.concatenate([counts[:0], *(counts[rows] for rows in groups)])
        with write_mask_blocks(prefix, kept, blocks()) as file:
            file.commit()
        return file.hash

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
