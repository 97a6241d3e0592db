"""`type: hub`: what `datasets` streams, shard by shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pipeline.data.sources.globs import File
from pipeline.data.sources.parquet import EXPANSION
from pipeline.data.sources.reader import Cursor, Reader
from pipeline.data.sources.records import Document, Hub, Piece

if TYPE_CHECKING:
    from pipeline.config.data import InputConfig

_REVISION = "hub.revision"


@dataclass(frozen=True)
class HubReader(Reader):
    """One document a row of a dataset of the hub, or of a local one.

    Attributes:
        hub: what is streamed; `find` pins its revision to a commit.
    """

    type = "hub"
    numbering = "row"
    pinned = (_REVISION,)
    key = "hub"
    is_remote = True

    hub: Hub = dataclasses.field(kw_only=True)

    @classmethod
    def from_config(cls, source: InputConfig, **limits: Any) -> Self:
        """The reader of a source with the key `hub`."""
        asked = source.hub
        assert asked is not None
        hub = Hub(asked.path, asked.name, asked.split, asked.revision, tuple(asked.data_files))
        return super().from_config(source, hub=hub, **limits)

    @classmethod
    def from_plan(cls, settings: Mapping[str, Any], **limits: Any) -> Self:
        """The reader that a plan was made with."""
        made = settings["hub"]
        hub = Hub(made["path"], made["name"], made["split"], settings.get(_REVISION), tuple(made["data_files"]))
        return super().from_plan(settings, hub=hub, **limits)

    def settings(self) -> dict[str, Any]:
        """Keys and the dataset, without its revision."""
        path, name, split, files = self.hub.path, self.hub.name, self.hub.split, list(self.hub.data_files)
        return super().settings() | {"hub": {"path": path, "name": name, "split": split, "data_files": files}}

    def pins(self) -> dict[str, Any]:
        """The commit of a dataset on the hub."""
        return {_REVISION: self.hub.revision}

    def find(
        self, paths: list[str], exclude: list[str], key: str, planned: Callable[[], Mapping[str, Any]]
    ) -> tuple[Self, list[File]]:
        """The shards, at the commit of the plan unless the run file names another revision."""
        from pipeline.data.sources.hub_stream import hub_files

        hub, files = hub_files(dataclasses.replace(self.hub, revision=self.hub.revision or planned().get(_REVISION)))
        return dataclasses.replace(self, hub=hub), files

    def check_columns(self, files: Sequence[File], *, every: bool = False) -> None:
        """Look for the columns, if the dataset says which it has."""
        from pipeline.data.sources.hub_stream import check

        check(self.hub, self)

    def expected_text_bytes(self, file: File) -> int:
        """About how much text a shard holds, by the name of its file."""
        return file.size * EXPANSION if file.path.endswith(".parquet") else super().expected_text_bytes(file)

    def cut(self, files: Iterable[File], size: int) -> Iterator[tuple[Piece, ...]]:
        """Each shard is a piece of work: its size may be unknown."""
        return ((Piece(file, 0, file.size, chunked=True),) for file in files)

    def suspects(self, files: Sequence[File]) -> Sequence[File]:
        """None: shards may lie elsewhere."""
        return ()

    def read(self, cursor: Cursor, piece: Piece) -> Iterator[Document]:
        """The rows of a shard."""
        from pipeline.data.sources.hub_stream import read_shard

        return read_shard(cursor, piece, self.hub)
