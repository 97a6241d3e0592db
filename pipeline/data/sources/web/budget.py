"""Work that the extraction of an HTML page would take, counted before it begins, in time linear in the page's length.

trafilatura takes 0.1 to 0.3 ms per element. Two shapes take time by the square of a count: attributes of one tag, which
the parser compares with each other, and inline elements of one paragraph, whose texts are joined one by one. A page of
1 MB could take hours. The counts depend on the page alone, so every machine rejects the same pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from pipeline.data.sources.records import UnusableRecord

if TYPE_CHECKING:
    from pipeline.config.data import WarcConfig

TOO_MUCH_MARKUP = "more markup than warc allows"
"""Reason of a page above a limit."""
ELEMENT_CHARACTERS = 20
"""Characters of a paragraph that take as much time as the step to the next inline element, measured."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
"""Characters that trafilatura removes before it parses a page: they would hide a tag here."""
_QUOTED_END = re.compile(r"""=[\t\n\f\r ]*+(?:"[^">]*+>|'[^'>]*+>)""")
"""A quoted value with the end of its tag in it, or so it seems."""
_START = re.compile("<(?=[A-Za-z])")
_VALUE = r"""[\t\n\f\r ]*+=[\t\n\f\r ]*+(?:"[^"]*+"?+|'[^']*+'?+|[^\t\n\f\r >]*+)"""
_ATTRIBUTE = rf"[^\t\n\f\r />][^\t\n\f\r />=]*+(?:{_VALUE})?+"
_TAG = re.compile(rf"[^\t\n\f\r />]++(?:[\t\n\f\r /]++|{_ATTRIBUTE})*+")
"""Name and attributes of a start tag, as HTML cuts them (https://html.spec.whatwg.org/#tag-name-state)."""
_ATTRIBUTES = re.compile(rf"[\t\n\f\r /]++|({_ATTRIBUTE})")
_LARGE_BLOCK = 300
"""Elements in a block; the paragraphs of a smaller one take no time that matters."""
_SCANS, _FREE_CHARACTERS = 8, 2**20
"""How often each character may lie in a start tag: in ordinary pages once, or twice where a script writes tags."""
# fmt: off
_BLOCKS = frozenset((
    "html", "head", "body", "div", "p", "section", "article", "main", "header", "footer", "nav", "aside", "ul", "ol",
    "li", "dl", "dt", "dd", "table", "caption", "thead", "tbody", "tfoot", "tr", "td", "th", "blockquote", "pre",
    "form", "fieldset", "figure", "figcaption", "details", "summary", "address", "h1", "h2", "h3", "h4", "h5", "h6",
))
# fmt: on
"""Elements that trafilatura treats each on its own; the text of all others is joined to that around them."""
_VOID = frozenset(("br", "hr", "wbr"))
"""Elements without text, of which a poem has one per line, and which take no such time."""


@dataclass(frozen=True)
class MarkupLimits:
    """Limits of a page's markup. The fields are the keys of `warc` of the same name."""

    max_tags: int = 50_000
    max_attributes: int = 1000
    max_paragraph_work: int = 500_000_000

    @classmethod
    def of(cls, section: WarcConfig | Mapping[str, Any]) -> Self:
        """The limits of the run file, or of a plan, which names those that are not the default."""
        names = [each.name for each in fields(cls)]
        if isinstance(section, Mapping):
            return cls(**{name: section[name] for name in names if name in section})
        return cls(**{name: getattr(section, name) for name in names})

    def settings(self) -> dict[str, int]:
        """Limits that are not the default, by key. Plans of earlier versions name none."""
        return {name: value for name, value in asdict(self).items() if value != getattr(MarkupLimits, name)}

    def check_tags(self, html: str) -> int:
        """Refuse a page by its start tags, those in scripts and comments, too: a parser may see other ones than this.

        Returns:
            A bound of their number.

        Raises:
            UnusableRecord: a count is above a limit.
        """
        if _CONTROLS.search(html):
            html = _CONTROLS.sub("", html)
        tags = html.count("<")
        # The longest tag of a page is shorter than this unless a quoted value holds its end, or it is long itself.
        long_tag = rf"<[A-Za-z][^>]{{{2 * self.max_attributes}}}"
        if tags <= self.max_tags and not _QUOTED_END.search(html) and not re.search(long_tag, html):
            return tags
        tags = self._scan(html)
        if tags > self.max_tags:
            raise self._above("max_tags", tags, "start tags")
        return tags

    def _scan(self, html: str) -> int:
        left = _SCANS * len(html) + _FREE_CHARACTERS
        tags = 0
        for start in _START.finditer(html):
            tags += 1
            begin = start.end()
            tag = _TAG.match(html, begin, begin + left)
            assert tag is not None, "it begins with a letter"
            size = tag.end() - begin
            left -= size
            if left <= 0:
                raise UnusableRecord(TOO_MUCH_MARKUP, "start tags without an end, each in the one before")
            if size > 2 * self.max_attributes:
                count = sum(1 for each in _ATTRIBUTES.finditer(html, begin, tag.end()) if each[1]) - 1  # the name
                if count > self.max_attributes:
                    raise self._above("max_attributes", count, "attributes of one tag")
        return tags

    def may_be_slow(self, tags: int, characters: int) -> bool:
        """Tell whether a paragraph could be above the limit: one that all of the page is in."""
        return _work(tags, characters) > self.max_paragraph_work

    def check_paragraphs(self, tree: Any) -> None:
        """Refuse a page by its paragraphs.

        Args:
            tree: of lxml.

        Raises:
            UnusableRecord: they are above the limit.
        """
        work = sum(_work(*run) for run in _inline_runs(tree))
        if work > self.max_paragraph_work:
            raise self._above("max_paragraph_work", work, "elements times length of its paragraphs")

    def _above(self, key: str, count: int, what: str) -> UnusableRecord:
        return UnusableRecord(TOO_MUCH_MARKUP, f"{count} {what}, warc.{key} is {getattr(self, key)}")


DEFAULT_LIMITS = MarkupLimits()


def _work(elements: int, characters: int) -> int:
    return elements * (ELEMENT_CHARACTERS * elements + characters)


def _inline_runs(tree: Any) -> Iterator[tuple[int, int]]:
    """(elements, characters) of the inline elements of each large block, those in one another and their tails, too."""
    for block in tree.xpath(f"//*[count(.//*) >= {_LARGE_BLOCK}]"):
        if block.tag not in _BLOCKS:
            continue
        elements, characters = 0, len(block.text or "")
        waiting = [block]
        while waiting:
            for child in waiting.pop():
                characters += len(child.tail or "")
                if child.tag not in _BLOCKS:
                    elements += child.tag not in _VOID
                    characters += len(child.text or "")
                    waiting.append(child)
        yield elements, characters
