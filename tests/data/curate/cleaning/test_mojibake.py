"""Repair of encodings."""

from __future__ import annotations

from importlib import metadata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config.curation.curate import CleanConfig
from pipeline.data.curate.cleaning import mojibake
from pipeline.data.curate.cleaning.clean import Cleaner

GOOD = [
    "naïve café – “quoted” … ½",
    "Größe: 5 µm, Straße",
    "Привет, мир",
    "中文，日本語です",
    "مرحبا",
    "ﬁ ＦＵＬＬ &amp; &eacute; <b>x</b>",
    "\x1b[31mred\x1b[0m é",
    "tab\there\r\nand é\u2028there",
]
"""Texts that are right as they are."""


@pytest.fixture(scope="module")
def cleaner() -> Cleaner:
    return Cleaner(CleanConfig(mojibake=True), 0)


@pytest.mark.parametrize("text", GOOD)
def test_good_text_stays(text: str, cleaner: Cleaner) -> None:
    assert cleaner.clean(text) == text


@pytest.mark.parametrize("text", ["naïve café – “quoted”", "Größe und Straße", "Привет, мир, как дела", "déjà vu…"])
@pytest.mark.parametrize("encoding", ["latin-1", "windows-1252"])
def test_text_that_was_decoded_wrongly_is_repaired(text: str, encoding: str, cleaner: Cleaner) -> None:
    try:
        wrong = text.encode().decode(encoding)
    except UnicodeDecodeError:
        pytest.skip("windows-1252 lacks a byte of it")
    assert cleaner.clean(wrong) == text
    # Each line is repaired alone, whatever else there is.
    assert cleaner.clean(f"{GOOD[0]}\n{wrong}\nplain &amp; <i>") == f"{GOOD[0]}\n{text}\nplain &amp; <i>"


def test_ascii_is_not_looked_at(cleaner: Cleaner, monkeypatch: pytest.MonkeyPatch) -> None:
    import ftfy

    monkeypatch.setattr(ftfy, "fix_encoding", lambda *_: pytest.fail("asked for ASCII"))
    text = "plain text\n&amp; \x1b[0m" * 10
    assert cleaner.clean(text) is text


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from([*GOOD, "Ã©", "â€™", "Â ", "\x85", "\x92", "Ð¿", "í\xa0\xbd", "a", " ", "\n"])).map(
        "".join
    )
)
def test_repaired_text_is_text_and_stays(text: str) -> None:
    one = Cleaner(CleanConfig(mojibake=True), 0)
    once = one.clean(text)
    once.encode()
    assert once.count("\n") == text.count("\n")
    assert one.clean(once) == once


def test_settings_name_the_version(cleaner: Cleaner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cleaner.settings()["mojibake"]["ftfy"] == metadata.version("ftfy")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(mojibake.metadata, "version", missing)
    with pytest.raises(UserError, match=r"data\.curate\.clean\.mojibake needs ftfy: pip install"):
        Cleaner(CleanConfig(mojibake=True), 0)
