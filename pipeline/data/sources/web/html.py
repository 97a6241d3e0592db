"""`type: html`: one page per file, and what this format shares with pages of crawls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pipeline.data.sources.foreign_parser import SKIPPED, working_on
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Cursor, Reader
from pipeline.data.sources.records import Document, Piece, UnusableRecord, record_name
from pipeline.data.sources.text import TextReader
from pipeline.data.sources.web.budget import DEFAULT_LIMITS, MarkupLimits
from pipeline.data.sources.web.pages import HTML_TYPES, WebPage, library_version, page_text

if TYPE_CHECKING:
    from pipeline.config.data import InputConfig

_LIBRARY = "warc.html"


@dataclass(frozen=True)
class PageReader(Reader):
    """Base class of the formats that have HTML pages, whose main text trafilatura takes out.

    Attributes:
        limits: of the markup of HTML pages.
        library: with its version, if HTML is read; the plan has it, so that texts of two versions are not mixed.
    """

    has_keys = False
    pinned = (_LIBRARY,)

    limits: MarkupLimits = dataclasses.field(default=DEFAULT_LIMITS, kw_only=True)
    library: str = dataclasses.field(default="", kw_only=True)

    @property
    def reads_html(self) -> bool:
        """True if the library is needed."""
        return True

    @classmethod
    def from_config(cls, source: InputConfig, **limits: Any) -> Self:
        """The reader of a source, with the limits of the section `warc`."""
        return super().from_config(source, limits=MarkupLimits.of(source.warc), **limits)

    @classmethod
    def from_plan(cls, settings: Mapping[str, Any], **limits: Any) -> Self:
        """The reader that a plan was made with."""
        return super().from_plan(settings, limits=MarkupLimits.of(settings["warc"]), **limits)

    def settings(self) -> dict[str, Any]:
        """Limits of the markup that are not the default."""
        return {"warc": self.limits.settings()}

    def pins(self) -> dict[str, Any]:
        """The library that reads HTML, with its version."""
        return {_LIBRARY: self.library} if self.library else {}

    def find(
        self, paths: list[str], exclude: list[str], key: str, planned: Callable[[], Mapping[str, Any]]
    ) -> tuple[Self, list[File]]:
        """The files, and the reader with the version of its library."""
        found, files = super().find(paths, exclude, key, planned)
        return dataclasses.replace(found, library=library_version()) if self.reads_html else found, files


class HtmlReader(PageReader, TextReader):
    """The main text of one HTML page per file, as `warc.html: trafilatura` takes it out of the pages of a crawl."""

    type = "html"

    def _text(self, cursor: Cursor, piece: Piece, raw: bytes) -> str | Document:
        name = record_name(piece.file.name, self.numbering, 0)
        try:
            if name in self.skip_records:
                raise UnusableRecord(SKIPPED, "")  # before it is parsed: it may be named because that takes hours
            working_on(name)
            return page_text(WebPage(HTML_TYPES[0], None, raw), self.limits)
        except UnusableRecord as unusable:
            return cursor.rejected(None, 0, unusable.reason, unusable.detail)
