"""Bytes of objects whose reader knows their hashes: of whatever version there is, without asking for that first."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.failures import ObjectChanged, kind_of
from pipeline.common.objects.response import PartialResponse
from pipeline.common.objects.retries import retrying
from pipeline.common.objects.stores import forget_store, load_obstore, open_store
from pipeline.common.objects.urls import ObjectUrl


def read_content(
    url: ObjectUrl,
    access: RemoteAccess,
    start: int = 0,
    end: int | None = None,
    abandoned: threading.Event | None = None,
) -> bytes:
    """Bytes [start, end) of an object; they are not checked.

    Args:
        url: of the object.
        access: settings.
        start: first byte.
        end: behind the last byte; None for all of the object.
        abandoned: set when nobody waits for them any more.

    Raises:
        ObjectChanged: the object is shorter.
        UserError: it cannot be read; the message says what can be done.
        Abandoned: nobody waits any more.
    """
    if start == end:
        return b""
    response = _Response(url, access, start, end)
    return retrying(
        response.more,
        url,
        "read",
        access,
        renew=partial(forget_store, url, access),
        progress=lambda: response.at,
        abandoned=abandoned,
    )


class _Response(PartialResponse):
    """A range of whatever version of an object there is."""

    def __init__(self, url: ObjectUrl, access: RemoteAccess, start: int, end: int | None) -> None:
        super().__init__(start)
        self._url, self._access, self._end = url, access, end

    def more(self) -> bytes:
        """Ask for what is missing; returns all."""
        options: dict[str, Any] = {}
        if self._end is not None:
            options["range"] = (self.at, self._end)
        elif self.at:
            options["range"] = {"offset": self.at}
        try:
            found = load_obstore().get(open_store(self._url, self._access), self._url.key, options=options)
        except Exception as error:
            if kind_of(error)[0] == "no range":
                raise self._shorter() from None
            raise
        end = found.meta["size"] if self._end is None else self._end
        if end > found.meta["size"]:
            raise self._shorter()
        return self.take(found, end)

    def _shorter(self) -> ObjectChanged:
        return ObjectChanged(f"{self._url} is shorter than it was when it was written; {REWRITE}")


REWRITE = "write it again: `pipeline data push` with the dataset of a disk"
