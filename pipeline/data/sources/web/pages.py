"""Texts of HTTP responses: transfer and content encodings, character sets, and the main text of HTML pages."""

from __future__ import annotations

import re
import zlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from pipeline.common.errors import UserError, install_extra
from pipeline.data.sources.foreign_parser import parsing
from pipeline.data.sources.records import NO_PAGE, UnusableRecord
from pipeline.data.sources.web.budget import DEFAULT_LIMITS, MarkupLimits
from pipeline.data.sources.web.records import header_fields

HTML_TYPES = ("text/html", "application/xhtml+xml")
TEXT_TYPE = "text/plain"
_STATUS = re.compile(rb"HTTP/\d(?:\.\d)? (\d{3})\b")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_META = re.compile(rb"""<meta[^>]{0,500}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""", re.IGNORECASE)
_META_BYTES = 1024
_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xfe\xff", "utf-16-be"), (b"\xff\xfe", "utf-16-le"))
_FALLBACK = "cp1252"
_AS_BROWSERS = {
    **dict.fromkeys(("ascii", "us-ascii", "iso-8859-1", "iso8859-1", "latin1", "latin-1", "windows-1252"), _FALLBACK),
    **dict.fromkeys(("utf8", "utf-8", "unicode-1-1-utf-8"), "utf-8"),
    **dict.fromkeys(("gb2312", "gbk", "gb_2312-80", "x-gbk", "gb18030"), "gb18030"),
    **dict.fromkeys(("shift_jis", "shift-jis", "sjis", "x-sjis", "windows-31j", "ms932"), "cp932"),
    **dict.fromkeys(("euc-kr", "ks_c_5601-1987", "ksc5601", "windows-949"), "cp949"),
    **dict.fromkeys(("big5", "big5-hkscs", "x-x-big5"), "big5hkscs"),
    **dict.fromkeys(("iso-8859-9", "latin5", "windows-1254"), "cp1254"),
    **dict.fromkeys(("tis-620", "iso-8859-11", "windows-874"), "cp874"),
    **dict.fromkeys(("utf-16", "utf-16le", "unicode"), "utf-16-le"),
    "utf-16be": "utf-16-be",
    "macintosh": "mac_roman",
}
"""Python's names of the character sets that browsers take for a name (https://encoding.spec.whatwg.org)."""
_SAME_NAME = re.compile(r"iso-8859-(?:[2-8]|1[03-6])|windows-125[0-8]|koi8-[ru]|euc-jp|iso-2022-jp|ibm866")
"""Names that mean the same to Python. A page does not choose among all of its codecs."""


class WebPage(NamedTuple):
    """The body of an HTTP response, decoded to what it was before it was sent."""

    media_type: str
    charset: str | None
    body: bytes


def page_of(block: bytes, longest: int, too_long: str) -> WebPage:
    """The page of an HTTP response of status 200.

    Args:
        block: status line, header and body.
        longest: bytes that the body may become.
        too_long: the reason to reject a longer one.

    Raises:
        UnusableRecord: it has no page of text, or cannot be decoded.
    """
    status = _STATUS.match(block)
    if status is None:
        raise UnusableRecord("not an HTTP response", repr(block[:30]))
    if status[1] != b"200":
        raise UnusableRecord(NO_PAGE, f"status {status[1].decode()}")
    end = _HEAD_END.search(block)
    head, body = (block, b"") if end is None else (block[: end.start()], block[end.end() :])
    fields = header_fields(head.partition(b"\n")[2], "latin-1")
    media_type, _, parameters = fields.get("content-type", "").partition(";")
    media_type = media_type.strip().lower()
    if media_type not in (TEXT_TYPE, *HTML_TYPES):
        raise UnusableRecord(NO_PAGE, media_type[:50] or "no Content-Type")
    if "chunked" in fields.get("transfer-encoding", "").lower():
        body = _joined(body)
    for coding in reversed([each.strip().lower() for each in fields.get("content-encoding", "").split(",")]):
        body = _decoded(body, coding, longest, too_long)
    charset = re.search(r"""charset\s*=\s*["']?\s*([\w:.-]{1,40})""", parameters, re.ASCII | re.IGNORECASE)
    return WebPage(media_type, charset and charset[1], body)


def _joined(body: bytes) -> bytes:
    """A body without the sizes of its chunks. Some crawlers store it like that already, and keep the header."""
    if _CHUNK_SIZE.match(body) is None:
        return body
    at = 0
    parts: list[bytes] = []
    while (found := _CHUNK_SIZE.match(body, at)) is not None:
        size = int(found[1], 16)
        at = found.end() + size
        if not size:
            return b"".join(parts)
        if at > len(body):
            break
        parts.append(body[found.end() : at])
        at += 2 if body.startswith(b"\r\n", at) else body.startswith(b"\n", at)
    raise UnusableRecord("damaged HTTP body", f"no chunk begins at byte {min(at, len(body))} of {len(body)}")


def _decoded(body: bytes, coding: str, longest: int, too_long: str) -> bytes:
    """A body without a content encoding. Some crawlers store it like that already, and keep the header."""
    if coding in ("", "identity", "none") or not body:
        return body
    if coding in ("gzip", "x-gzip"):
        return _inflated(body, 31, longest, too_long) if body.startswith(b"\x1f\x8b") else body
    if coding == "deflate":  # of zlib by the standard, and bare as some servers send it
        has_header = body[0] & 15 == 8 and len(body) > 1 and int.from_bytes(body[:2], "big") % 31 == 0
        return _inflated(body, 15 if has_header else -15, longest, too_long)
    raise UnusableRecord("unknown content encoding", repr(coding[:30]))


def _inflated(body: bytes, window: int, longest: int, too_long: str) -> bytes:
    parts, size = [], 0
    while body:
        decoder = zlib.decompressobj(window)
        try:
            part = decoder.decompress(body, longest + 1 - size)
        except zlib.error as error:
            raise UnusableRecord("damaged HTTP body", str(error)) from None
        size += len(part)
        if size > longest:
            raise UnusableRecord(too_long, "once it is decompressed")
        if not decoder.eof:
            raise UnusableRecord("damaged HTTP body", "its compressed data ends too early")
        parts.append(part)
        body = decoder.unused_data if decoder.unused_data.startswith(b"\x1f\x8b") else b""
    return b"".join(parts)


def characters(page: WebPage) -> str:
    """The body as text, as browsers read it: a byte that the character set does not have becomes U+FFFD.

    The set is that of a byte order mark, of the HTTP header, or of a `meta` tag at the beginning of an HTML page; else
    UTF-8, and windows-1252 where that does not fit.
    """
    for mark, marked in _MARKS:
        if page.body.startswith(mark):
            return page.body[len(mark) :].decode(marked, "replace")
    name = _codec(page.charset)
    if name is None and page.media_type in HTML_TYPES and (found := _META.search(page.body[:_META_BYTES])):
        name = _codec(found[1].decode("ascii"))
        name = "utf-8" if name in ("utf-16-le", "utf-16-be") else name  # the tag was read as ASCII
    if name is not None:
        return page.body.decode(name, "replace")
    try:
        return page.body.decode()
    except UnicodeDecodeError:
        return page.body.decode(_FALLBACK, "replace")


def _codec(charset: str | None) -> str | None:
    """Python's name of a character set; None of one that is not known."""
    name = (charset or "").strip().lower()
    return _AS_BROWSERS.get(name) or (name if _SAME_NAME.fullmatch(name) else None)


def library_version() -> str:
    """Versions of the library that takes the text out of HTML pages, and of its parser.

    Raises:
        UserError: it is not installed.
    """
    try:
        return ", ".join(f"{name} {version(name)}" for name in ("trafilatura", "lxml"))
    except PackageNotFoundError:
        raise _not_installed("") from None


def page_text(page: WebPage, limits: MarkupLimits = DEFAULT_LIMITS) -> str:
    """The main text of an HTML page, in characters that UTF-8 has.

    Raises:
        UserError, UnusableRecord: as `main_text`.
    """
    text = main_text(characters(page), limits)
    # HTML can spell a lone surrogate.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def main_text(html: str, limits: MarkupLimits = DEFAULT_LIMITS) -> str:
    """The main text of an HTML page; empty if there is none.

    Args:
        html: the page.
        limits: of its markup.

    Raises:
        UserError: the library is not installed.
        UnusableRecord: the library fails, or would take too long.
    """
    try:
        import trafilatura
    except ImportError as error:
        raise _not_installed(f" ({error})") from error
    try:
        # Nothing is remembered from page to page (`deduplicate`): the text of a page depends on the page alone.
        tags = limits.check_tags(html)
        with parsing("trafilatura"):
            page: Any = html
            if limits.may_be_slow(tags, len(html)) and (tree := trafilatura.load_html(html)) is not None:
                limits.check_paragraphs(tree)
                page = tree  # the same text comes of it, without another parse
            return trafilatura.extract(page, favor_precision=True, include_comments=False, deduplicate=False) or ""
    except (MemoryError, UnusableRecord):  # memory is of the machine, not of the page
        raise
    except Exception as error:  # whatever the library or its parser raises
        raise UnusableRecord("HTML that cannot be read", type(error).__name__) from error


def _not_installed(why: str) -> UserError:
    return UserError(
        f"warc.html: trafilatura and type: html need the package trafilatura{why}: {install_extra('html')}; with "
        "warc.html: skip, only plain text is read from WARC files"
    )
