"""A dataset's manifest: `manifest.json` beside `parts.bin`, one fixed-size record per part; and the check of both."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.common.hashing import CHUNK_BYTES, file_hash, value_hash
from pipeline.data.datasets.files import MANIFEST_FILE, PARTS_FILE, PLAN_FILE, RECEIPT_KEYS, TRAIN, receipt_path
from pipeline.data.datasets.indexed import PROVENANCE, IndexedPart, named_files, part_prefix
from pipeline.data.datasets.weights import weights_problem
from pipeline.data.tokenization.tokenizer import Tokenizer

PLAN_KEYS = ("config_hash", "settings", "splits", "files", "units")
FORMAT_VERSION = 2
WEIGHTED_VERSION = 3
"""Of a dataset whose documents have loss weights: earlier programs, which would leave them out, refuse it."""
WEIGHT_KEY = "weight_key"
"""Setting of a dataset with loss weights: the key of the records that they were read from."""
CODE_VERSION = "3"
"""Raised whenever the preprocess stage would write other bytes for the same input and config."""
REPAIR = (
    "run `pipeline preprocess RUN.yaml` with the run file that it was made with: it makes missing and truncated "
    "files again"
)
"""Advice about a file that is missing or has another size than it should."""
REPAIR_DAMAGED = f"remove what is damaged, if it is there, and {REPAIR}"
"""Advice about any file of a dataset. The stage looks at sizes, so it does not see damage that keeps them."""
REPAIR_ADOPTED = "restore the adopted file, or remove the dataset and adopt it again (`pipeline data adopt`)"
"""Advice about a part whose files were made elsewhere."""
PART = np.dtype(
    [
        ("tokens", "<u8"),
        ("documents", "<u8"),
        ("unit", "<u4"),
        ("link", "<u4"),
        *((name, "<u8") for name in ("bin", "idx", "prov", "meta")),
    ]
)
"""One record of `parts.bin`: counts, the part's name, and the xxh3-64 of each of its files (`meta` is 0 if there is
none). 56 bytes."""
WEIGHTED_PART = np.dtype([*PART.descr, ("weight", "<u8")])
"""The same of a dataset with loss weights: with the xxh3-64 of the `.weight` file. 64 bytes."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a later minor version may add keys


class TokenizerInfo(_Entry):
    """The tokenizer of a dataset. Its file lies beside the manifest."""

    fingerprint: str
    vocab_size: int
    end_of_document: int
    end_of_document_token: str
    special_tokens: dict[str, int]


class Generation(_Entry):
    """Totals of a dataset before files were added to its source: what its manifest said then."""

    documents: int
    tokens: int
    text_bytes: int
    config_hash: str
    parts: int
    parts_hash: str


class Manifest(_Entry):
    """Totals and identity of a dataset.

    Attributes:
        text_bytes: UTF-8 bytes of the documents' texts.
        dtype: of the token ids, `uint16` or `int32`; an adopted dataset may have another integer type.
        inner_ends: end-of-document tokens inside of documents. Only an adopted dataset may have any.
        settings: of the run file that decided the content, by key, as in the plan.
        config_hash: of everything that decided the content: settings, tokenizer, names and sizes of the files.
        code_version: of the stage that wrote it.
        parts: number of parts.
        parts_hash: xxh3-128 of `parts.bin`.
        generations: earlier states of a dataset that has grown, oldest first. Its parts are appended, so each of these
            is the beginning of the next.
    """

    format_version: int
    source: str
    split: str
    documents: int
    tokens: int
    text_bytes: int
    dtype: Literal["uint8", "int8", "uint16", "int16", "int32", "int64"]
    inner_ends: int = 0
    tokenizer: TokenizerInfo
    settings: dict[str, Any] = {}
    config_hash: str
    code_version: str
    parts: int
    parts_hash: str
    generations: list[Generation] = []

    @property
    def lineage(self) -> list[Manifest]:
        """The manifest of each generation, oldest first; the last one is this."""
        earlier = [
            self.model_copy(update={**dict(state), "generations": self.generations[:number]})
            for number, state in enumerate(self.generations)
        ]
        return [*earlier, self]

    def as_json(self) -> dict[str, Any]:
        """JSON of the file; a dataset that has not grown has no `generations`."""
        return self.model_dump(exclude=None if self.generations else {"generations"})

    @property
    def has_weights(self) -> bool:
        """True if the documents have loss weights."""
        return self.format_version == WEIGHTED_VERSION

    @property
    def part(self) -> np.dtype[Any]:
        """A record of `parts.bin`: `PART` or `WEIGHTED_PART`."""
        return WEIGHTED_PART if self.has_weights else PART

    @property
    def fingerprint(self) -> str:
        """Identity of the content: equal for equal documents, tokens and order, wherever and whenever it was made."""
        return value_hash([self.documents, self.tokens, self.dtype, self.tokenizer.fingerprint, self.parts_hash])


def write_dataset(
    folder: Path,
    parts: npt.NDArray[Any],
    tokenizer: Tokenizer,
    manifest: dict[str, Any],
    earlier: Sequence[tuple[int, int, str]] = (),
) -> tuple[Manifest, bool]:
    """Write tokenizer, `parts.bin` and, last, the manifest of a dataset whose parts are there already.

    Args:
        folder: the dataset.
        parts: `PART` or `WEIGHTED_PART` records in the order of the parts.
        tokenizer: of the token ids.
        manifest: source, split, text_bytes, settings, config_hash, code_version; and, where they are not the usual
            ones, dtype and inner_ends.
        earlier: of each earlier generation, oldest first: its number of parts, text_bytes and config_hash.

    Returns:
        The manifest, and whether anything was written; a dataset that has all of it already is left alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    has_weights = "weight" in (parts.dtype.names or ())
    data = parts.astype(WEIGHTED_PART if has_weights else PART).tobytes()
    info = TokenizerInfo(
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        end_of_document_token=tokenizer.end_of_document_token,
        special_tokens=tokenizer.special_tokens,
    )
    result = Manifest(
        format_version=WEIGHTED_VERSION if has_weights else FORMAT_VERSION,
        documents=int(parts["documents"].sum()),
        tokens=int(parts["tokens"].sum()),
        tokenizer=info,
        parts=len(parts),
        parts_hash=xxhash.xxh3_128_hexdigest(data),
        generations=[
            Generation(
                documents=int(parts["documents"][:count].sum()),
                tokens=int(parts["tokens"][:count].sum()),
                text_bytes=text_bytes,
                config_hash=config_hash,
                parts=count,
                parts_hash=xxhash.xxh3_128_hexdigest(data[: count * parts.dtype.itemsize]),
            )
            for count, text_bytes, config_hash in earlier
        ],
        **({"dtype": tokenizer.dtype.name} | manifest),
    )
    if _is_written(folder, result, data, tokenizer):
        return result, False
    tokenizer.save(folder)
    storage.put(folder / PARTS_FILE, data)
    storage.put_json(folder / MANIFEST_FILE, result.as_json())
    return result, True


def _is_written(folder: Path, manifest: Manifest, parts: bytes, tokenizer: Tokenizer) -> bool:
    try:
        same = read_manifest(folder) == manifest and storage.read_bytes(folder / PARTS_FILE) == parts
        return same and tokenizer.is_saved_in(folder)
    except (UserError, OSError, ValueError):
        return False


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        UserError: there is none, or it is of another version, or damaged.
    """
    path = folder / MANIFEST_FILE
    try:
        value = storage.get_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder} is not a finished dataset: it has no {MANIFEST_FILE}; run `pipeline preprocess`"
        ) from None
    except ValueError as error:
        raise UserError(f"{error}; {REPAIR}") from None
    version = value.get("format_version") if isinstance(value, dict) else None
    if version not in (FORMAT_VERSION, WEIGHTED_VERSION):
        raise UserError(
            f"{path}: format_version {version!r}; this program reads {FORMAT_VERSION} and {WEIGHTED_VERSION}"
        )
    try:
        return Manifest.model_validate(value)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"{path} is damaged: {problems}; {REPAIR}") from None


def read_parts(folder: Path, manifest: Manifest) -> npt.NDArray[Any]:
    """Read `parts.bin`: `PART` or `WEIGHTED_PART` records, shape (parts,).

    The file may have more records than the manifest, or the one of an earlier generation, counts: it is replaced before
    the manifest is, when a dataset grows.

    Raises:
        UserError: missing, or not the one that the manifest was written with.
    """
    path = folder / PARTS_FILE
    try:
        data = storage.read_bytes(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {REPAIR}") from None
    size = len(data)
    data = data[: manifest.parts * manifest.part.itemsize]
    if size % manifest.part.itemsize or xxhash.xxh3_128_hexdigest(data) != manifest.parts_hash:
        raise UserError(
            f"{path} is not the file that {MANIFEST_FILE} was written with: it is truncated or damaged; {REPAIR}"
        )
    return np.frombuffer(data, manifest.part)


def datasets_below(folder: Path) -> list[Path]:
    """A dataset itself, or the finished datasets of a source's folder or of a data folder, sorted, training first.

    Raises:
        UserError: there is none.
    """
    found = _datasets(folder)
    if not found:
        raise UserError(
            f"{folder} has no dataset: a dataset is a folder with a {MANIFEST_FILE}, like DATA_DIR/SOURCE/train, which "
            "`pipeline preprocess` writes when it ends"
        )
    return found


def _datasets(folder: Path) -> list[Path]:
    for pattern in (MANIFEST_FILE, f"*/{MANIFEST_FILE}", f"*/*/{MANIFEST_FILE}"):
        if found := [path.parent for path in folder.glob(pattern)]:
            return sorted(found, key=lambda path: (path.parent, path.name != TRAIN, path.name))
    return []


@dataclass
class Verification:
    """Scope and findings of `verify`.

    Attributes:
        problems: each naming the file; empty if everything is as it was written.
        adopted: folders among the datasets whose files were made by other programs.
        damaged: parts that differ from what was written, or are not there: (dataset, unit, chunk).
        lost: receipts that are not there or cannot be read: (folder of the source, unit, chunk).
    """

    datasets: int = 0
    parts: int = 0
    plans: int = 0
    receipts: int = 0
    problems: list[str] = field(default_factory=list)
    adopted: list[Path] = field(default_factory=list)
    damaged: list[tuple[Path, int, int]] = field(default_factory=list)
    lost: list[tuple[Path, int, int]] = field(default_factory=list)

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

    Of plans and receipts, which nobody needs to read a dataset, it is checked that they are there and can be read.
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
    for dataset in datasets_below(folder) if not any(unfinished.values()) else _datasets(folder):
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


def generations_of(plan: Any) -> list[tuple[str, int]]:
    """Hash of each generation of a plan, and the number of units up to its end, oldest first."""
    earlier = [(each["config_hash"], each["units"]) for each in plan.get("generations", [])]
    return [*earlier, (plan["config_hash"], len(plan["units"]))]


def _verify_dataset(folder: Path, result: Verification) -> Iterator[str]:
    """The problems of one dataset."""
    try:
        manifest = read_manifest(folder)
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
        if (name == "meta" and not record["meta"]) or (name == "weight" and not manifest.has_weights):
            continue
        try:
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
    provenance = files["prov"]
    if provenance.stat().st_size != part.documents * PROVENANCE.itemsize:
        yield f"{provenance}: {provenance.stat().st_size} bytes for {part.documents} documents of {PROVENANCE.itemsize}"
    if manifest.has_weights and (problem := weights_problem(files["weight"], part.documents)):
        yield problem
    if not index_is_sound(part):
        yield f"{part.idx_path}: lengths, offsets and document bounds do not agree with each other"
        return
    yield from _verify_tokens(part, manifest, inner_ends)


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
