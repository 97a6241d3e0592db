"""The tokenizer of a run, which is kept in the data folder."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.stored import find_object
from pipeline.common.objects.urls import parse_url
from pipeline.common.paths import cache_folder
from pipeline.config.parsing.code_keys import REMOTE_KEYS, refuse_code_of_others
from pipeline.config.root import Config
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.open import dataset_place, open_dataset
from pipeline.data.tokenization.definition import MAX_FILE_BYTES
from pipeline.data.tokenization.tokenizer import SPECIAL_FILE, TOKENIZER_FILE, Tokenizer

ORIGIN_FILE = "origin.json"


def tokenizer_folder(config: Config) -> Path:
    """Folder of the tokenizer of a run."""
    return config.data_dir / "tokenizer"


def run_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of a run that has been preprocessed.

    Raises:
        UserError: it has not.
    """
    if config.data_url is not None:
        return Tokenizer.open(open_dataset(config, dataset_place(config, config.data.sources[0], TRAIN)).folder)
    folder = tokenizer_folder(config)
    if not (folder / ORIGIN_FILE).is_file():
        raise UserError(f"{folder} has no tokenizer yet; run `pipeline preprocess` first")
    return open_kept(folder)


def has_run_tokenizer(config: Config) -> bool:
    """True if there is a tokenizer of the run. Datasets in a bucket have theirs."""
    return config.data_url is not None or (tokenizer_folder(config) / ORIGIN_FILE).is_file()


def tokenizer_path(config: Config) -> Path | None:
    """The file or folder of `tokenizer.path`, which need not exist; of an object, a copy in the user's cache folder.

    Raises:
        UserError: the object cannot be read, or others may have written its URL.
    """
    path = config.tokenizer.path
    if not isinstance(path, str):
        return path
    refuse_code_of_others(config, *REMOTE_KEYS)
    return _copied(path, config.data.remote.access)


@lru_cache(maxsize=2)
def _copied(url: str, remote: RemoteAccess) -> Path:
    found = find_object(parse_url(url), remote)
    if found.size > MAX_FILE_BYTES:
        most = f"a tokenizer.json has at most {MAX_FILE_BYTES:,}"
        raise UserError(f"tokenizer.path: {url} has {found.size:,} bytes; {most}")
    copy = cache_folder() / "objects" / value_hash([url, found.version, found.size]) / TOKENIZER_FILE
    if not storage.have_sizes({copy: found.size}):
        data = found.read(0, found.size)
        copy.parent.mkdir(parents=True, exist_ok=True)
        storage.put(copy, data)
    return copy


def named_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of `tokenizer.path`.

    Raises:
        UserError: as `Tokenizer.load`.
    """
    path = tokenizer_path(config)
    assert path is not None
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        return Tokenizer.load(path, config.tokenizer)  # says so
    return _load(path, config.tokenizer.model_dump_json(), _state(file))


# Checks and the stage ask for the same files, and a large vocabulary takes a second.
@lru_cache(maxsize=2)
def _load(path: Path, settings: str, state: tuple[int, ...]) -> Tokenizer:
    return Tokenizer.load(path, TokenizerConfig.model_validate_json(settings))


@lru_cache(maxsize=2)
def _open(folder: Path, state: tuple[int, ...]) -> Tokenizer:
    return Tokenizer.open(folder)


def _state(*files: Path) -> tuple[int, ...]:
    """Inode, size and time of change of files, which tell whether they were written again."""
    found = [file.stat() for file in files if file.is_file()]
    return tuple(number for each in found for number in (each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns))


def check_tokenizer_settings(config: Config) -> None:
    """Compare the kept tokenizer with what the run file asks for by now. Looks at no documents.

    Raises:
        UserError: another file, or other settings of the training.
    """
    # Of datasets in a bucket the tokenizer is what they were made with.
    saved = saved_origin(tokenizer_folder(config)) if config.data_url is None else None
    if saved is None:
        return
    path = config.tokenizer.path
    if path is None:
        asked = run_file_settings(config)
        known = {"train": {name: saved["train"].get(name) for name in asked}} if "train" in saved else saved
        if known.get("train") != asked:
            raise OtherTokenizer(config, what_differs(config, known, asked))
    elif str(path) != saved.get("path") or (isinstance(path, Path) and path.exists()):
        # The file it was loaded from need not be there any more, and an object need not be reached.
        check_same(config, named_tokenizer(config), saved)


def saved_origin(folder: Path) -> Any:
    """Origin of the saved tokenizer; None if there is none."""
    if not (folder / ORIGIN_FILE).is_file():
        return None
    try:
        return storage.get_json(folder / ORIGIN_FILE, "fingerprint")
    except UserError as error:
        raise UserError(f"{error}; restore it, or remove {folder} to make the tokenizer again") from None


def open_kept(folder: Path) -> Tokenizer:
    """The kept tokenizer."""
    try:
        tokenizer = _open(folder, _state(folder / TOKENIZER_FILE, folder / SPECIAL_FILE))
    except UserError as error:
        problem = str(error)
    else:
        if tokenizer.fingerprint == storage.get_json(folder / ORIGIN_FILE, "fingerprint")["fingerprint"]:
            return tokenizer
        problem = f"{folder / TOKENIZER_FILE} is damaged: its ids differ from those that were written"
    raise UserError(
        f"{problem}; remove {folder}, then run `pipeline preprocess RUN.yaml`: from the same files it makes the same "
        "tokenizer again"
    )


def check_same(config: Config, tokenizer: Tokenizer, saved: dict[str, Any]) -> None:
    if saved["fingerprint"] == tokenizer.fingerprint:
        return
    path, kept = config.tokenizer.path, open_kept(tokenizer_folder(config))
    values = {
        "path": (saved.get("path", str(path)), str(path)),
        "end_of_document": (kept.end_of_document_token, tokenizer.end_of_document_token),
        "allow_special": (kept.allow_special, tokenizer.allow_special),
        "special_tokens and add_tokens": (list(kept.special_tokens), list(tokenizer.special_tokens)),
    }
    changed = [f"tokenizer.{key}: {old} then, {new} now" for key, (old, new) in values.items() if old != new]
    difference = f"tokenizer.path: {path} has other ids than the tokenizer kept there"
    raise OtherTokenizer(config, "; ".join(changed) or difference)


def run_file_settings(config: Config) -> dict[str, Any]:
    """Settings of the run file for the training of the tokenizer."""
    assert config.tokenizer.train is not None
    return {
        "tokenizer.train": config.tokenizer.train.model_dump(),
        "tokenizer.end_of_document": config.tokenizer.end_of_document,
        "tokenizer.special_tokens": list(config.tokenizer.special_tokens),
        "tokenizer.allow_special": list(config.tokenizer.allow_special),
        "data.preprocess.seed": config.data.preprocess.seed,
        "data.splits": {name: str(split) for name, split in config.data.splits.items()},
        "data.split_by": config.data.split_by,
    }


def what_differs(config: Config, saved: dict[str, Any], settings: dict[str, Any]) -> str:
    """Difference of the training of the kept tokenizer from the one that the run file asks for."""
    if "train" not in saved:
        return f"it was loaded from {saved['path']}, tokenizer.train trains one"
    names = [name for name, value in settings.items() if saved["train"].get(name) != value]
    difference = f"{' and '.join(names)} changed since it was trained"
    if "the files of data.sources" in names and not keeps_from_growing(config):
        difference += " (files that were added to a source can be appended: `pipeline preprocess RUN.yaml --grow`)"
    return difference


def keeps_from_growing(config: Config, *, held_out: bool = False) -> tuple[str, str] | None:
    """Key with which files cannot be appended to a source, and the reason; None if they can.

    Args:
        config: the run.
        held_out: the source is never trained on, and so not curated.
    """
    if config.data.curate is not None and config.data.curate.mode == "apply" and not held_out:
        return "data.curate.mode: apply", "its decisions compare all documents of a source"
    if config.data.preprocess.shuffle == "global":
        return "data.preprocess.shuffle: global", "it permutes all documents of a source"
    return None


class OtherTokenizer(UserError):
    """The kept tokenizer is not the one that the run file asks for.

    Args:
        config: the run.
        difference: what tells them apart.
    """

    def __init__(self, config: Config, difference: str) -> None:
        folder, key = tokenizer_folder(config), "train" if config.tokenizer.path is None else "path"
        asked = "" if config.tokenizer.path is None else f" {config.tokenizer.path}"
        # One that the run file names may be of other runs, too.
        start_over = "" if config.data.dir is not None else f"remove {config.data_dir} to start over; or "
        super().__init__(
            f"the tokenizer in {folder} is not the one that the run file asks for: {difference}. Restore that; or keep "
            f"the tokenizer: write tokenizer.path: {folder / TOKENIZER_FILE} in place of tokenizer.{key}{asked}; or "
            f"{start_over}set data.dir to another folder"
        )
        self.difference = difference
