"""Objects as they were listed: bytes of exactly this version, or an error that names the object."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.failures import COPY_FIRST, RESTORE, ObjectChanged, StoreError, kind_of
from pipeline.common.objects.response import PartialResponse
from pipeline.common.objects.retries import retrying
from pipeline.common.objects.stores import forget_store, load_obstore, open_store
from pipeline.common.objects.urls import ObjectUrl, parse_url


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A version of an object.

    Attributes:
        url: of the object.
        size: in bytes.
        version: its ETag, which tells versions apart and says nothing of the content; of the hub, a hash.
        access: settings.
    """

    url: ObjectUrl
    size: int
    version: str
    access: RemoteAccess

    @classmethod
    def of(cls, url: str, size: int, version: str, access: RemoteAccess) -> StoredObject:
        """An object that was listed before, by what a plan has of it."""
        return cls(parse_url(url), size, version, access)

    def read(self, start: int, end: int, abandoned: threading.Event | None = None) -> bytes:
        """Bytes [start, end), which lie in the object.

        Args:
            start: first byte.
            end: behind the last byte.
            abandoned: set when nobody waits for them any more.

        Raises:
            ObjectChanged: it has another version by now.
            UserError: it cannot be read; the message says what can be done.
            Abandoned: nobody waits any more.
        """
        if start >= end:
            return b""
        response = _Response(self, start, end)
        return retrying(
            response.more,
            self.url,
            "read",
            self.access,
            renew=partial(forget_store, self.url, self.access),
            progress=lambda: response.at,
            abandoned=abandoned,
        )

    def check(self) -> None:
        """Look whether it can be read, and has this version.

        Raises:
            UserError: as `read`.
        """
        if self.size:
            self.read(0, 1)
        elif not self.url.is_pinned:
            self._check(find_object(self.url, self.access))

    def _check(self, now: StoredObject) -> None:
        if now.version != self.version or now.size != self.size:
            raise changed(self, now.size, now.version)


def changed(listed: StoredObject, size: int, version: str) -> ObjectChanged:
    """Error about an object that has another version than when it was listed."""
    return ObjectChanged(
        f"{listed.url} changed: it had {listed.size:,} bytes and the ETag {listed.version} when it was listed, and has "
        f"{size:,} bytes and the ETag {version} now; {RESTORE}"
    )


class _Response(PartialResponse):
    """A range of exactly this version of an object."""

    def __init__(self, listed: StoredObject, start: int, end: int) -> None:
        super().__init__(start)
        self._listed, self._end = listed, end

    def more(self) -> bytes:
        """Ask for what is missing; returns all of the range."""
        listed = self._listed
        store = open_store(listed.url, listed.access)
        options: dict[str, Any] = {"range": (self.at, self._end)}
        if not listed.url.is_pinned:
            options["if_match"] = listed.version
        try:
            found = load_obstore().get(store, listed.url.key, options=options)
        except Exception as error:
            if kind_of(error)[0] in ("changed", "no range") and not listed.url.is_pinned:
                # Which of them it is now says whether it changed: a shorter one has no such range.
                listed._check(find_object(listed.url, listed.access))
            raise
        version = listed.version if listed.url.is_pinned else version_in(listed.url, found.meta)
        listed._check(StoredObject(listed.url, found.meta["size"], version, listed.access))
        return self.take(found, self._end)


def find_object(url: ObjectUrl, access: RemoteAccess) -> StoredObject:
    """The present version of an object, of which one byte is read.

    Raises:
        ObjectMissing: there is none.
        StoreError: it cannot be read, or the server cannot give parts of it or tell its versions apart.
    """

    def request() -> StoredObject:
        obstore: Any = load_obstore()
        store = open_store(url, access)
        try:
            # Not a HEAD, whose failures come without a reason.
            meta = obstore.get(store, url.key, options={"range": (0, 1)}).meta
        except Exception as error:
            if kind_of(error)[0] != "no range":
                raise
            meta = obstore.head(store, url.key)  # an empty object has no first byte
            if meta["size"]:
                raise
        return StoredObject(url, meta["size"], version_in(url, meta), access)

    return retrying(request, url, "read", access, renew=partial(forget_store, url, access))


def version_in(url: ObjectUrl, meta: Any) -> str:
    """The ETag of an object, from what the library says about it.

    Raises:
        StoreError: it has none that tells its bytes apart.
    """
    version = meta["e_tag"]
    if not version or version.startswith("W/"):
        raise StoreError(
            f"{url} cannot be read: the server gives no strong ETag, by which a changed object is known; {COPY_FIRST}"
        )
    return str(version) if version.startswith('"') else f'"{version}"'  # some lists leave the quotes out
