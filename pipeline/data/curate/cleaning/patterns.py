"""Patterns of personal data. Each finds candidates in time that is linear in the text, also in one made to be slow.

A pattern begins with what is rare in text (`@`, a digit, the prefix of a key), has no repetition inside of another one
that could match the same characters, and is bounded. What stands before a candidate is looked at afterwards: Python's
`re` finds a pattern that begins with a literal or a set of characters several times as fast. All patterns are ASCII, so
masks leave the characters that `mojibake` looks at.
"""

from __future__ import annotations

import re
import string
from bisect import bisect_right
from collections.abc import Callable, Iterator

from pipeline.common.redaction import SERVICE_TOKENS
from pipeline.data.curate.cleaning.addresses import public_v4, public_v6

Found = tuple[int, int, str]
"""Start, end, and the value by which the same one is known again."""

_WORD = frozenset(string.ascii_letters + string.digits + "_")
"""Other letters may stand before a value: Chinese has no spaces."""
_LOCAL_BEFORE = _WORD | set(".%+-")
_IPV4_BEFORE = _WORD | set(".")
_IPV6_BEFORE = _WORD | set(".:")
_PHONE_BEFORE = _WORD | set("+-./")
_KEY_BEFORE = _WORD | set("-")

_LOCAL_CHARACTERS = 64
_LOCAL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._%+\-]{0,62}[A-Za-z0-9_%+\-])?\Z")
_DOMAIN = re.compile(r"@(?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,62})\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9_@])", re.ASCII)
_FILES = frozenset(
    ["png", "jpg", "jpeg", "gif", "svg", "webp", "avif", "ico", "js", "mjs", "css", "ts", "json", "html", "map", "pdf"]
)
"""Ends of names like `logo@2x.png`, which are files."""

_IPV4 = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}(?![0-9A-Za-z_]|\.[0-9]|-[A-Za-z])")
_IPV6 = re.compile(r"2[0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2,34}(?![0-9A-Za-z_:]|\.[0-9])")
_VERSION_WORD = re.compile(
    r"(?:\b(?:v|ver|vers|version|versions|release|build|revision|rev|firmware|section|chapter|sec)\.?[ :=]{0,3}"
    r"|§ ?|[A-Za-z]/)\Z",
    re.IGNORECASE | re.ASCII,
)
_VERSION_CHARACTERS = 16

_INTERNATIONAL = re.compile(r"\+[1-9][0-9 ().\-]{6,22}[0-9](?![0-9A-Za-z_])")
_NATIONAL = re.compile(
    r"(?:\([2-9][0-9]{2}\) ?[0-9]{3}[\-. ]|[2-9][0-9]{2}(?:-[0-9]{3}-|\.[0-9]{3}\.))[0-9]{4}"
    r"(?![0-9A-Za-z_\-]|\.[0-9])"
)
_ANY_NUMBER = re.compile(r"[0-9(][0-9 ()./\-]{5,20}[0-9](?![0-9A-Za-z_])")
_NAME_BEFORE = re.compile(
    r"\b(?:tel|telephone|phone|fax|mobile|cell|whatsapp)(?: ?(?:no|number))?\.?[ :]{1,3}\Z", re.IGNORECASE | re.ASCII
)
_NAME_CHARACTERS = 24
_DIGITS = re.compile("[0-9]+")
_MOST_GROUPS = 7
_MOST_DIGITS = 15

_SECRETS = [(needle, re.compile(rf"(?:{pattern})(?![A-Za-z0-9_\-])")) for needle, pattern in SERVICE_TOKENS]
_MIXED = [re.compile(pattern) for pattern in ("[a-z]", "[A-Z]", "[0-9]")]
_PEM_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_PEM_END = re.compile(r"-----END (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_PEM_CHARACTERS = 2**15

MASK = re.compile(r"<(?:email|ip|phone|secret):[0-9a-f]{6}>")
_MASK_CHARACTERS = 15


def _beside_mask(text: str, start: int, end: int) -> bool:
    """Tell whether a mask touches a place: nothing is found there, so that masks never uncover anything new."""
    if text[end : end + 1] == "<" and MASK.match(text, end):
        return True
    if start and text[start - 1] == ">":
        before = text[max(0, start - _MASK_CHARACTERS) : start]
        place = before.rfind("<")
        return place >= 0 and MASK.fullmatch(before, place) is not None
    return False


def emails(text: str) -> Iterator[Found]:
    """Addresses of mail. `git@HOST` is nobody's, and `logo@2x.png` a file."""
    if "@" not in text:
        return
    free = 0
    for domain in _DOMAIN.finditer(text):
        at, end = domain.span()
        local = _LOCAL.search(text, max(free, at - _LOCAL_CHARACTERS), at)
        if local is None or text[local.start() : at] == "git":
            continue
        start = local.start()
        if start == at - _LOCAL_CHARACTERS and start and text[start - 1] in _LOCAL_BEFORE:
            continue  # longer than any address
        if text[text.rindex(".", at, end) + 1 : end].lower() in _FILES or _beside_mask(text, start, end):
            continue
        free = end
        yield start, end, text[start:end].lower()


def ips(text: str) -> Iterator[Found]:
    """Public IPv4 and IPv6 addresses; numbers of versions and sections are none."""
    for match in _IPV4.finditer(text):
        start, end = match.span()
        if start and text[start - 1] in _IPV4_BEFORE:
            continue
        value = public_v4(match[0])
        if value is None or _VERSION_WORD.search(text, max(0, start - _VERSION_CHARACTERS), start):
            continue
        if not _beside_mask(text, start, end):
            yield start, end, value
    if ":" not in text:
        return
    for match in _IPV6.finditer(text):
        start, end = match.span()
        if start and text[start - 1] in _IPV6_BEFORE:
            continue
        value = public_v6(match[0])
        if value is not None and not _beside_mask(text, start, end):
            yield start, end, value


def phones(text: str) -> Iterator[Found]:
    """Telephone numbers: `+CC ...`, `(AAA) EEE-NNNN`, `AAA-EEE-NNNN`, and those behind a word like `tel.` too."""
    if "+" in text:
        yield from _numbers(text, _INTERNATIONAL, 8)
    yield from _numbers(text, _NATIONAL, 10)
    yield from _numbers(text, _ANY_NUMBER, 7, _NAME_BEFORE)


def _numbers(
    text: str, pattern: re.Pattern[str], fewest: int, before: re.Pattern[str] | None = None
) -> Iterator[Found]:
    """Matches of a pattern with as many digits as a telephone number has, behind what `before` matches."""
    for match in pattern.finditer(text):
        start, end = match.span()
        if before is not None and not before.search(text, max(0, start - _NAME_CHARACTERS), start):
            continue
        if start and text[start - 1] in _PHONE_BEFORE:
            continue
        groups = [each.span() for each in _DIGITS.finditer(text, start, end)]
        while len(groups) > _MOST_GROUPS or sum(end - start for start, end in groups) > _MOST_DIGITS:
            groups.pop()  # another number follows it
        if not groups:
            continue
        end = groups[-1][1]
        value = "".join([text[first:last] for first, last in groups])
        if len(value) < fewest or text.count("(", start, end) != text.count(")", start, end):
            continue
        if not _beside_mask(text, start, end):
            yield start, end, f"+{value}" if text[start] == "+" else value


def secrets(text: str) -> Iterator[Found]:
    """Keys and tokens of well-known services, web tokens, and private keys in PEM form."""
    for needle, pattern in _SECRETS:
        start = text.find(needle)
        while start >= 0:
            match = pattern.match(text, start) if _begins_word(text, start) else None
            if match is not None and (needle != "sk-" or all(each.search(match[0]) for each in _MIXED)):
                if not _beside_mask(text, start, match.end()):
                    yield start, match.end(), match[0]
                start = match.end() - 1
            start = text.find(needle, start + 1)
    if "PRIVATE KEY" in text:
        yield from _private_keys(text)


def _begins_word(text: str, start: int) -> bool:
    return start == 0 or text[start - 1] not in _KEY_BEFORE


def _private_keys(text: str) -> Iterator[Found]:
    ends = [match.end() for match in _PEM_END.finditer(text)]
    free = 0
    for begin in _PEM_BEGIN.finditer(text):
        place = bisect_right(ends, begin.end())
        if begin.start() < free or place == len(ends):
            continue
        if ends[place] - begin.start() <= _PEM_CHARACTERS and not _beside_mask(text, begin.start(), ends[place]):
            free = ends[place]
            yield begin.start(), free, text[begin.start() : free]


FINDERS: dict[str, Callable[[str], Iterator[Found]]] = {
    "secret": secrets,
    "email": emails,
    "ip": ips,
    "phone": phones,
}
"""By kind. Of two that overlap, the kind that stands first here is masked."""
