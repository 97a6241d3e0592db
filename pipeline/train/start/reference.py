"""Log-probabilities that the reference of a training by preference gives to its pairs, in files.

They are in a folder per dataset and weights, not in the dataset, whose files and fingerprint stay. The documents are in
blocks of `BLOCK_DOCUMENTS`. A block has two files: `block-NNNNN.f64`, little-endian [n, 2] fp64 (the preferred
conversation of each document, then the other), and its receipt `block-NNNNN.json`. When all blocks are there,
`reference.json` is written, which has their hashes. A block whose receipt is missing or wrong is computed again; one
that is right stays as it is, and so does a right `reference.json`: a checkpoint may have its hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pipeline.common import links, storage
from pipeline.common.errors import MachineError, UserError
from pipeline.common.file_lock import exclusive
from pipeline.common.hashing import SEAL, has_broken_seal, put_sealed, value_hash
from pipeline.common.run_files import CHECKPOINT_STATE
from pipeline.config import Config
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.loading.pair_rows import Scores
from pipeline.train.checkpoint.fingerprint import Fingerprints, model_fingerprint, numerics_version
from pipeline.train.distributed.process_group import broadcast_from_rank0
from pipeline.train.start.weights_place import WeightsPlace, weights_identity

BLOCK_DOCUMENTS = 1024
"""Documents of a block."""
KEY = "train.init_from"
_DIR = "train.preference.reference_dir"
_FILE = "reference.json"
_TYPE = np.dtype("<f8")
_PAIR_BYTES = 2 * _TYPE.itemsize
_HOW = "`pipeline train RUN.yaml --reference` computes it from the weights of train.init_from"


@dataclass(frozen=True)
class ReferenceScores:
    """Complete log-probabilities of a dataset's pairs."""

    folder: Path
    hash: str
    """Hash of the log-probabilities."""
    scores: Scores

    @property
    def identity(self) -> dict[str, str]:
        """Folder and hash, which a checkpoint keeps."""
        return {"folder": self.folder.name, "hash": self.hash}


@dataclass(frozen=True)
class ReferenceFolder:
    """The folder of a dataset's log-probabilities by some weights, complete or not.

    Attributes:
        folder: its path.
        key: everything that decides the values.
        documents: of the dataset.
    """

    folder: Path
    key: Mapping[str, Any]
    documents: int

    @property
    def blocks(self) -> list[range]:
        """Documents of each block."""
        starts = range(0, self.documents, BLOCK_DOCUMENTS)
        return [range(start, min(start + BLOCK_DOCUMENTS, self.documents)) for start in starts]

    def is_complete(self) -> bool:
        """True if `reference.json` and all of its blocks are there as they were written."""
        hashes = [self._hash_of(number) for number in range(len(self.blocks))]
        return None not in hashes and _sealed(self.folder / _FILE) == self._whole(hashes)

    def missing(self) -> list[int]:
        """Numbers of the blocks that are not there as they were written."""
        return [number for number in range(len(self.blocks)) if self._hash_of(number) is None]

    def locked(self, seconds: float) -> AbstractContextManager[None]:
        """Let one start at a time compute what is missing, on all machines whose file system has locks.

        Args:
            seconds: to wait for another start.

        Raises:
            MachineError: another one computes for longer, or the folder cannot be written.
        """
        with self._writing():
            links.make_folder(self.folder.parent)
            links.make_folder(self.folder)
        return exclusive(self.folder / "computing.lock", seconds)

    def commit(self, number: int, scores: Scores) -> None:
        """Write a block and its receipt, unless it is there.

        Args:
            number: of the block.
            scores: [n, 2] of its documents.

        Raises:
            MachineError: they cannot be written.
        """
        if self._hash_of(number) is not None:
            return
        data, path = scores.astype(_TYPE).tobytes(), _block(self.folder, number)
        with self._writing():
            storage.put(path, data)
            receipt = {**self._receipt(number), "xxh3": xxhash.xxh3_64_hexdigest(data)}
            put_sealed(path.with_suffix(".json"), receipt)

    def finish(self) -> None:
        """Write `reference.json`, unless it is there.

        Raises:
            MachineError: it cannot be written, or a block is gone again.
        """
        hashes = [self._hash_of(number) for number in range(len(self.blocks))]
        if None in hashes:
            raise MachineError(
                f"{_block(self.folder, hashes.index(None))} was changed meanwhile; run the command again"
            )
        if _sealed(self.folder / _FILE) != self._whole(hashes):
            with self._writing():
                put_sealed(self.folder / _FILE, self._whole(hashes))

    def _writing(self) -> AbstractContextManager[None]:
        return storage.writing(f"{_DIR}: {self.folder}")

    def _whole(self, hashes: Sequence[str | None]) -> dict[str, Any]:
        return {**self.key, "documents": self.documents, "blocks": list(hashes)}

    def _receipt(self, number: int) -> dict[str, Any]:
        block = self.blocks[number]
        return {"key": value_hash(dict(self.key)), "first": block.start, "documents": len(block)}

    def _hash_of(self, number: int) -> str | None:
        """Hash of a block that has a right receipt, else None."""
        path = _block(self.folder, number)
        receipt = _sealed(path.with_suffix(".json"))
        data = _read(path, _PAIR_BYTES * len(self.blocks[number]))
        if receipt is None or data is None:
            return None
        found = xxhash.xxh3_64_hexdigest(data)
        return found if receipt == {**self._receipt(number), "xxh3": found} else None


def pinned_start(config: Config) -> Config:
    """A config whose `train.init_from` names the checkpoint of a run that is the newest one now; every rank calls this.

    The reference, and the model at its first step, are the same weights then, though the other run trains on.

    Raises:
        UserError: there are no such weights.
    """
    wanted = config.train.init_from
    assert wanted is not None

    def newest() -> int | None:
        place = WeightsPlace(wanted, KEY)
        if wanted.path is None or wanted.step is not None or place.kind() != "run":
            return None
        checkpoint = place.checkpoint()
        return None if checkpoint is None else checkpoint.step

    step = broadcast_from_rank0(newest)
    return config if step is None else with_init_step(config, step)


def with_init_step(config: Config, step: int) -> Config:
    """A config that starts from a checkpoint of the run in `train.init_from`.

    Args:
        config: the run file's.
        step: of the checkpoint.
    """
    assert config.train.init_from is not None
    start = config.train.init_from.model_copy(update={"step": step})
    return config.model_copy(update={"train": config.train.model_copy(update={"init_from": start})})


def reference_folders(config: Config, datasets: Mapping[str, Dataset]) -> dict[str, ReferenceFolder]:
    """The folder of each source's log-probabilities by the weights of `train.init_from`; every rank calls this.

    Args:
        config: see `pinned_start`.
        datasets: the training split of each source.

    Raises:
        UserError: there are no such weights, or they are damaged.
    """
    wanted = config.train.init_from
    assert wanted is not None
    chosen = wanted.model_dump(mode="json", exclude={"path", "hf", "step", "optimizer", "tokens"})
    of_weights = {
        "weights": weights_identity(wanted, KEY, config.model.vocab_multiple),
        "chosen": value_hash(chosen),
        "model": value_hash(model_fingerprint(config)),
        "compute": config.train.precision.compute,
        "code": numerics_version(config),
    }
    found = {}
    for name, dataset in datasets.items():
        place = reference_dir(config) / f"{dataset.fingerprint[:16]}-{value_hash(of_weights)[:16]}"
        found[name] = ReferenceFolder(place, {"dataset": dataset.fingerprint, **of_weights}, dataset.documents)
    return found


def reference_dir(config: Config) -> Path:
    """The folder of all log-probabilities of a run.

    Raises:
        UserError: none is named, and the datasets are in a bucket.
    """
    settings = config.train.preference
    assert settings is not None
    if settings.reference_dir is None and config.data_url is not None:
        raise UserError(f"{_DIR}: data.dir is in a bucket; set it to a folder that all nodes share")
    return settings.reference_dir or config.data_dir / "_reference"


def check_reference_dir(config: Config) -> None:
    """Check that log-probabilities can be written.

    Raises:
        UserError: they cannot; the message names the folder.
    """
    folder = reference_dir(config)
    place = folder if folder.is_dir() else folder.parent
    if not place.is_dir():
        if config.train.preference is not None and config.train.preference.reference_dir is None:
            return  # data.dir is made by preprocessing
        raise UserError(f"{_DIR}: {place} is not a folder; make it, or name another place")
    if (reason := storage.cannot_write(place)) is not None:
        raise UserError(f"{_DIR}: {place} cannot be written to ({reason}); name another folder")


def saved_references(
    config: Config, datasets: Mapping[str, Dataset], fingerprints: Fingerprints
) -> dict[str, ReferenceScores]:
    """The log-probabilities that a checkpoint was trained with.

    Args:
        config: of the run.
        datasets: the training split of each source.
        fingerprints: of the checkpoint.

    Raises:
        UserError: they are missing, incomplete, damaged, or of another dataset.
    """
    known, found = saved_folders(fingerprints), {}
    if not known:
        raise UserError(
            "train.preference: the checkpoint was trained without it; take it out, or start a new run in another "
            "run.dir"
        )
    for name, dataset in datasets.items():
        if name not in known:
            raise UserError(
                f"train.preference: source {name!r} was added after the run began, and the reference has not seen its "
                "pairs; take it out, or start a new run in another run.dir from a checkpoint of this one"
            )
        found[name] = open_reference(reference_dir(config) / known[name], dataset)
    return found


def saved_folders(fingerprints: Fingerprints) -> dict[str, str]:
    """Names of the folders of log-probabilities that a checkpoint was trained with, by source.

    Raises:
        UserError: the checkpoint says nonsense.
    """
    aspect = fingerprints.get("preference")
    saved = aspect.get("references") if isinstance(aspect, dict) else None
    where = Path(CHECKPOINT_STATE)
    if saved is None:
        return {}
    if not isinstance(saved, dict) or not all(isinstance(each, dict) for each in saved.values()):
        raise UserError(f"{where} of the checkpoint is damaged: fingerprints.preference.references")
    return {str(name): storage.plain_name(each.get("folder"), where) for name, each in saved.items()}


def open_reference(folder: Path, dataset: Dataset) -> ReferenceScores:
    """Complete log-probabilities of a dataset.

    Raises:
        UserError: they are missing, incomplete, damaged, or of another dataset; the message names the command.
    """
    what = f"train.preference: the reference of {dataset.folder} in {folder}"
    if not folder.is_dir():
        raise UserError(f"{what} is missing; {_HOW}, or set {_DIR} to the folder that has it")
    value = _sealed(folder / _FILE)
    if value is None:
        raise UserError(f"{what} is incomplete: {_FILE} is missing or damaged; {_HOW}")
    if value.get("dataset") != dataset.fingerprint or value.get("documents") != dataset.documents:
        raise UserError(
            f"{what} is of another dataset (fingerprint {storage.shown(str(value.get('dataset')))}, and this one "
            f"{dataset.fingerprint}); {_HOW}"
        )
    pieces, blocks = [np.zeros((0, 2))], ReferenceFolder(folder, {}, dataset.documents).blocks
    hashes = value.get("blocks")
    if not isinstance(hashes, list) or len(hashes) != len(blocks):
        raise UserError(f"{what} is damaged: {_FILE} does not name {len(blocks):,} blocks; {_HOW}")
    for number, (wanted, block) in enumerate(zip(hashes, blocks, strict=True)):
        path = _block(folder, number)
        if not path.exists():
            raise UserError(f"{what} is incomplete: {path.name} is missing; {_HOW}")
        data = _read(path, _PAIR_BYTES * len(block))
        if data is None or xxhash.xxh3_64_hexdigest(data) != wanted:
            raise UserError(f"{what} is damaged: {path.name} is not as it was written; {_HOW}")
        pieces.append(np.frombuffer(data, _TYPE).reshape(-1, 2))
    scores = np.concatenate(pieces)
    if not np.isfinite(scores).all():
        document = int(np.flatnonzero(~np.isfinite(scores).all(axis=1))[0])
        raise UserError(f"{what} is not finite for document {document}; remove {folder}, and {_HOW}")
    return ReferenceScores(folder, value_hash(hashes), scores)


def _block(folder: Path, number: int) -> Path:
    return folder / f"block-{number:05}.f64"


def _read(path: Path, size: int) -> bytes | None:
    """A file of a known size; None where it is missing or has another one."""
    try:
        data = storage.read_bytes(path, size)
    except (FileNotFoundError, NotADirectoryError, UserError):
        return None
    return data if len(data) == size else None


def _sealed(path: Path) -> dict[str, Any] | None:
    """A sealed JSON file without its seal; None where it is missing or damaged."""
    try:
        value = storage.read_object(path)
    except (FileNotFoundError, NotADirectoryError, ValueError, UserError):
        return None
    if SEAL not in value or has_broken_seal(value):
        return None
    return {key: each for key, each in value.items() if key != SEAL}
