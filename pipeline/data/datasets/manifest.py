"""A dataset's manifest: `manifest.json` beside `parts.bin`, one fixed-size record per part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash, put_sealed, value_hash
from pipeline.data.datasets.files import MANIFEST_FILE, PARTS_FILE, TRAIN
from pipeline.data.tokenization.coverage import Coverage, RoundTrip
from pipeline.data.tokenization.definition import MAX_FILE_BYTES
from pipeline.data.tokenization.tokenizer import Tokenizer

PLAN_KEYS = ("config_hash", "settings", "splits", "files", "units")
FORMAT_VERSION = 2
WEIGHTED_VERSION = 3
"""Of a dataset whose documents have loss weights: earlier programs, which would leave them out, refuse it."""
FEATURES_VERSION = 4
"""Format of datasets that list their features: what readers have to know besides ids, each a file beside `.bin`."""
WEIGHTS = "weights"
MASK = "mask"
PAIRS = "pairs"
_FEATURES = (WEIGHTS, MASK, PAIRS)
"""Features that this program knows."""
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


def part_record(*, weights: bool, mask: bool) -> np.dtype[Any]:
    """A record of `parts.bin`: `PART`, and behind it the xxh3-64 of the files that not every dataset has.

    Args:
        weights: the dataset has loss weights, `.weight`.
        mask: it has trained targets, `.mask`.
    """
    optional = [name for name, is_there in (("weight", weights), ("mask", mask)) if is_there]
    return np.dtype([*PART.descr, *((name, "<u8") for name in optional)])


_NO_FILES: Mapping[str, bytes] = {}


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
        trained_tokens: those that are trained on as targets, of a dataset with a mask. None in others, where all are,
            and for earlier generations.
        unknown_tokens: those with the id that stands for text without a token. None where nobody has counted them: in
            datasets of earlier versions.
        round_trip: what decoding gives back of a sample of the texts; None in datasets of earlier versions, and in
            adopted ones, whose texts nobody has.
        salvaged_bytes: bytes of text of the source's files that no checksum holds for, or None.
        dtype: of the token ids, `uint16` or `int32`; an adopted dataset may have another integer type.
        inner_ends: end-of-document tokens inside of documents. Only an adopted dataset may have any.
        settings: of the run file that decided the content, by key, as in the plan.
        config_hash: of everything that decided the content: settings, tokenizer, names and sizes of the files.
        code_version: of the stage that wrote it.
        parts: number of parts.
        parts_hash: xxh3-128 of `parts.bin`.
        files: xxh3-64 of the files of the tokenizer, by name; none in datasets of earlier versions.
        features: what readers have to know besides token ids, of version `FEATURES_VERSION`.
        generations: earlier states of a dataset that has grown, oldest first. Its parts are appended, so each of these
            is the beginning of the next.
    """

    format_version: int
    source: str
    split: str
    documents: int
    tokens: int
    text_bytes: int
    trained_tokens: int | None = None
    unknown_tokens: int | None = None
    round_trip: RoundTrip | None = None
    salvaged_bytes: int | None = None
    dtype: Literal["uint8", "int8", "uint16", "int16", "int32", "int64"]
    inner_ends: int = 0
    tokenizer: TokenizerInfo
    settings: dict[str, Any] = {}
    config_hash: str
    code_version: str
    parts: int
    parts_hash: str
    files: dict[str, str] = {}
    features: list[str] = []
    generations: list[Generation] = []

    @property
    def lineage(self) -> list[Manifest]:
        """The manifest of each generation, oldest first; the last one is this."""
        uncounted = {"trained_tokens": None, "unknown_tokens": None, "round_trip": None}
        earlier = [
            self.model_copy(update=uncounted | {**dict(state), "generations": self.generations[:number]})
            for number, state in enumerate(self.generations)
        ]
        return [*earlier, self]

    def as_json(self) -> dict[str, Any]:
        """JSON of the file without its seal. What there is not (`generations`, say) is left out."""
        optional = (
            "generations",
            "trained_tokens",
            "unknown_tokens",
            "round_trip",
            "salvaged_bytes",
            "files",
            "features",
        )
        return self.model_dump(exclude={name for name in optional if getattr(self, name) in (None, [], {})})

    @property
    def coverage(self) -> Coverage:
        """Share of the text that the token ids stand for, as far as it was counted."""
        return Coverage(self.tokens, self.unknown_tokens, self.round_trip)

    @property
    def has_weights(self) -> bool:
        """True if the documents have loss weights."""
        return self.format_version == WEIGHTED_VERSION or WEIGHTS in self.features

    @property
    def has_mask(self) -> bool:
        """True if only some tokens are trained on as targets: a dataset of conversations."""
        return MASK in self.features

    @property
    def has_pairs(self) -> bool:
        """True if each document is two conversations, of which the first is preferred."""
        return PAIRS in self.features

    @property
    def part(self) -> np.dtype[Any]:
        """A record of `parts.bin`, see `part_record`."""
        return part_record(weights=self.has_weights, mask=self.has_mask)

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
    more_files: Mapping[str, bytes] = _NO_FILES,
) -> tuple[Manifest, bool]:
    """Write tokenizer, `parts.bin` and, last, the manifest of a dataset whose parts are there already.

    Args:
        folder: the dataset; it is made if need be, in a folder that exists.
        parts: records in the order of the parts, see `part_record`.
        tokenizer: of the token ids.
        manifest: source, split, text_bytes, settings, config_hash, code_version; and, where they are not the usual
            ones, dtype, inner_ends and trained_tokens.
        earlier: of each earlier generation, oldest first: its number of parts, text_bytes and config_hash.
        more_files: that are written beside those of the tokenizer, by name.

    Returns:
        The manifest, and whether anything was written; a dataset that has all of it already is left alone.
    """
    links.make_folder(folder)
    has_weights, has_mask = (name in (parts.dtype.names or ()) for name in ("weight", "mask"))
    data = parts.astype(part_record(weights=has_weights, mask=has_mask)).tobytes()
    features = [*([WEIGHTS] if has_weights else []), MASK] if has_mask else []
    features += [PAIRS] if (manifest.get("settings", {}).get("chat") or {}).get("format") == "preference" else []
    info = TokenizerInfo(
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        end_of_document_token=tokenizer.end_of_document_token,
        special_tokens=tokenizer.special_tokens,
    )
    result = Manifest(
        format_version=FEATURES_VERSION if features else WEIGHTED_VERSION if has_weights else FORMAT_VERSION,
        features=features,
        documents=int(parts["documents"].sum()),
        tokens=int(parts["tokens"].sum()),
        tokenizer=info,
        parts=len(parts),
        parts_hash=xxhash.xxh3_128_hexdigest(data),
        files={name: xxhash.xxh3_64_hexdigest(content) for name, content in {**tokenizer.files, **more_files}.items()},
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
    for name, content in more_files.items():
        storage.put(folder / name, content)
    storage.put(folder / PARTS_FILE, data)
    put_sealed(folder / MANIFEST_FILE, result.as_json())
    return result, True


def _is_written(folder: Path, manifest: Manifest, parts: bytes, tokenizer: Tokenizer) -> bool:
    try:
        found = read_manifest(folder)
        # Another version of the library writes the same tokenizer in other bytes.
        same = found == manifest.model_copy(update={"files": found.files})
        same = same and storage.read_bytes(folder / PARTS_FILE) == parts and not changed_files(folder, found)
        return same and tokenizer.is_saved_in(folder)
    except (UserError, OSError, ValueError):
        return False


def changed_files(folder: Path, manifest: Manifest) -> list[Path]:
    """The files of `files` that are missing, or have other bytes."""
    paths = {
        folder / storage.plain_name(name, folder / MANIFEST_FILE): listed for name, listed in manifest.files.items()
    }
    return [path for path, listed in paths.items() if not _is_as_listed(path, listed)]


def _is_as_listed(path: Path, listed: str) -> bool:
    # A larger file is none of a tokenizer; it may say any size, and its hash would take as long as that.
    return path.is_file() and path.stat().st_size <= MAX_FILE_BYTES and f"{file_hash(path):016x}" == listed


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
    if version not in (FORMAT_VERSION, WEIGHTED_VERSION, FEATURES_VERSION):
        raise UserError(
            f"{path}: format_version {version!r}; this program reads {FORMAT_VERSION} to {FEATURES_VERSION}"
        )
    try:
        manifest = Manifest.model_validate(value)
        if unknown := sorted(set(manifest.features) - set(_FEATURES)):
            names = ", ".join(storage.shown(repr(each)) for each in unknown)
            raise UserError(
                f"{path}: the dataset has {names}, which this version cannot read, and must not leave out; use the "
                "version that wrote it"
            )
        return manifest
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"{path} is damaged: {problems}; {REPAIR}") from None


def read_parts(folder: Path, manifest: Manifest) -> npt.NDArray[Any]:
    """Read `parts.bin`: records as `part_record` has them, shape (parts,).

    The file may have more records than the manifest, or the one of an earlier generation, counts: it is replaced before
    the manifest is, when a dataset grows.

    Raises:
        UserError: missing, or not the one that the manifest was written with.
    """
    path = folder / PARTS_FILE
    try:
        with storage.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            # No more than that: a sparse file can be of any size.
            data = file.read(min(max(0, manifest.parts) * manifest.part.itemsize, storage.MAX_JSON_BYTES))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {REPAIR}") from None
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
    found = finished_datasets(folder)
    if not found:
        raise UserError(
            f"{folder} has no dataset: a dataset is a folder with a {MANIFEST_FILE}, like DATA_DIR/SOURCE/train, which "
            "`pipeline preprocess` writes when it ends"
        )
    return found


def finished_datasets(folder: Path) -> list[Path]:
    """`datasets_below`, but there may be none."""
    for pattern in (MANIFEST_FILE, f"*/{MANIFEST_FILE}", f"*/*/{MANIFEST_FILE}"):
        if found := [path.parent for path in folder.glob(pattern)]:
            return sorted(found, key=lambda path: (path.parent, path.name != TRAIN, path.name))
    return []


def generations_of(plan: Any) -> list[tuple[str, int]]:
    """Hash of each generation of a plan, and the number of units up to its end, oldest first."""
    earlier = [(each["config_hash"], each["units"]) for each in plan.get("generations", [])]
    return [*earlier, (plan["config_hash"], len(plan["units"]))]


def are_written(folder: Path, splits: Iterable[str], config_hash: str | None = None) -> bool:
    """Tell whether the datasets of a source are there.

    Args:
        folder: of the source.
        splits: their names.
        config_hash: of a plan that has grown, which the manifests then have, too.
    """
    for name in splits:
        manifest = storage.find_json(folder / name / MANIFEST_FILE, "config_hash")
        if manifest is None or not (folder / name / PARTS_FILE).is_file():
            return False
        if config_hash is not None and manifest["config_hash"] != config_hash:
            return False
    return True
