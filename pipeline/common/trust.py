"""Files whose content is executed as this user: who else may have written them, and whom the user trusts.

POSIX permissions and ACLs are looked at, not the ACLs of NFSv4.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pipeline.common.console import Console, say
from pipeline.common.errors import UserError

OPTION = "--trust-files-of"
TRUSTED = "PIPELINE_TRUST_FILES_OF"
"""Environment variable with the names that the option has, separated by commas; processes that are started inherit it.

It is the user's own: nothing in a run folder can set it.
"""
_GROUP = "group:"
_MOST_LINKS = 40
"""Symbolic links of a path that the kernel follows."""
_ACL = "system.posix_acl_access"
_ACL_USER, _ACL_OWNING_GROUP, _ACL_GROUP = 0x02, 0x04, 0x08
"""Tags of entries of a POSIX ACL, from `linux/posix_acl.h`."""


_SAID = set[str]()
"""Lines on trusted files that this process has printed: once is enough."""


@dataclass(frozen=True)
class Writer:
    """Other users who can change a file or put another one in its place: one user, a group, or everyone."""

    kind: Literal["user", "group", "everyone"]
    number: int

    @property
    def name(self) -> str:
        """The name that `--trust-files-of` takes."""
        try:
            if self.kind == "user":
                return pwd.getpwuid(self.number).pw_name
            return _GROUP + grp.getgrgid(self.number).gr_name
        except KeyError:
            return str(self.number) if self.kind == "user" else f"{_GROUP}{self.number}"

    def at(self, place: Path) -> str:
        """The file or folder that they can write to, in words."""
        if self.kind == "user":
            return f"{place} belongs to {self.name}"
        if self.kind == "group":
            return f"members of the group {self.name.removeprefix(_GROUP)} may write to {place}"
        return f"all users may write to {place}"


def writers(*paths: Path) -> dict[Writer, str]:
    """Everybody but root and this user who may have written files or folders, each with the first place in words.

    Looked at are the owner and the mode of a path itself, of each folder above it, and of the links on the way. The
    sticky bit protects what is in a folder, but not against files that are added beside the one that is named.

    Args:
        paths: they need not exist; of a missing one the folder counts in which it could be made.
    """
    found: dict[Writer, str] = {}
    seen: set[tuple[Path, bool]] = set()
    for path in paths:
        places = list(_components(path))
        folder = next((place for place, status in reversed(places) if stat.S_ISDIR(status.st_mode)), None)
        # From the path upwards: the nearest place says most.
        for place, status in reversed(places):
            if (place, place == folder) in seen:
                continue
            seen.add((place, place == folder))
            sticky = bool(status.st_mode & stat.S_ISVTX) and place != folder
            for writer in _writers_of(place, status, sticky=sticky):
                found.setdefault(writer, writer.at(place) + ("" if place == path else f", which leads to {path}"))
    found.pop(Writer("user", os.geteuid()), None)
    return found


def _components(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each folder and link that the kernel passes on the way to a path, and the path; ends at what does not exist."""
    todo, here, links = list(reversed(path.absolute().parts)), Path("/"), 0
    while todo:
        part = todo.pop()
        if part == "..":
            here = here.parent
            continue
        place = here / part
        try:
            status = place.lstat()
            target = Path(os.readlink(place)) if stat.S_ISLNK(status.st_mode) else None
        except OSError:
            return
        yield place, status
        if target is None:
            here = place
        elif (links := links + 1) > _MOST_LINKS:
            return
        else:
            todo += reversed(target.parts)


def _writers_of(place: Path, status: os.stat_result, *, sticky: bool) -> Iterator[Writer]:
    if status.st_uid != 0:
        yield Writer("user", status.st_uid)
    if sticky or stat.S_ISLNK(status.st_mode):
        return
    if status.st_mode & stat.S_IWGRP:
        for kind, number in _acl_writers(place, status.st_gid):
            user = number if kind == "user" else _only_member(number)
            if user != 0:
                yield Writer("group", number) if user is None else Writer("user", user)
    if status.st_mode & stat.S_IWOTH:
        yield Writer("everyone", 0)


def _acl_writers(place: Path, group: int) -> list[tuple[Literal["user", "group"], int]]:
    """Users and groups to whom the group's right to write is given: with an ACL it is the most that any of them has."""
    try:
        entries = list(struct.iter_unpack("<HHI", os.getxattr(place, _ACL)[4:]))
    except OSError:  # there is none
        return [("group", group)]
    found: list[tuple[Literal["user", "group"], int]] = []
    for tag, rights, number in entries:
        if rights & 2 and tag in (_ACL_USER, _ACL_GROUP, _ACL_OWNING_GROUP):
            found.append(("user" if tag == _ACL_USER else "group", group if tag == _ACL_OWNING_GROUP else number))
    return found


@cache
def _only_member(group: int) -> int | None:
    """The user of a group that has this user alone, as many systems make one for each; None of any other group."""
    try:
        entry = grp.getgrgid(group)
        user = pwd.getpwnam(entry.gr_name)
    except KeyError:
        return None
    alone = user.pw_gid == group and set(entry.gr_mem) <= {user.pw_name}
    if not alone or any(other.pw_gid == group and other.pw_uid != user.pw_uid for other in pwd.getpwall()):
        return None
    return user.pw_uid


def is_own_group(number: int) -> bool:
    """True if a group is the one that many systems make for each user alone."""
    return _only_member(number) == os.geteuid()


def refuse_replaceable(folder: Path, todo: str) -> None:
    """Refuse a folder to which other users may write, or in whose place they can put another one.

    Args:
        folder: which exists.
        todo: what to do about it.

    Raises:
        UserError: it, or a folder above it, belongs to or may be written by somebody else, trusted or not.
    """
    for where in writers(folder).values():
        raise UserError(f"{folder}: {where}, and who writes there can replace what jobs run; {todo}")


def trust(names: Iterable[str]) -> None:
    """Trust the files of users and groups, in this process and in those that it starts.

    Args:
        names: of users, or of groups as `group:NAME`.

    Raises:
        UserError: there is no such user or group.
    """
    known = [name for name in (*_names(), *names) if _writer(name)]
    if known:
        os.environ[TRUSTED] = ",".join(dict.fromkeys(known))


def _names() -> list[str]:
    return os.environ.get(TRUSTED, "").replace(",", " ").split()


def _writer(name: str) -> Writer:
    try:
        if name.startswith(_GROUP):
            group = name.removeprefix(_GROUP)
            return Writer("group", int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid)
        return Writer("user", int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid)
    except KeyError:
        raise UserError(
            f"{OPTION} {name} (or {TRUSTED}): there is no such user or group here; name a user, or a group as "
            f"{_GROUP}NAME"
        ) from None


def is_named(user: int) -> bool:
    """True if a user is named as trusted, alone or as a member of a group."""
    for name in _names():
        writer = _writer(name)
        if writer.kind == "user" and writer.number == user:
            return True
        if writer.kind == "group":
            with suppress(KeyError):
                entry, members = pwd.getpwuid(user), grp.getgrgid(writer.number).gr_mem
                if entry.pw_gid == writer.number or entry.pw_name in members:
                    return True
    return False


def refuse_untrusted(key: str, paths: Iterable[Path], todo: str, *, sends: bool = False) -> None:
    """Refuse files to execute, or with addresses to use credentials at, that others may have written.

    Files of those whom the user has named as trusted pass.

    Says on the error output whose files are trusted.

    Args:
        key: that leads to their execution.
        paths: the files, and those that name them.
        todo: what to do without them.
        sends: credentials of this user are used at addresses that the files name; nothing of them is executed.

    Raises:
        UserError: somebody else may have written one of them.
    """
    found = writers(*paths)
    if not found:
        return
    named = {_writer(name) for name in _names()}
    others = {writer: where for writer, where in found.items() if writer not in named}
    if not others:
        whose = ", ".join(writer.name for writer in found)
        verb = "uses your credentials as in" if sends else "executes"
        line = f"{key} {verb} files of {whose}, as {OPTION} allows: {'; '.join(found.values())}"
        if line not in _SAID:
            _SAID.add(line)
            say(Console(stderr=True), line)
        return
    where = "; ".join(others.values())
    what = "would be used with your credentials" if sends else "would be executed as you"
    raise UserError(f"{key} {what}, and others may have written it: {where}. {_advice(others)}{todo}")


def _advice(others: Iterable[Writer]) -> str:
    if any(writer.kind == "everyone" for writer in others):
        return "Take the right to write from others (chmod o-w), or "
    names = [writer.name for writer in others]
    options = " ".join(f"{OPTION} {name}" for name in names)
    return f"If you trust them with your account, add {options} (or set {TRUSTED}={','.join(names)}); if not, "
