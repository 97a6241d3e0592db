"""Texts on which tokenizers disagree, if they ever do. Always the same ones for one tokenizer.

They are made, not collected: every script, whitespace of all kinds and lengths, numbers, contractions, special-token
text whole and cut, emoji, unbroken words, code, variants of normalisation, and compositions of all of these.
"""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.common.hashing import key, keyed_order, mix
from pipeline.data.tokenization.tokenizer import Tokenizer

RUN = 2**16
"""Characters of the long runs."""
COMPOSED = 20_000
"""Compositions in the long set."""

_SPACES = "\t\n\x0b\x0c\r\x1c\x1f \x85\xa0\u1680\u2000\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
_ENDS = ("\n", "\r", "\r\n", "\n\r", "\x85", "\u2028", "\u2029", "\x0b", "\x0c")
_INVISIBLE = (
    "\x00\ufeff\u200b\u200c\u200d\u200e\u200f\u202a\u202e\u2060\u2066\u2069\u00ad\u180e\ufe0e\ufe0f\u034f\u061c"
)
_EDGES = (
    "\x00\x7f\x80\xff\u0100\u07ff\u0800\ud7ff\ue000\uf8ff\ufdd0\ufdef\ufffc\ufffd\ufffe\uffff"
    "\U00010000\U0001fffe\U0010ffff"
)
_MARKS = (
    "\u0300\u0301\u0308\u0323\u0345\u05b0\u064b\u093c\u094d\u0e31\u1ab0\u20d0\u20e3\u3099\ufe20\U0001d165\U000e0100"
)
_DIGITS = ("٠١٢٣", "०१२", "๐๑", "０１２", "Ⅷↈ", "²³¹", "½¾⅐", "①⑳", "一二三", "𝟘𝟙", "𐒠𐒡", "〇", "௧௰", "߀߁")
_CONTRACTIONS = ("s", "t", "re", "ve", "m", "ll", "d", "n't", "em", "clock", "ſ", "sé", "re5", "LL", "Ve", "rE", "D")
_WORDS = (
    "the", "Hello", "WORLD", "iPhone", "don't", "naïve", "Straße", "ﬁn", "İstanbul", "ǅungla", "ΑΣ", "σς", "Привет",
    "שלום", "مرحبا", "مرحباً", "हिन्दी", "ภาษาไทย", "မြန်မာ", "ខ្មែរ", "தமிழ்", "中文字", "日本語です", "カタカナ", "ｶﾞ",
    "한국어", "각", "Tiếng", "Việt", "ქართული", "አማርኛ", "ᏣᎳᎩ", "𐐷𐑌", "𝔘𝔫𝔦", "Ⓐ", "a\u0301", "q\u0323\u0307", "e", "I",
)  # fmt: skip
_EMOJI = (
    "😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "🇩", "1️⃣", "❤️", "❤", "👨🏿‍🦰", "🏴\U000e0067\U000e0062\U000e007f",
    "☺︎", "🫠", "〰️", "\U0001f3fb",
)  # fmt: skip
_TEXTS = (
    "def f(x: int = 0) -> dict[str, Any]:\n\treturn {'a': x**2, \"b\": [1, 2.5e-10, 0xFF]}  # why?\n\n\n   class A: 0",
    "for(int i=0;i<n;++i){a[i]+=*p++;}/* x */\r\n#include <vector>\r\n\r\n\r\nint main(){return 0;}",
    '{"key": "v\\u00e9\\n\\"", "n": [1,2,3.14,-0.0,1e999,null,true], "": {}}',
    "https://user:pw@example.com:8080/a/b%20c/?q=1&r=%E2%9C%93#frag www.x.org/~u file:///C:\\Users\\x\\n",
    "<html><body class='a b'>&nbsp;&#x27;</body></html><!-- -- -->]]>",
    "| a | b |\n|---|:-:|\n| 1 | **2** |\n\n- [ ] x\n  1. y\n```sh\n$ ls -la | grep '^d' && echo \"$HOME\"\n```",
    "$E = mc^2$, \\frac{a}{b} ∑∫√∞ ≠ ± × ÷ ° ‰ € £ ¥ ₹ № ™ © ® § ¶ † … – — ― ‘ ’ “ ” « » ‹ › ¿ ¡",
    "Dr. O'Neill's 3rd book, \"It's 5 o'clock\", isn't $1,234,567.89 at 12:30 on 2024-02-29T00:00Z +1 (555) 01-99.",
    "AbCdEfG aBC ABc ABCdef getHTTPResponse snake_case kebab-case __init__ SCREAMING_CASE x1y2z3 H2O 3D 1st",
    "\x1b[31mred\x1b[0m \a\b\x7f\t|\x00end\x00\x00",
    "日本語とEnglishが混ざる文章。「引用」、カタカナ！？ＦＵＬＬ　ＷＩＤＴＨ１２３ 中英mixed文本，标点。",
    "עברית English עברית 123 \u202bمختلط\u202c abc ٣٤٥ \u200fend",
    "!!! ??? ... ,,, ;;; ::: --- === *** ### @@@ &&& %%% $$$ ~~~ ``` ||| \\\\\\ /// ((( ))) [[]] {{}} <<>> != <= ->",
)  # fmt: skip


def hard_texts(tokenizer: Tokenizer, long: bool) -> list[str]:
    """The quick set (some 200 KB), or the long one with all that the quick one has.

    Args:
        tokenizer: its added tokens are part of the texts, and of the long set a sample of its vocabulary.
        long: the long set.
    """
    names = _sample([*tokenizer.special_tokens, *tokenizer.added_tokens], 256 if long else 16, "added tokens")
    names = list(dict.fromkeys([tokenizer.end_of_document_token, *tokenizer.allow_special, *names]))
    pieces = list(dict.fromkeys([*_pieces(), *_of_names(names)]))
    # Every piece at the beginning, in the middle and at the end, beside a letter, a digit, itself and spaces.
    texts = ["", *_TEXTS, *(f"{p}a{p}b {p}1{p}{p}\n {p}" for p in pieces), *_scripts(long)]
    texts += [" " * RUN, "\n \t" * 500 + "x", "ab" * (RUN // 2), "7" * 1000]
    if not long:
        return texts
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        texts += [unicodedata.normalize(form, text) for text in (*_TEXTS, *_WORDS, " ".join(_WORDS))]
    for unit in (*_SPACES, "\r\n", " \n", " \t\u3000\n", "a", "é", "漢", "ก", "0", "!", "'s", "\x00", "😀", "\u0301"):
        texts += [before + unit * n + after for n in (3, 17, 100) for before in ("", "x") for after in ("", "y", " ")]
        texts += [unit * 4096, f"x{unit * 4095}y"]
    texts += [
        (unit * RUN)[:RUN] for unit in ("\n", "\t ", "\r\n", "\u3000", _SPACES, "Ab", "漢", "1", "<|", "\x00", "é")
    ]
    texts += [base64.b64encode(mix(np.arange(n, dtype=np.uint64), 1).tobytes()).decode() for n in (1, 10, 100, 1000)]
    texts += [unit[:i] for unit in ("9" * 40, "x" * 40, "é" * 40, "字" * 40) for i in range(1, 41)]
    ids = _sample(range(tokenizer.vocab_size), 4096, "vocabulary")
    words = [tokenizer.decode([i]) for i in ids]
    texts += _composed(pieces, COMPOSED // 2, "pieces")
    return texts + _composed([*pieces, *words], COMPOSED - COMPOSED // 2, "pieces and vocabulary")


def _pieces() -> list[str]:
    """Short strings that have their own rules in some tokenizer."""
    latin = [chr(c) for c in range(256)]
    spaces = [c * n for c in (" ", "\n", "\t", "\r\n", "\u3000") for n in range(2, 10)]
    cases = [case(c) for c in _CONTRACTIONS for case in (str, str.upper, str.title, lambda c: c.title().swapcase())]
    contractions = [a + c for a in ("'", "\u2019", " '", "x'") for c in cases]
    marks = [base + mark for base in "ae \u5b57" for mark in _MARKS]
    numbers = ["1234567890123456789012345"[:n] for n in range(1, 25)]
    forms = [unicodedata.normalize(form, word) for form in ("NFD", "NFKC") for word in _WORDS]
    flat = (*latin, *_SPACES, *_ENDS, *_INVISIBLE, *_EDGES, *spaces, *contractions, *marks, *numbers, *_DIGITS)
    return [*flat, *_WORDS, *forms, *_EMOJI]


def _of_names(names: Sequence[str]) -> Iterator[str]:
    """Text of added tokens: whole, twice, cut, in another case, with spaces, inside of each other."""
    for name in names:
        middle = len(name) // 2
        yield from (name, name * 2, f" {name} ", name[:-1], name[1:], name[:middle], name[middle:], name.upper())
        yield from (name[:middle] + name + name[middle:], f"{name[:middle]} {name[middle:]}", f"{name}\n{name[:-1]}")


def _scripts(long: bool) -> Iterator[str]:
    """All assigned characters but for most of private use; in the quick set one of every 128 code points."""
    step, row = (1, 16) if long else (8, 128)
    for start in range(0, 0x110000, row):
        if start >= 0x34000 and start >> 12 != 0xE0 and start % 0x1000:
            continue  # nothing is assigned there but private use
        characters = [
            chr(c) for c in range(start, start + row, step) if unicodedata.category(chr(c)) not in ("Cn", "Cs")
        ]
        if characters:
            one = characters[int(mix(np.array([start], np.uint64), 2)[0] % np.uint64(len(characters)))]
            yield f"a{''.join(characters) if long else one + characters[0]} {one} 1{one}{one}b.{one}"


def _sample(values: Sequence[Any], most: int, name: str) -> list[Any]:
    """All of them, or a keyed sample."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in sorted(keyed_order(len(values), key(name))[:most].tolist())]


def _composed(pieces: Sequence[str], count: int, name: str) -> list[str]:
    """Each of 1 to 8 pieces, chosen by key."""
    numbers = mix(np.arange(count * 9, dtype=np.uint64), key(name)).reshape(count, 9)
    counts = (numbers[:, 8] % np.uint64(8) + np.uint64(1)).tolist()
    chosen = (numbers[:, :8] % np.uint64(len(pieces))).tolist()
    return ["".join([pieces[i] for i in row[:n]]) for row, n in zip(chosen, counts, strict=True)]
