"""Lists of addresses whose documents are removed: folders of categories, as UT1 has them, and plain files.

Source of the layout: the blacklists of the university of Toulouse (UT1): a folder per category, with the files
`domains` and `urls`.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash, value_hash
from pipeline.config.curation.curate import UrlListsConfig
from pipeline.data.curate.batch import ChunkOutput, Measurer, TextBatch
from pipeline.data.curate.duplicates.urls import URL_VERSION, normalize_url
from pipeline.data.curate.rules.base import DocumentRule

KEY = "data.curate.url_lists"
PREFIX = "url_lists."
"""Begins the names of the rules."""
URL_LIST_COLUMNS = [("url_list", "<u2")]
"""Number of the first list that has the address, from 1 in the order of their names; 0 for none."""
_VERSION = 1
_FILES = ("domains", "urls")
_NONE = 2**16 - 1


class _List(NamedTuple):
    """A list by its name, and its files."""

    name: str
    files: tuple[Path, ...]


def url_list_settings(config: UrlListsConfig) -> dict[str, Any]:
    """All that decides which documents are in which list, as JSON: hashes of the files by list.

    Raises:
        UserError: a list is missing, or a category is not in the lists.
    """
    found = {each.name: value_hash([f"{file_hash(path):016x}" for path in each.files]) for each in _lists(config)}
    return {"key": config.key, "lists": found, "version": [_VERSION, URL_VERSION]}


def _lists(config: UrlListsConfig) -> list[_List]:
    """The lists in the order of their names; those of one name are one list."""
    files: dict[str, list[Path]] = {}
    known: set[str] = set()
    for path in map(Path, config.lists):
        if not path.is_dir():
            if not path.is_file():
                raise UserError(f"{KEY}.lists: {path} does not exist; name a folder of categories, or a file")
            files.setdefault(path.name.removesuffix(".gz").removesuffix(".txt"), []).append(path)
            continue
        categories = dict(_categories(path))
        if not categories:
            raise UserError(f"{KEY}.lists: no folder in {path} has a file {' or '.join(_FILES)}")
        known |= categories.keys()
        for name in categories.keys() & set(config.categories or categories):
            files.setdefault(name, []).extend(categories[name])
    if missing := sorted(set(config.categories) - known):
        there = ", ".join(sorted(known)) or "none: only folders have categories"
        raise UserError(f"{KEY}.categories: {missing[0]!r} is not a category of the lists; they have {there}")
    return [_List(name, tuple(files[name])) for name in sorted(files)]


def _categories(folder: Path) -> Iterator[tuple[str, list[Path]]]:
    """Categories in a folder, or the folder itself as one, with their files."""
    for each in (folder, *sorted(folder.iterdir())):
        paths = [each / f"{name}{suffix}" for name in _FILES for suffix in ("", ".gz")]
        if found := [path for path in paths if path.is_file()]:
            yield each.name, found


def url_list_rules(settings: Mapping[str, Any] | None) -> tuple[DocumentRule, ...]:
    """A rule for each list.

    Args:
        settings: of `url_list_settings`; None for a source whose addresses are not looked at.
    """
    names = sorted(settings["lists"]) if settings else []
    return tuple(
        UrlListRule(PREFIX + name, KEY, 0, "max", f"address in the list {name}", number)
        for number, name in enumerate(names, 1)
    )


@dataclass(frozen=True)
class UrlListRule(DocumentRule):
    """The rule that removes documents by a list.

    Attributes:
        number: of the list.
    """

    number: int = 0

    def values(self, table: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """1 for documents in the list."""
        inside: npt.NDArray[np.float64] = (table["url_list"] == self.number).astype(np.float64)
        return inside


class UrlLists:
    """Lists in memory: 10 bytes per entry. Entries are compared by 64-bit hashes.

    Args:
        config: names them.
        expected: settings of the plan.

    Raises:
        UserError: a file has changed since then, or has no entry.
    """

    def __init__(self, config: UrlListsConfig, expected: Mapping[str, Any]) -> None:
        if url_list_settings(config) != expected:
            raise UserError(f"{KEY}: a list has changed since the curation was planned; run `pipeline curate` again")
        hashes, numbers = [], []
        for number, each in enumerate(_lists(config), 1):
            found = np.concatenate([_entries(path) for path in each.files])
            if not len(found):
                files = ", ".join(map(str, each.files))
                raise UserError(f"{KEY}.lists: {files}: there is no entry, a domain or an address per line")
            hashes.append(found)
            numbers.append(np.full(len(found), number, np.uint16))
        order = np.argsort(np.concatenate(hashes), kind="stable")  # equal ones by number
        self._hashes = np.concatenate(hashes)[order]
        self._numbers = np.concatenate(numbers)[order]

    def find(self, addresses: Sequence[object]) -> npt.NDArray[np.uint16]:
        """Number of the first list that has each address; 0 for none, and for values that are not addresses."""
        candidates: list[int] = []
        counts = []
        for address in addresses:
            found = _candidates(normalize_url(address)) if isinstance(address, str) else []
            candidates += found
            counts.append(len(found))
        wanted = np.array(candidates, np.uint64)
        places = np.searchsorted(self._hashes, wanted)
        places[places == len(self._hashes)] = 0
        hits = np.flatnonzero(self._hashes[places] == wanted)
        numbers = np.full(len(addresses), _NONE, np.uint16)
        np.minimum.at(numbers, np.repeat(np.arange(len(addresses)), counts)[hits], self._numbers[places[hits]])
        numbers[numbers == _NONE] = 0
        return numbers


def _entries(path: Path) -> npt.NDArray[np.uint64]:
    """Hashes of the entries of a file: a domain or the beginning of an address per line; `#` begins a comment.

    Raises:
        UserError: it is damaged.
    """
    found = []
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as lines:
            for line in lines:
                entry = _entry_of(line)
                if b"/" in entry or b":" in entry or b"@" in entry:
                    text = normalize_url(entry.decode("utf-8", "surrogateescape")).lower()
                    entry = text.encode("utf-8", "surrogateescape")
                else:
                    entry = entry.strip(b".").removeprefix(b"www.")
                if entry:
                    found.append(xxhash.xxh3_64_intdigest(entry))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{KEY}.lists: {path} is damaged ({error}); fetch it again") from None
    return np.array(found, np.uint64)


def _entry_of(line: bytes) -> bytes:
    """The domain or address of a line, also of a hosts file (`0.0.0.0 bad.org`) or a blocker's list (`||bad.org^`)."""
    words = line.removeprefix(b"\xef\xbb\xbf").partition(b"#")[0].lower().split()
    if not words or words[0].startswith(b"!"):
        return b""
    entry = words[-1] if words[0] in (b"0.0.0.0", b"127.0.0.1", b"::", b"::1") else b" ".join(words)
    return entry.removeprefix(b"||").removesuffix(b"^").removeprefix(b"*.")


def _candidates(address: str) -> list[int]:
    """Hashes of entries that remove a normalized address: its domain and those above, and its path up to each slash."""
    if not address:
        return []
    address = address.lower()
    page, _, query = address.partition("?")
    parts = page.split("/")
    names = ["/".join(parts[: place + 1]) for place in range(1, len(parts))]
    return [*_domains(parts[0]), *map(_hash, [*names, address] if query else names)]


@lru_cache(maxsize=2**14)  # many addresses have few hosts
def _domains(host: str) -> tuple[int, ...]:
    """Hashes of a host and of the domains above it."""
    labels = host.partition(":")[0].split(".")
    names = [".".join(labels[place:]) for place in range(len(labels))]
    return tuple(map(_hash, [host, *names] if ":" in host else names))


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


class UrlListMeasurer(Measurer):
    """List that has the address of a document.

    Args:
        lists: in memory.
        key: of the address in `metadata`.
    """

    def __init__(self, lists: UrlLists, key: str) -> None:
        self._lists = lists
        self._key = key

    @property
    def columns(self) -> list[tuple[str, str]]:
        return URL_LIST_COLUMNS

    def measure(self, batch: TextBatch, table: npt.NDArray[Any], output: ChunkOutput) -> None:
        found = [orjson.loads(each) if each else {} for each in batch.metadata]
        table["url_list"] = self._lists.find([each.get(self._key) for each in found])
