"""Log-probabilities that the reference of a training by preference gives to its pairs, in files.

They are in a folder per dataset and weights, not in the dataset, whose files and fingerprint stay. The documents are in
blocks of `BLOCK_DOCUMENTS`. A block has two files: `block-NNNNN.f64`, little-endian [n, 2] fp64 (the preferred
conversation of each document, then the other), and its receipt `block-NNNNN.json`. When all blocks are there,
`reference.json` is written, which has their hashes. A block whose receipt is missing or wrong is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import SEAL, has_broken_seal, put_sealed, value_hash
from pipeline.config import Config
from pipeline.config.weights import PreferenceConfig
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.loading.pair_rows import Scores
from pipeline.train.checkpoint.fingerprint import model_fingerprint, numerics_version
from pipeline.train.start.weights_place import weights_identity

BLOCK_DOCUMENTS = 1024
"""Documents of a block: what a stop loses at most."""
_FILE = "reference.json"
_TYPE = np.dtype("<f8")
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
        """What a checkpoint keeps of it."""
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

    def missing(self) -> list[int]:
        """Numbers of the blocks that are not there as they were written."""
        return [number for number in range(len(self.blocks)) if self._hash_of(number) is None]

    def commit(self, number: int, scores: Scores) -> None:
        """Write a block and its receipt.

        Args:
            number: of the block.
            scores: [n, 2] of its documents.
        """
        data, path = scores.astype(_TYPE).tobytes(), _block(self.folder, number)
        links.make_folder(self.folder.parent)
        links.make_folder(self.folder)
        storage.put(path, data)
        receipt = {**self._receipt(number), "xxh3": xxhash.xxh3_64_hexdigest(data)}
        put_sealed(path.with_suffix(".json"), receipt)

    def finish(self) -> None:
        """Write `reference.json`, where it is not there yet; all blocks are."""
        hashes = [self._hash_of(number) for number in range(len(self.blocks))]
        assert None not in hashes
        value = {**self.key, "documents": self.documents, "blocks": hashes}
        if _sealed(self.folder / _FILE) != value:
            put_sealed(self.folder / _FILE, value)

    def _receipt(self, number: int) -> dict[str, Any]:
        block = self.blocks[number]
        return {"key": value_hash(dict(self.key)), "first": block.start, "documents": len(block)}

    def _hash_of(self, number: int) -> str | None:
        """Hash of a block that has a right receipt, else None."""
        path = _block(self.folder, number)
        receipt = _sealed(path.with_suffix(".json"))
        if receipt is None or {**receipt, "xxh3": None} != {**self._receipt(number), "xxh3": None}:
            return None
        try:
            data = storage.read_bytes(path)
        except FileNotFoundError:
            return None
        found = xxhash.xxh3_64_hexdigest(data)
        return found if found == receipt["xxh3"] else None


def reference_folders(config: Config, datasets: Mapping[str, Dataset]) -> dict[str, ReferenceFolder]:
    """The folder of each source's log-probabilities by the weights of `train.init_from`; every rank calls this.

    Raises:
        UserError: there are no such weights, or they are damaged.
    """
    wanted, settings = config.train.init_from, config.train.preference
    assert wanted is not None and settings is not None
    chosen = wanted.model_dump(mode="json", exclude={"path", "hf", "step", "optimizer", "tokens"})
    of_weights = {
        "weights": weights_identity(wanted, "train.init_from", config.model.vocab_multiple),
        "chosen": value_hash(chosen),
        "model": value_hash(model_fingerprint(config)),
        "compute": config.train.precision.compute,
        "code": numerics_version(config),
    }
    found = {}
    for name, dataset in datasets.items():
        key = {"dataset": dataset.fingerprint, **of_weights}
        place = reference_dir(config, settings) / f"{dataset.fingerprint[:16]}-{value_hash(of_weights)[:16]}"
        found[name] = ReferenceFolder(place, key, dataset.documents)
    return found


def reference_dir(config: Config, settings: PreferenceConfig) -> Path:
    """The folder of all log-probabilities of a run.

    Raises:
        UserError: none is named, and the datasets are in a bucket.
    """
    if settings.reference_dir is None and config.data_url is not None:
        raise UserError(
            "train.preference.reference_dir: data.dir is in a bucket; set it to a folder that all nodes share"
        )
    return settings.reference_dir or config.data_dir / "reference"


def saved_references(
    config: Config, datasets: Mapping[str, Dataset], saved: Mapping[str, Any] | None
) -> dict[str, ReferenceScores]:
    """The log-probabilities that a checkpoint was trained with.

    Args:
        config: of the run.
        datasets: the training split of each source.
        saved: what the checkpoint has of them, by source.

    Raises:
        UserError: they are missing, incomplete, damaged, or of another dataset.
    """
    settings, found = config.train.preference, {}
    assert settings is not None
    for name, dataset in datasets.items():
        known = (saved or {}).get(name)
        if known is None:
            raise UserError(
                f"train.preference: the checkpoint was trained without it, or without the source {name!r}; take it "
                "out, or start a new run in another run.dir"
            )
        folder = reference_dir(config, settings) / storage.plain_name(known["folder"], config.run.dir)
        found[name] = open_reference(folder, dataset)
    return found


def open_reference(folder: Path, dataset: Dataset) -> ReferenceScores:
    """Complete log-probabilities of a dataset.

    Raises:
        UserError: they are missing, incomplete, damaged, or of another dataset; the message names the command.
    """
    what = f"train.preference: the reference of {dataset.folder} in {folder}"
    if not folder.is_dir():
        raise UserError(f"{what} is missing; {_HOW}, or set train.preference.reference_dir to the folder that has it")
    value = _sealed(folder / _FILE)
    if value is None:
        raise UserError(f"{what} is incomplete: {_FILE} is missing or damaged; {_HOW}")
    if value.get("dataset") != dataset.fingerprint or value.get("documents") != dataset.documents:
        raise UserError(
            f"{what} is of another dataset (fingerprint {storage.shown(str(value.get('dataset')))}, and this one "
            f"{dataset.fingerprint}); {_HOW}"
        )
    pieces = []
    for number, wanted in enumerate(value["blocks"]):
        path = _block(folder, number)
        try:
            data = storage.read_bytes(path)
        except FileNotFoundError:
            raise UserError(f"{what} is incomplete: {path.name} is missing; {_HOW}") from None
        if xxhash.xxh3_64_hexdigest(data) != wanted:
            raise UserError(f"{what} is damaged: {path.name} is not as it was written; {_HOW}")
        pieces.append(np.frombuffer(data, _TYPE).reshape(-1, 2))
    scores = np.concatenate([np.zeros((0, 2)), *pieces])
    if len(scores) != dataset.documents:
        raise UserError(f"{what} is damaged: {len(scores):,} of {dataset.documents:,} documents; {_HOW}")
    return ReferenceScores(folder, value_hash(value["blocks"]), scores)


def _block(folder: Path, number: int) -> Path:
    return folder / f"block-{number:05}.f64"


def _sealed(path: Path) -> dict[str, Any] | None:
    """A sealed JSON file without its seal; None where it is missing or damaged."""
    try:
        value = storage.read_object(path)
    except (FileNotFoundError, ValueError):
        return None
    if SEAL not in value or has_broken_seal(value):
        return None
    return {key: each for key, each in value.items() if key != SEAL}
