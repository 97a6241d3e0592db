"""Domains of documents, by an address in their metadata; and what is stored of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.data.curate.batch import ChunkOutput, Measurer, TextBatch
from pipeline.data.curate.report.statistics import Groups

DOMAINS = "domains"
"""Name of the file of a chunk that has them, one behind the other; the column `domain` has their bytes."""
DOMAIN_COLUMNS = [("domain", "u1")]
_LONGEST = 253
_PLAIN = re.compile(r"https?://[A-Za-z0-9._-]+(?=[/?#]|\Z)")
"""Beginning of a usual address; what follows does not change its host."""


def domain_of(address: object) -> str:
    """Host of an address, in lower case and without `www.`; empty if there is none."""
    if not isinstance(address, str):
        return ""
    plain = _PLAIN.match(address)
    return _host(address) if plain is None else _plain_host(plain[0])


def _host(address: str) -> str:
    try:
        host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
    except ValueError:
        return ""
    host = host.rstrip(".").removeprefix("www.")
    return host if len(host.encode("utf-8", "replace")) <= _LONGEST and host.isprintable() and " " not in host else ""


_plain_host = lru_cache(maxsize=2**14)(_host)
"""Many addresses have few hosts, and taking one apart costs more than all else that is done with it."""


class DomainMeasurer(Measurer):
    """Domains, for counts in the report.

    Args:
        key: of `metadata` that has the address.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    @property
    def columns(self) -> list[tuple[str, str]]:
        return DOMAIN_COLUMNS

    def measure(self, batch: TextBatch, table: npt.NDArray[Any], output: ChunkOutput) -> None:
        hosts = [self._host(metadata) for metadata in batch.metadata]
        table["domain"] = [len(host) for host in hosts]
        output.append(DOMAINS, np.frombuffer(b"".join(hosts), np.uint8))

    def _host(self, metadata: bytes | None) -> bytes:
        found = orjson.loads(metadata) if metadata else {}
        return domain_of(found.get(self._key)).encode("utf-8", "replace")


def domain_groups(table: npt.NDArray[Any], hosts: bytes) -> Groups:
    """Domains of the records of a chunk.

    Args:
        table: of measures.
        hosts: bytes of the file `DOMAINS`.
    """
    numbers: dict[bytes, int] = {}
    codes = np.full(len(table), -1, np.int64)
    end = 0
    for row in np.flatnonzero(table["domain"]).tolist():
        start, end = end, end + int(table["domain"][row])
        codes[row] = numbers.setdefault(hosts[start:end], len(numbers))
    return Groups(codes, [name.decode("utf-8", "replace") for name in numbers])


def address_key(metadata: Sequence[str], url: str | None) -> str | None:
    """Key of the address, if documents have one.

    Args:
        metadata: kept keys of the source.
        url: `data.curate.duplicates.url`.
    """
    return next((key for key in (url, "url") if key is not None and key in metadata), None)
