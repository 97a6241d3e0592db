"""Text in pieces: characters of several tokens, and stop strings wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.config.tokenizer import TokenizerConfig, TokenizerTrainConfig
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.eval.generation.detokenize import Detokenizer, StopStrings


class Bytes:
    """A token is a byte of UTF-8. Like SentencePiece, it drops the space that a text begins with."""

    end_of_document = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace").removeprefix(" ")


def pieces_of(tokens: Sequence[int], before: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(Bytes(), before)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


def test_a_character_comes_whole() -> None:
    text = " naïve 世界 🎉 end"
    pieces = pieces_of(text.encode(), b"say")
    assert [piece for piece in pieces if piece] == list(text)  # the leading space too, which decoding alone would lose


@given(st.binary(max_size=60), st.sampled_from(["", "a", "é ", "🎉", "a prompt of more tokens than count 世界"]))
@example(b"\xff" * 40 + "世".encode(), "a")
@example(b"\xe4\xb8" * 20 + "🎉".encode() * 4, "")
def test_pieces_join_to_the_text_of_the_tokens(data: bytes, prompt: str) -> None:
    """Any bytes, characters or not."""
    before = Bytes().encode(prompt) or [Bytes.end_of_document]
    expected = Bytes().decode([*before, *data])[len(Bytes().decode(before)) :]
    assert "".join(pieces_of(list(data), before)) == expected


def test_bytes_that_are_no_characters_do_not_hold_the_text_back() -> None:
    pieces = pieces_of([0xFF] * 100, b"a")
    assert len("".join(pieces[:-1])) >= 97


@given(st.text(max_size=30), st.integers(0, 10))
def test_a_tokenizer_of_the_pipeline(text: str, at: int) -> None:
    ids = _trained().encode(text)
    before = [_trained().end_of_document, *ids[:at]]
    detokenizer = Detokenizer(_trained(), before)
    joined = "".join(detokenizer.add(token) for token in ids[at:]) + detokenizer.finish()
    assert joined == _trained().decode([*before, *ids[at:]])[len(_trained().decode(before)) :]


def _trained(cache: list[Tokenizer] = []) -> Tokenizer:  # noqa: B006
    if not cache:
        texts = iter(["the cat sat on the mat, naïve 世界 🎉 " * 20])
        cache.append(Tokenizer.train(texts, TokenizerConfig(train=TokenizerTrainConfig(vocab_size=300))))
    return cache[0]


def cut(text: str, strings: Sequence[str]) -> str | None:
    """The text before the stop string that is complete first, the longest of several; None without one."""
    for end in range(len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            return text[: end - max(map(len, found))]
    return None


@given(
    st.text("ab", max_size=25),
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=25),
)
def test_stop_strings_wherever_pieces_begin(text: str, strings: list[str], sizes: list[int]) -> None:
    stop, given_out, place = StopStrings(strings), "", 0
    expected = cut(text, strings)
    for size in sizes * 25:
        if stop.found or place >= len(text):
            break
        given_out += stop.add(text[place : place + size])
        place += size
        assert text.startswith(given_out)
        if not stop.found:
            # Nothing is held back without need: it is the begin of a stop string.
            held = text[len(given_out) : place]
            assert held == "" or any(string.startswith(held) for string in strings)
    assert stop.found == (expected is not None)
    assert given_out + stop.finish() == (text if expected is None else expected)


@pytest.mark.parametrize(
    ("pieces", "strings", "expected"),
    [
        (["one STOP two"], ["STOP"], "one "),
        (["one S", "T", "OP two"], ["STOP"], "one "),
        (["one S", "T", "OK", " two"], ["STOP"], "one STOK two"),
        (["\n", "\nclass"], ["\n\n", "\nclass"], ""),
        (["aab"], ["ab"], "a"),
        (["x世", "界y"], ["世界"], "x"),
    ],
)
def test_stop_strings(pieces: list[str], strings: list[str], expected: str) -> None:
    stop = StopStrings(strings)
    given_out = ""
    for piece in pieces:
        if not stop.found:
            given_out += stop.add(piece)
    assert given_out + stop.finish() == expected
