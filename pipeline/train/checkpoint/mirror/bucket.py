"""A mirror of checkpoints in object storage: what is in it, and what is removed from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pipeline.common.errors import UserError
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.failures import ObjectChanged, ObjectMissing
from pipeline.common.objects.listing import list_objects
from pipeline.common.objects.stored import StoredObject
from pipeline.common.objects.urls import ObjectUrl, parse_folder
from pipeline.common.objects.writing import SMALL_BYTES, create_object, delete_objects, read_small, replace_object
from pipeline.config import Config
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.train.checkpoint.committed import COMMIT, step_of
from pipeline.train.checkpoint.mirror.commits import MirrorCommit, current_line, generation_of, parse_commit
from pipeline.train.checkpoint.policy import to_prune

OWNER = "OWNER"
"""Object that names the run which writes to a mirror."""


class OwnerLost(UserError):
    """Another start of the run, or another run, writes to the mirror by now."""


def remote_access(config: Config, patience_s: float) -> RemoteAccess:
    """Settings of access to mirrors: those of `data.remote`, but with credentials and another patience."""
    return replace(config.data.remote.access, anonymous=False, patience_s=patience_s)


@dataclass(frozen=True)
class Mirror:
    """A mirror: the URL of its folder, and settings of access."""

    url: ObjectUrl
    access: RemoteAccess
    _read: dict[tuple[int, str], MirrorCommit] = field(default_factory=dict, compare=False, repr=False)
    """Commits that were read, by step and version."""

    @classmethod
    def of(cls, url: str, access: RemoteAccess) -> Mirror:
        """The mirror at a URL."""
        return cls(parse_folder(url), access)

    @property
    def owner(self) -> ObjectUrl:
        """The object that names the owner."""
        return self.url.below(OWNER)

    def commit_url(self, step: int) -> ObjectUrl:
        """The object that makes the checkpoint of a step count."""
        return self.url.below(f"step-{step:08d}/{COMMIT}")

    def files_url(self, step: int, upload: str) -> ObjectUrl:
        """The folder of the files of a try to upload a checkpoint."""
        return self.url.below(f"step-{step:08d}/{upload}")

    def commit(self, step: int) -> MirrorCommit | None:
        """The checkpoint of a step; None if there is none.

        Raises:
            UserError: it cannot be read, or is damaged.
        """
        url = self.commit_url(step)
        found = read_small(url, self.access)
        return None if found is None else parse_commit(found[0], str(url))

    def commits(self) -> list[MirrorCommit]:
        """The checkpoints, as `current_line` has them.

        Raises:
            UserError: they cannot be listed or read.
        """
        return current_line(self._committed(_Objects.listed(self)))

    def looked_at(self) -> list[tuple[MirrorCommit, list[str]]]:
        """The checkpoints as `commits`, each with what is wrong with it by the sizes of its objects."""
        objects = _Objects.listed(self)
        return [
            (each, [] if objects.have(each) else [f"{self.files_url(each.step, each.upload)}: objects are missing"])
            for each in current_line(self._committed(objects))
        ]

    def _committed(self, objects: _Objects) -> list[MirrorCommit]:
        found = []
        for step, each in objects.commits.items():
            key = (step, each.version)
            if each.size > SMALL_BYTES:
                raise UserError(f"{each.url} is damaged: it has {each.size:,} bytes")
            if key not in self._read:
                try:
                    self._read[key] = parse_commit(each.read(0, each.size), str(each.url))
                except (ObjectChanged, ObjectMissing):  # since it was listed
                    if (now := self.commit(step)) is not None:
                        found.append(now)
                    continue
            found.append(self._read[key])
        return found

    def put_commit(self, commit: MirrorCommit) -> None:
        """Let the checkpoint of a step count, in the place of one of an earlier generation.

        Raises:
            OwnerLost: there is one of a later generation.
            UserError: it cannot be written.
        """
        url, data = self.commit_url(commit.step), commit.to_bytes()
        if create_object(url, data, self.access) == data:
            return
        while True:
            found = read_small(url, self.access)
            if found is None:
                now: bytes | None = create_object(url, data, self.access)
            elif found[0] == data:
                return
            elif parse_commit(found[0], str(url)).generation > commit.generation:
                raise OwnerLost(f"{url} is of a later start of the run")
            else:
                now = data if replace_object(url, data, self.access, found[1].version) is not None else None
            if now == data:
                return

    def take_back(self, commit: MirrorCommit) -> None:
        """Let a checkpoint not count, unless another one has taken its place.

        Raises:
            UserError: it cannot be removed.
        """
        if self.commit(commit.step) == commit:
            delete_objects([self.commit_url(commit.step)], self.access)

    def prune(self, rules: CheckpointConfig, generation: int, alive: Callable[[], None]) -> list[int]:
        """Remove checkpoints that the policy does not keep, abandoned ones, and files that no commit names.

        The commit goes first, so that there never is one without its files; the newest checkpoint stays.

        Args:
            rules: the policy's numbers.
            generation: of the owner, nothing of whom is being uploaded. Files of later ones stay.
            alive: called before anything is removed; raises if the mirror has another owner by now.

        Returns:
            Steps of the checkpoints that are gone.
        """
        objects = _Objects.listed(self)
        everything = self._committed(objects)
        line = current_line(everything)
        steps = [each.step for each in line]
        gone = {*to_prune(rules, steps, steps[-1] if steps else None)}
        gone |= {
            each.step
            for each in everything
            # One without all of its files is of a start that had lost the mirror and did not know yet.
            if each.generation < generation and (each not in line or not objects.have(each))
        }
        kept = {(each.step, each.upload) for each in everything if each.step not in gone}
        files = [
            each.url
            for (step, upload), those in objects.files.items()
            if (step, upload) not in kept and (generation_of(upload) or 0) <= generation
            for each in those
        ]
        if gone or files:
            alive()
            delete_objects([self.commit_url(step) for step in sorted(gone)], self.access)
            delete_objects(files, self.access)
        return sorted(gone)


@dataclass
class _Objects:
    """The objects of a mirror, by what they are."""

    commits: dict[int, StoredObject]
    """Those that make a checkpoint count, by step."""
    files: dict[tuple[int, str], list[StoredObject]]
    """Files by step and upload."""

    @classmethod
    def listed(cls, mirror: Mirror) -> _Objects:
        """List the objects; other people's are left out."""
        found = cls({}, {})
        for each in list_objects(mirror.url, mirror.access):
            parts = each.url.key.removeprefix(f"{mirror.url.key}/").split("/")
            step = step_of(parts[0])
            if step is None or parts[0] != f"step-{step:08d}":
                continue
            if parts[1:] == [COMMIT]:
                found.commits[step] = each
            elif len(parts) > 2 and generation_of(parts[1]) is not None:
                found.files.setdefault((step, parts[1]), []).append(each)
        return found

    def have(self, commit: MirrorCommit) -> bool:
        """True if the files of a checkpoint are there, by their sizes."""
        there = {
            each.url.key.rpartition("/")[2]: each.size for each in self.files.get((commit.step, commit.upload), ())
        }
        return all(there.get(name) == size for name, (size, _) in commit.files.items())


def sizes_of(objects: Iterable[StoredObject], folder: ObjectUrl) -> dict[str, tuple[int, str]]:
    """Size and version of objects by their names below a folder."""
    return {each.url.key.removeprefix(f"{folder.key}/"): (each.size, each.version) for each in objects}
