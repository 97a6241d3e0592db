"""Lines that C4 and RefinedWeb remove."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.curate.cleaning.lines import clean_lines, line_settings, removed_lines
from tests.data.curate.measures.mixed_texts import anything, mixed

PRESETS = [["c4"], ["refinedweb"], ["c4", "refinedweb"], ["refinedweb", "c4"]]
PROSE = " ".join(["Words of a document that stay, and keep the flagged ones below one in twenty."] * 20)

C4 = {
    "Three whole words.": "",
    "  Three whole words?\t": "",
    "He said “three whole words.”": "",
    "Two words.": "c4.few_words",
    "No mark at the end": "c4.no_terminal_mark",
    "To be continued...": "c4.no_terminal_mark",
    "To be continued…": "c4.no_terminal_mark",
    "": "c4.blank",
    " \t ": "c4.blank",
    "Please enable JavaScript in your browser.": "c4.javascript",
    "Read our Privacy Policy before you go.": "c4.policy",
    f"A word of {'x' * 1000} characters.": "",
    f"A word of {'x' * 1001} characters.": "c4.long_word",
    "今日は。'": "",
}
REFINEDWEB = {
    "A line like others": "",
    "": "",
    "ALL OF THIS is": "refinedweb.uppercase",
    "HALF of it": "",
    "2024-01-02 12:30": "refinedweb.number",
    "--- ---": "",
    "3 likes": "refinedweb.counter",
    "1.2k Followers": "refinedweb.counter",
    "We had 3 likes": "",
    "Word": "refinedweb.one_word",
    "---": "refinedweb.one_word",
    "Sign in to see more": "refinedweb.phrase",
    "Log-in or register": "refinedweb.phrase",
    "The rest of it, read more...": "refinedweb.phrase",
    "There are 2 items in cart now": "refinedweb.phrase",
    "Signs in the window were lit": "",
    "Sign in to see more of all that there is here": "",
    "今日": "",
}


@pytest.mark.parametrize(("line", "rule"), C4.items())
def test_c4(line: str, rule: str) -> None:
    assert removed_lines(line, ["c4"]) == ([(1, rule)] if rule else [])


@pytest.mark.parametrize(("line", "rule"), REFINEDWEB.items())
def test_refinedweb(line: str, rule: str) -> None:
    text = f"{PROSE}\n{line}\n\n{PROSE}"
    assert removed_lines(text, ["refinedweb"]) == ([(2, rule)] if rule else [])


def test_document_of_flagged_lines_goes() -> None:
    nineteen = "one two three four five six seven eight nine ten one two three four five six seven eight nine"
    assert clean_lines(f"{nineteen}\n\nWord", ["refinedweb"]) == f"{nineteen}\n"
    eighteen = nineteen.removesuffix(" nine")
    assert clean_lines(f"{eighteen}\n\nWord", ["refinedweb"]) == ""
    assert removed_lines(f"{eighteen}\n\nWord", ["refinedweb"]) == [
        (1, "refinedweb.document"),
        (2, "refinedweb.document"),
        (3, "refinedweb.one_word"),
    ]


def test_presets_follow_each_other() -> None:
    text = f"{PROSE}\nWORDS IN UPPER CASE.\nlower case\n\n{PROSE}"
    assert removed_lines(text, ["c4", "refinedweb"]) == [
        (2, "refinedweb.uppercase"),
        (3, "c4.no_terminal_mark"),
        (4, "c4.blank"),
    ]
    assert clean_lines(text, ["c4", "refinedweb"]) == f"{PROSE}\n{PROSE}"
    assert clean_lines(text, []) == text and removed_lines(text, []) == []


def test_lines_that_stay_are_as_they_were() -> None:
    assert clean_lines("  Indented as it was.\r\nno\n\x85Words\x0bof a line. ", ["c4"]) == (
        "  Indented as it was.\r\n\x85Words\x0bof a line. "
    )


@pytest.mark.parametrize("presets", PRESETS, ids="-".join)
@settings(deadline=None, max_examples=60)
@given(
    text=st.one_of(
        mixed, anything, st.lists(st.sampled_from([*C4, *REFINEDWEB, "x " * 60 + "y."]), max_size=30).map("\n".join)
    )
)
def test_cleaning_twice_changes_nothing(presets: list[str], text: str) -> None:
    cleaned = clean_lines(text, presets)
    assert clean_lines(cleaned, presets) == cleaned
    removed = dict(removed_lines(text, presets))
    assert cleaned == "\n".join(line for n, line in enumerate(text.split("\n"), 1) if n not in removed)


def test_settings() -> None:
    assert line_settings([]) == {}
    assert line_settings(["c4"])["presets"] == [["c4", 1]]
    assert line_settings(["c4", "refinedweb"]) != line_settings(["refinedweb", "c4"])


@pytest.mark.guard
def test_hostile_lines_take_linear_time() -> None:
    # In quadratic time these would take hours.
    for text in ("x" * 10**6, "." * 10**6, "1" * 10**6, " " * 10**6, "read more" + "!" * 10**6 + "x", "\n" * 10**6):
        for presets in PRESETS:
            assert clean_lines(text, presets) in ("", text)
