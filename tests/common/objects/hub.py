"""A hub of datasets on this machine: its lists, and files that lie on another host."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.common.objects.web import Web, web

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A dataset `org/set` with one commit, whose branch is `main`.

    Attributes:
        site: the hub.
        files: the host that has the files.
    """

    def __init__(self, site: Web, files: Web, content: dict[str, bytes]) -> None:
        self.site, self.files = site, files
        files.objects = {f"datasets/org/set/resolve/{COMMIT}/{name}": data for name, data in content.items()}
        site.redirect = files.url().rstrip("/").replace("127.0.0.1", "localhost")
        site.pages["/api/datasets/org/set/revision/main"] = json.dumps({"id": "org/set", "sha": COMMIT})
        folders = {name.rpartition("/")[0] for name in content} | {""}
        for folder in folders:
            entries = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                    "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134},
                }
                for name, data in content.items()
                if not folder or name.startswith(f"{folder}/")
            ]
            site.pages[f"/api/datasets/org/set/tree/{COMMIT}{'/' if folder else ''}{folder}"] = json.dumps(entries)


@contextmanager
def hub(content: dict[str, bytes]) -> Iterator[Hub]:
    """Start the two servers, and end them."""
    with web() as site, web() as files:
        yield Hub(site, files, content)
