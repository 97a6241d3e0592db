"""Globs of objects: listed once, from the folder that has no wildcard in it."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator
from functools import partial

from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.failures import ObjectMissing
from pipeline.common.objects.hub import list_hub
from pipeline.common.objects.retries import retrying
from pipeline.common.objects.stored import StoredObject, find_object, version_in
from pipeline.common.objects.stores import forget_store, load_obstore, open_store
from pipeline.common.objects.urls import ObjectUrl

_WILD = frozenset("*?[")
_PAGE = 1000


def has_wildcard(pattern: str) -> bool:
    """Tell whether a pattern may stand for several keys."""
    return not _WILD.isdisjoint(pattern)


def find_objects(url: ObjectUrl, access: RemoteAccess) -> list[tuple[str, StoredObject]]:
    """The objects that a URL stands for, each with its name below the fixed part of the glob, sorted by name.

    Args:
        url: with wildcards as in paths of files: `*` and `?` stay within a folder, `**` matches any folders, and a name
            that begins with a dot needs one in the glob. A key that is the pattern itself is that object.
        access: settings.

    Raises:
        UserError: they cannot be listed, or wildcards are in the URL of a server that has no lists.
    """
    if url.is_pinned:
        return _find_in_hub(url, access)
    if not has_wildcard(url.key):
        return [(url.key.rpartition("/")[2], find_object(url, access))]
    if not url.is_listable:
        raise ObjectMissing(f"{url}: objects of a web server cannot be listed: name each file, without wildcards")
    if "*" not in url.key and "?" not in url.key:
        try:  # a bracket is part of many keys
            return [(url.key.rpartition("/")[2], find_object(url, access))]
        except ObjectMissing:
            pass
    parts = url.key.split("/")
    fixed = next(number for number, part in enumerate(parts) if has_wildcard(part))
    base = "/".join(parts[:fixed])
    found, folders = [], set[str]()
    for each in list_objects(url.with_key(base), access):
        name = each.url.key[len(base) + 1 :] if base else each.url.key
        folders |= {name[:at] for at in range(len(name)) if name[at] == "/"}
        if matches(parts[fixed:], name.split("/")):
            found.append((name, each))
    # Some programs mark a folder by an empty object with its name.
    return sorted((name, each) for name, each in found if each.size or name not in folders)


def _find_in_hub(url: ObjectUrl, access: RemoteAccess) -> list[tuple[str, StoredObject]]:
    """The files that a URL of the hub stands for. One without a wildcard is a list of its folder, too."""
    parts = url.key.split("/")
    fixed = next((number for number, part in enumerate(parts) if has_wildcard(part)), len(parts) - 1)
    base = "/".join(parts[:fixed])
    files = {each.url.key.removeprefix(f"{base}/"): each for each in list_hub(url.with_key(base), access)}
    if (whole := "/".join(parts[fixed:])) in files:
        return [(whole, files[whole])]
    found = sorted(name for name in files if matches(parts[fixed:], name.split("/")))
    if not found and not has_wildcard(url.key):
        raise ObjectMissing(f"{url}: there is no such file in the dataset")
    return [(name, files[name]) for name in found]


def look_at(url: ObjectUrl, access: RemoteAccess) -> bool:
    """Look whether what a URL or glob stands for can be listed and read: at one object of the first page of its list.

    Returns:
        False if nothing is there.

    Raises:
        UserError: it cannot be.
    """
    if not has_wildcard(url.key) or not url.is_listable:
        return bool(find_objects(url, access))
    parts = url.key.split("/")
    base = itertools.takewhile(lambda part: not has_wildcard(part), parts)
    first = next(list_objects(url.with_key("/".join(base)), access), None)
    if first is not None:
        first.check()
    return first is not None


def list_objects(folder: ObjectUrl, access: RemoteAccess) -> Iterator[StoredObject]:
    """The objects below a folder, or in the whole bucket if its key is empty."""
    last: str | None = None
    pages: Iterator[list[StoredObject]] | None = None

    def request() -> list[StoredObject] | None:
        nonlocal pages
        try:
            pages = pages or _pages(folder, access, last)
            return next(pages, None)
        except Exception:
            pages = None  # the next attempt begins behind the last key that came
            raise

    while page := retrying(request, folder, "list", access, renew=partial(forget_store, folder, access)):
        yield from page
        last = page[-1].url.key


def _pages(folder: ObjectUrl, access: RemoteAccess, after: str | None) -> Iterator[list[StoredObject]]:
    store = open_store(folder, access)
    listed = load_obstore().list(store, folder.key or None, offset=after, chunk_size=_PAGE)
    for page in listed:
        yield [
            StoredObject(url := folder.with_key(meta["path"]), meta["size"], version_in(url, meta), access)
            for meta in page
        ]


def matches(pattern: list[str], key: list[str]) -> bool:
    """Tell whether the parts of a key match those of a glob."""
    if not pattern:
        return not key
    part, rest = pattern[0], pattern[1:]
    if part == "**":
        # At the end of a glob it stands for all files below; hidden folders are left out, as on a disk.
        if matches(rest or ["*"], key):
            return True
        return len(key) > 1 and not key[0].startswith(".") and matches(pattern, key[1:])
    if not key or (key[0].startswith(".") and not part.startswith(".")):
        return False
    return fnmatch.fnmatchcase(key[0], part) and matches(rest, key[1:])
