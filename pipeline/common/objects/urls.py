"""URLs of objects: how they are written, and what of them may be shown."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

from pipeline.common.errors import UserError
from pipeline.common.redaction import masked

Scheme = Literal["s3", "gs", "az", "hf", "https", "http"]
STORES: dict[str, str] = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}
"""Stores with buckets, by scheme: their objects can be listed."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_HUB = re.compile(r"(datasets/[^/@]+(?:/[^/@]+)?@[^/@]+)/(.+)", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class ObjectUrl:
    """An object, or a glob of objects.

    Attributes:
        scheme: of the URL.
        place: bucket; of Azure the container; of HTTP the host with its port; of the hub `datasets/NAME@REVISION`.
        key: of the object in the bucket, as it is; of HTTP the path, decoded.
    """

    scheme: Scheme
    place: str
    key: str

    @property
    def is_listable(self) -> bool:
        """True if the store can list its objects."""
        return self.scheme in STORES

    @property
    def is_pinned(self) -> bool:
        """True of files of the hub, which belong to a commit and never change."""
        return self.scheme == "hf"

    def with_key(self, key: str) -> ObjectUrl:
        """Another object in the same place."""
        return ObjectUrl(self.scheme, self.place, key)

    def below(self, name: str) -> ObjectUrl:
        """An object below this one as a folder."""
        return self.with_key(f"{self.key}/{name}")

    def __str__(self) -> str:
        is_literal = self.is_listable or self.is_pinned
        key = self.key if is_literal else quote(self.key, safe="/:@!$&'()*+,;=~[]")
        return f"{self.scheme}://{self.place}/{key}"


def is_url(text: str) -> bool:
    """Tell whether a text is a URL, of a known scheme or not."""
    return _URL.match(text) is not None


def url_of_path(path: Path) -> str | None:
    """The URL of a folder in a bucket that was taken for a path, whose slashes are one then; None of a path."""
    scheme, _, rest = str(path).partition(":/")
    return f"{scheme}://{rest.strip('/')}" if scheme in STORES and rest and not path.exists() else None


def parse_url(text: str) -> ObjectUrl:
    """A URL in its parts.

    The key of `s3://`, `gs://` and `az://` is taken literally, as the commands of these stores do: `%20` in it is three
    characters. The path of an `https://` URL is decoded.

    Raises:
        UserError: it does not name an object, or has a secret in it. The message does not have the secret.
    """
    shown, found = masked(text), _URL.match(text)
    scheme = found[1].lower() if found else ""
    if found is None or scheme not in (*STORES, "hf", "https", "http"):
        raise UserError(f"{shown} is not a URL of an object: it must begin with s3://, gs://, az://, hf:// or https://")
    if scheme == "hf":
        return _parse_hub(text[found.end() :], shown)
    place, _, key = text[found.end() :].partition("/")
    if _CONTROL.search(text):
        raise UserError(f"{shown!a} has control characters")
    if "@" in place or (scheme not in STORES and ("?" in text or "#" in text)):
        raise UserError(
            f"{shown}: a URL must not have a user, a password, a query or a fragment. A presigned URL is a secret, and "
            "run files and plans are kept and shown: name the object itself, and give credentials in the environment"
        )
    if not place:
        raise UserError(f"{shown} names no {'bucket' if scheme in STORES else 'host'}")
    if not key:
        raise UserError(f"{shown} names no object: write its key behind the {'bucket' if scheme in STORES else 'host'}")
    if scheme not in STORES:
        if scheme == "http" and not _is_loopback(place):
            raise UserError(f"{shown}: http:// sends everything in the clear; use https://")
        key = unquote(key)
    _check_folders(key, shown)
    return ObjectUrl(scheme, place, key)  # type: ignore[arg-type]  # one of the schemes


def parse_folder(text: str) -> ObjectUrl:
    """The URL of a folder in a bucket, with or without a slash at its end.

    Raises:
        UserError: as `parse_url`; or it is none that can be listed.
    """
    url = parse_url(text.rstrip("/"))
    if not url.is_listable:
        raise UserError(f"{masked(text)} is not a folder in a bucket: it must begin with s3://, gs:// or az://")
    return url


def _parse_hub(text: str, shown: str) -> ObjectUrl:
    found = _HUB.fullmatch(text)
    if found is None or _CONTROL.search(text):
        raise UserError(
            f"{shown} is not the URL of a file of a dataset: write hf://datasets/NAME@REVISION/PATH, with a branch, a "
            "tag or a commit as the revision (a slash in it is %2F)"
        )
    _check_folders(found[2], shown)
    return ObjectUrl("hf", found[1], found[2])


def _check_folders(key: str, shown: str) -> None:
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise UserError(f"{shown}: empty folder names, '.' and '..' cannot be part of a key")


def dataset_of(url: ObjectUrl) -> tuple[str, str]:
    """Name and revision of the dataset of the hub that a file belongs to."""
    name, _, revision = url.place.removeprefix("datasets/").partition("@")
    return name, revision.replace("%2F", "/")


def check_endpoint(text: str) -> str:
    """The URL of a server that speaks the protocol of S3; a user, password, path or query in it is an error.

    Raises:
        UserError: it is none, or sends credentials in the clear.
    """
    parts, shown = urlsplit(text), masked(text)
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.path not in ("", "/"):
        raise UserError(f"{shown} is not the URL of a server, like https://objects.example.org")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise UserError(f"{shown}: the URL of a server must not have a user, a password, a query or a fragment")
    return text.rstrip("/")


def _is_loopback(place: str) -> bool:
    host = urlsplit(f"//{place}").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
