"""Check of datasets: all hashes, counts and bounds of their parts, and the plans and receipts beside them."""

from __future__ import annotations

import itertools
import stat
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.common.hashing import CHUNK_BYTES, check_seal, file_hash
from pipeline.data.datasets.document_records import metadata_bytes
from pipeline.data.datasets.files import (
    MANIFEST_FILE,
    MORE_RECEIPT_KEYS,
    PARTS_FILE,
    PLAN_FILE,
    RECEIPT_KEYS,
    receipt_path,
)
from pipeline.data.datasets.indexed import HEADER, PROVENANCE, IndexedPart, document_lengths, named_files, part_prefix
from pipeline.data.datasets.manifest import (
    PLAN_KEYS,
    REPAIR,
    REPAIR_ADOPTED,
    REPAIR_DAMAGED,
    Manifest,
    changed_files,
    datasets_below,
    finished_datasets,
    generations_of,
    read_manifest,
    read_parts,
)
from pipeline.data.datasets.target_mask import mask_bytes, mask_problem
from pipeline.data.datasets.weights import WEIGHT, weights_problem
from pipeline.data.tokenization.tokenizer import Tokenizer


@dataclass
class Verification:
    """Scope and findings of `verify`.

    Attributes:
        problems: each naming the file; empty if everything is as it was written.
        adopted: folders among the datasets whose files were made by other programs.
        damaged: parts that differ from what was written, or are not there: (dataset, unit, chunk).
        lost: receipts that are not there, cannot be read or were changed: (folder of the source, unit, chunk).
        unsealed: files of earlier versions without a hash of their own.
    """

    datasets: int = 0
    parts: int = 0
    plans: int = 0
    receipts: int = 0
    problems: list[str] = field(default_factory=list)
    adopted: list[Path] = field(default_factory=list)
    damaged: list[tuple[Path, int, int]] = field(default_factory=list)
    lost: list[tuple[Path, int, int]] = field(default_factory=list)
    unsealed: list[Path] = field(default_factory=list)

    def check_seal(self, path: Path, keys: Collection[str]) -> None:
        """Check a JSON file against its own hash, or note that it has none; raises as `hashing.check_seal`."""
        if not check_seal(path, storage.read_bytes(path), keys):
            self.unsealed.append(path)

    @property
    def repairs(self) -> list[str]:
        """Advice about the problems."""
        foreign = [any(problem.startswith(str(folder)) for folder in self.adopted) for problem in self.problems]
        return list({REPAIR_ADOPTED if is_foreign else REPAIR_DAMAGED: None for is_foreign in foreign})

    def __str__(self) -> str:
        counts = {"dataset": self.datasets, "part": self.parts, "plan": self.plans, "receipt": self.receipts}
        return ", ".join(counted(n, name) for name, n in counts.items() if n)


def verify(folder: Path) -> Verification:
    """Check the datasets in a folder, all hashes and bounds, and the plans and receipts beside them.

    A changed byte of a manifest, of `parts.bin`, of the tokenizer, of a part, a plan or a receipt is found; manifests,
    plans and receipts of earlier versions have no hash of their own (`unsealed`), so of these only what disagrees with
    other files. Not looked at are leases, reports and lists for people (`report.json`, `rejected.jsonl`,
    `damaged.jsonl`, `failures.jsonl`) and the run's own copy of the tokenizer, which each use compares.
    Memory does not depend on the size of the datasets.

    Raises:
        UserError: there is no dataset in the folder.
    """
    result = Verification()
    plans = sorted([*folder.glob(PLAN_FILE), *folder.glob(f"*/{PLAN_FILE}")])
    unfinished = {plan: _unfinished(plan) for plan in plans}
    for plan, splits in unfinished.items():
        for split in splits:
            result.problems.append(f"{plan.parent / split} is not finished: it has no {MANIFEST_FILE}")
    for dataset in datasets_below(folder) if not any(unfinished.values()) else finished_datasets(folder):
        result.datasets += 1
        result.problems.extend(_verify_dataset(dataset, result))
    for plan, splits in unfinished.items():
        result.plans += 1
        result.problems.extend(_verify_records(plan, result, finished=not splits))
    return result


def _unfinished(plan: Path) -> list[str]:
    """The splits of a plan that have no manifest."""
    try:
        splits = [storage.plain_name(name, plan) for name in storage.get_json(plan, *PLAN_KEYS)["splits"]]
    except UserError:  # reported with the records
        splits = []
    return [split for split in splits if not (plan.parent / split / MANIFEST_FILE).is_file()]


def _verify_records(plan: Path, result: Verification, finished: bool) -> Iterator[str]:
    """The problems of a plan and its receipts."""
    try:
        result.check_seal(plan, (*PLAN_KEYS, "generations"))
        found = storage.get_json(plan, *PLAN_KEYS)
        units = len(found["units"])
        for name in found["splits"]:
            storage.plain_name(name, plan)
    except UserError as error:
        yield str(error)
        return
    due = units if not finished else _units_of(plan.parent, found)
    for unit in range(due):
        for chunk in itertools.count():
            path = receipt_path(plan.parent, unit, chunk)
            try:
                receipt = storage.get_json(path, *RECEIPT_KEYS)
                result.check_seal(path, (*RECEIPT_KEYS, *MORE_RECEIPT_KEYS))
                for name in receipt["splits"]:
                    storage.plain_name(name, path)
            except (UserError, FileNotFoundError) as error:
                if isinstance(error, UserError) or finished:
                    result.lost.append((plan.parent, unit, chunk))
                    yield str(error) if isinstance(error, UserError) else f"{path} is missing"
                break
            result.receipts += 1
            if receipt["last"]:
                break


def _units_of(source: Path, plan: Any) -> int:
    """Units whose documents are in the datasets of a source: while it grows, its plan has more."""
    manifests = (storage.find_json(source / name / MANIFEST_FILE, "config_hash") for name in plan["splits"])
    made = {manifest["config_hash"] for manifest in manifests if manifest is not None}
    return min(
        (units for config_hash, units in generations_of(plan) if config_hash in made), default=len(plan["units"])
    )


def _grows(folder: Path, manifest: Manifest) -> bool:
    """Tell whether the plan of a dataset has a generation behind that of its manifest."""
    plan = storage.find_json(folder.parent / PLAN_FILE, *PLAN_KEYS)
    return plan is not None and manifest.config_hash in [each["config_hash"] for each in plan.get("generations", [])]


def _verify_dataset(folder: Path, result: Verification) -> Iterator[str]:
    """The problems of one dataset."""
    try:
        manifest = read_manifest(folder)
        result.check_seal(folder / MANIFEST_FILE, Manifest.model_fields)
        parts = read_parts(folder, manifest)
    except UserError as error:
        yield str(error).removesuffix(f"; {REPAIR}")
        return
    if "adopted" in manifest.settings:
        result.adopted.append(folder)
    if (folder / PARTS_FILE).stat().st_size > parts.nbytes and not _grows(folder, manifest):
        yield f"{folder / PARTS_FILE} has bytes behind its last part"
    for total in ("documents", "tokens"):
        listed, found = getattr(manifest, total), int(parts[total].sum())
        if found != listed:
            yield f"{folder / MANIFEST_FILE}: {listed} {total}, but the parts have {found}"
    try:
        if Tokenizer.open(folder).fingerprint != manifest.tokenizer.fingerprint:
            yield f"{folder / 'tokenizer.json'} is not the tokenizer of the token ids"
    except Exception as error:  # whatever the library cannot read
        yield f"{folder / 'tokenizer.json'}: {error}"
    for path in changed_files(folder, manifest):
        yield f"{path}: its bytes differ from those that were written (other xxh3)"
    inner_ends: Counter[Path] = Counter()
    for index in range(manifest.parts):
        result.parts += 1
        unit, chunk = int(parts[index]["unit"]), int(parts[index]["link"])
        problems = list(_verify_part(part_prefix(folder, unit, chunk), parts[index], manifest, inner_ends))
        if problems:
            result.damaged.append((folder, unit, chunk))
        yield from problems
    if manifest.inner_ends and inner_ends.total() != manifest.inner_ends:
        found = inner_ends.total()
        yield f"{folder}: {found} end-of-document tokens inside of documents, but {manifest.inner_ends} were adopted"


def _verify_part(prefix: Path, record: Any, manifest: Manifest, inner_ends: Counter[Path]) -> Iterator[str]:
    files = named_files(prefix)
    for name, path in files.items():
        # A part need not have these.
        if name not in (manifest.part.names or ()) or (name == "meta" and not record["meta"]):
            continue
        try:
            # A file may say any size and take no room on the disk, and a hash takes as long as that size.
            if problem := _wrong_size(name, path, record, manifest):
                yield problem
                return
            if file_hash(path) != int(record[name]):
                yield f"{path}: its bytes differ from those that were written (other xxh3)"
        except UserError as error:
            yield str(error)
            return
        except OSError as error:
            yield f"{path}: {error.strerror}"
            return
    try:
        part = IndexedPart(prefix)
    except UserError as error:
        yield str(error)
        return
    for name in ("tokens", "documents"):
        if getattr(part, name) != int(record[name]):
            yield f"{part.idx_path}: {getattr(part, name)} {name}, but {PARTS_FILE} says {record[name]}"
    if part.dtype.name != manifest.dtype:
        yield f"{part.idx_path}: dtype {part.dtype.name}, but {MANIFEST_FILE} says {manifest.dtype}"
    if manifest.has_weights and (problem := weights_problem(files["weight"], part.documents)):
        yield problem
    if not index_is_sound(part):
        yield f"{part.idx_path}: lengths, offsets and document bounds do not agree with each other"
        return
    if manifest.has_mask and (problem := mask_problem(files["mask"], document_lengths(part), pairs=manifest.has_pairs)):
        yield problem
    yield from _verify_tokens(part, manifest, inner_ends)


def _wrong_size(name: str, path: Path, record: Any, manifest: Manifest) -> str | None:
    """The fault in the size of a file of a part, by the counts of the part; None if it has the size that it should.

    Raises:
        OSError: it cannot be read.
    """
    tokens, documents = int(record["tokens"]), int(record["documents"])
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # which the hash tells
        return None
    each = f"for {tokens:,} tokens of {counted(documents, 'document')} ({PARTS_FILE})"
    expected = {
        "bin": tokens * np.dtype(manifest.dtype).itemsize,
        "prov": documents * PROVENANCE.itemsize,
        "weight": documents * WEIGHT.itemsize,
        "mask": mask_bytes(documents, tokens),
    }
    if name == "idx":
        fixed = HEADER.size + 8 * (documents + 1)
        sequences, rest = divmod(status.st_size - fixed, 12)
        if rest or not 0 <= sequences <= tokens:
            return (
                f"{path}: {status.st_size:,} bytes; expected: {fixed:,}, and 12 for each sequence, of which there are "
                f"at most {tokens:,}, {each}"
            )
        return None
    if name == "meta":
        expected["meta"] = metadata_bytes(path, documents)
    if status.st_size != expected[name]:
        return f"{path}: {status.st_size:,} bytes; expected: {expected[name]:,} {each}"
    return None


def index_is_sound(part: IndexedPart, shortest: int = 1) -> bool:
    """Tell whether lengths are at least `shortest`, offsets their running sum, and document bounds do not decrease."""
    step = CHUNK_BYTES // 8
    offset = 0
    for first in range(0, part.sequences, step):
        lengths = part.lengths[first : first + step].astype(np.int64)
        ends = offset + np.cumsum(lengths) * part.dtype.itemsize
        starts = ends - lengths * part.dtype.itemsize
        if (lengths < shortest).any() or not np.array_equal(starts, part.pointers[first : first + step]):
            return False
        offset = int(ends[-1])
    return all((np.diff(part.bounds[first : first + step + 1]) >= 0).all() for first in range(0, part.documents, step))


def _verify_tokens(part: IndexedPart, manifest: Manifest, inner_ends: Counter[Path]) -> Iterator[str]:
    """All ids are in the vocabulary, and the end-of-document token is the last of every document and nowhere else.

    Where the manifest allows some inside of documents, these are counted.
    """
    tokenizer = manifest.tokenizer
    step = CHUNK_BYTES // 8
    for start in range(0, part.tokens, step):
        ids = part.read(start, min(step, part.tokens - start))
        if int(ids.min()) < 0 or int(ids.max()) >= tokenizer.vocab_size:
            found = f"{ids.min()}..{ids.max()}"
            yield f"{part.bin_path}: ids {found} are outside of the vocabulary of {tokenizer.vocab_size}"
            return
        is_end = ids == tokenizer.end_of_document
        ends = document_ends(part, start, len(ids)) - start
        inner = int(is_end.sum()) - int(is_end[ends].sum())
        if not is_end[ends].all() or (inner and not manifest.inner_ends):
            yield f"{part.bin_path}: end-of-document tokens are not at the ends of the documents"
            return
        inner_ends[part.bin_path] += inner


def document_ends(part: IndexedPart, start: int, count: int) -> npt.NDArray[np.int64]:
    """Tokens in [start, start + count) that are the last of a document, ascending."""
    begins = part.document_starts(start, count)
    # A document begins behind each end, so the ends are one before the begins that follow.
    ends = np.unique(begins[begins > start]) - 1
    last = start + count
    if count and (last == part.tokens or part.document_start(part.document_at(last)) == last):
        ends = np.append(ends, last - 1)
    return ends
