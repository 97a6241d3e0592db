"""Tokenizers of other libraries: the ids stay, and what cannot be converted exactly is refused."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.common.errors import UserError
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.tokenization.conversion.from_bytes import PATTERNS, PUBLISHED, alphabet, from_tiktoken
from pipeline.data.tokenization.conversion.from_pieces import from_pieces
from pipeline.data.tokenization.conversion.merge_order import ordered_merges
from pipeline.data.tokenization.conversion.piece_file import MAX_PIECE, read_pieces
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.data.tokenization import foreign_files as made
from tests.data.tokenization.foreign_files import SPACE, SPECIAL, scored
from tests.data.tokenization.tokenizers_of_all_kinds import END, TEXTS, byte_level

PIECES = ["ab", f"{SPACE}ab", "aba", "ba", f"{SPACE}{SPACE}", "abab", *"ab", SPACE, "c"]
BYTES = [bytes([byte]) for byte in range(256)]


def run(*words: object) -> tuple[int, str]:
    """A command, its code and what it printed."""
    done = CliRunner().invoke(app, ["convert", "tokenizer", *map(str, words)], env={"COLUMNS": "500"})
    if isinstance(done.exception, UserError):
        return done.exception.exit_code, done.output + str(done.exception)
    return done.exit_code, done.output


def loaded(path: Path, end: str = "</s>") -> Tokenizer:
    return Tokenizer.load(path, TokenizerConfig(path=path, end_of_document=end))


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("seed", range(30))
def test_merges_in_any_order_give_what_joining_by_score_gives(seed: int) -> None:
    chosen = random.Random(seed)
    words = {"".join(word) for n in range(2, 7) for word in itertools.product("ab", repeat=n)}
    pieces = ["a", "b", *chosen.sample(sorted(words), 12)]
    scores = {piece: chosen.random() for piece in pieces}
    merges = ordered_merges(scores)
    assert not merges.doubts
    engine = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges.pairs))
    for text in map("".join, itertools.chain.from_iterable(itertools.product("ab", repeat=n) for n in range(1, 11))):
        assert engine.encode(text).tokens == made.joined(list(text), scores), text


def test_pieces_of_equal_score_are_doubts_but_for_runs_that_are_compared() -> None:
    assert "'ab', 'ba' have the same score" in ordered_merges({"a": 0, "b": 0, "ab": -1, "ba": -1}).doubts[0]
    spaces = ordered_merges({"a": 0, "aa": -1, **{" " * n: -9.0 for n in range(1, 6)}})
    assert not spaces.doubts and spaces.runs == {" ": 5}
    assert ordered_merges({" ": 0, "  ": -1, "   ": -1, "    ": -2}).doubts


def test_a_sentencepiece_model(tmp_path: Path) -> None:
    file = write(tmp_path / "a.model", made.model(scored(PIECES)))
    code, text = run(file, tmp_path, "--unproven")
    assert code == 0 and "not proven" in text, text
    own = loaded(tmp_path / "tokenizer.json")
    entries = [name for name, _, _ in scored(PIECES)]
    scores = {name: score for name, score, _ in scored(PIECES)[3:]}
    for text in ("", "ab", " ab", "abababa", "a  b   ab  ", "cab c", "  "):
        plain = (SPACE + text if text else "").replace(" ", SPACE)
        assert own.encode(text) == [entries.index(each) for each in made.joined(list(plain), scores)], text
        assert own.decode(own.encode(text)) == text
    assert own.encode("axyb") == [*own.encode("a"), 0, entries.index("b")], "unknown characters are one token"
    assert own.added_tokens == ["<unk>", "<s>", "</s>"]
    assert 2 not in own.encode("a</s>b")


def test_symbols_of_the_user_and_spaces_that_are_removed(tmp_path: Path) -> None:
    symbols = [("[x]", 0.0, made.USER_DEFINED), ("[xy]", 0.0, made.USER_DEFINED)]
    file = write(tmp_path / "a.model", made.model([*scored(PIECES), *symbols], normalizer=made.flag(3, 0)))
    assert run(file, tmp_path / "t.json", "--unproven")[0] == 0
    own = loaded(tmp_path / "t.json")
    names = [name for name, _, _ in [*scored(PIECES), *symbols]]
    assert [names[i] for i in own.encode("  [x]ab   [xy]  ")] == ["[x]", "ab", SPACE, "[xy]"]


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("removed", [0, 1])
def test_spaces_and_their_mark_in_all_orders(tmp_path: Path, prefix: int, removed: int) -> None:
    """SentencePiece removes spaces before it replaces them, but those at the end after that."""
    pieces = [*scored(PIECES), (f"{SPACE}a", -2.5, made.NORMAL)]
    data = made.model(pieces, normalizer=made.flag(3, prefix) + made.flag(4, removed))
    file = write(tmp_path / "a.model", data)
    assert run(file, tmp_path / "t.json", "--unproven")[0] == 0
    own = loaded(tmp_path / "t.json")
    texts = ["".join(each) for n in range(7) for each in itertools.product(("a", " ", SPACE), repeat=n)]
    hard = from_pieces(data, file).hard
    assert {each for each in texts if 0 < len(each) < 6} <= {*hard}, "the proof compares them"
    entries, scores = [name for name, _, _ in pieces], {name: score for name, score, _ in pieces[3:]}
    expected = []
    for text in texts:
        plain = re.sub(" +", " ", text.lstrip(" ")) if removed else text
        plain = (SPACE * bool(plain and prefix) + plain).replace(" ", SPACE)
        plain = plain.rstrip(SPACE) if removed else plain
        expected.append([entries.index(each) for each in made.joined([*plain], scores)])
    assert [each.tolist() for each in own.encode_batch(texts)] == expected
    spm = pytest.importorskip("sentencepiece")
    assert spm.SentencePieceProcessor(model_proto=data).encode(texts) == expected


CANNOT = {
    "truncated": (made.model(scored(PIECES))[:-3], "truncated|middle of a number"),
    "no model": (b"PK\x03\x04 something else", "wire type|truncated|field"),
    "empty": (b"", "no pieces"),
    "a piece twice": (made.model(scored(["a", "a"])), "pieces 3 and 4 are both 'a'"),
    "not UTF-8": (made.piece(b"\xff\xfe", 0.0), "piece 0 is not UTF-8"),
    "a huge piece": (made.piece("a" * (MAX_PIECE + 1), 0.0), "has 513 characters"),
    "a huge size": (made.varint(10) + made.varint(2**40) + b"a", "1,099,511,627,776 bytes"),
    "a number without an end": (b"\x08" + b"\xff" * 20, "more than ten bytes"),
    "a score that is none": (made.piece("a", float("nan")), "score nan"),
    "a type that is none": (made.piece("a", 0.0, 9), "the type 9"),
    "two unknown pieces": (made.model([*SPECIAL, ("x", 0.0, made.UNKNOWN)]), "2 pieces for unknown text"),
    "bytes that are missing": (made.model(scored(["a"]), trainer=made.flag(35, 1)), "256 of the 256 bytes"),
    "pieces of the type unused": (made.model([*scored(["a"]), ("b", 0.0, made.UNUSED)]), "UNUSED"),
    "spaces behind words": (made.model(scored(["a"]), trainer=made.flag(24, 1)), "treat_whitespace_as_suffix"),
    "spaces that stay": (made.model(scored(["a"]), normalizer=made.flag(5, 0)), "escape_whitespaces"),
    "a symbol that ends with a space": (
        made.model([*scored(["a"]), (f"a{SPACE}", 0.0, made.USER_DEFINED)], normalizer=made.flag(3, 0)),
        "a symbol of its own that ends with",
    ),
    "words": (made.model(scored(["a"]), trainer=made.flag(3, 3)), "model_type is word"),
    "characters": (made.model(scored(["a"]), trainer=made.flag(3, 4)), "model_type is char"),
    "no end": (made.model(scored(["a"]), trainer=made.flag(42, 1)), "give --end-of-document, like"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_is_refused_leaves_nothing(tmp_path: Path, case: str) -> None:
    data, reason = CANNOT[case]
    file = write(tmp_path / "a.model", data)
    code, text = run(file, tmp_path / "t.json", "--unproven")
    assert code == 2
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(text)
    assert str(file) in text
    assert list(tmp_path.iterdir()) == [file]


def test_every_cut_and_every_changed_byte_is_an_error_or_a_model(tmp_path: Path) -> None:
    data = made.model(scored(PIECES), trainer=made.block(47, b"</s>"))
    chosen = random.Random(1)
    changed = [data[:at] + bytes([chosen.randrange(256)]) + data[at + 1 :] for at in range(len(data))]
    for each in (*(data[:at] for at in range(len(data))), *changed):
        try:
            assert read_pieces(each, Path("it")).pieces
        except UserError as error:
            assert "it cannot be read as a .model" in str(error)


def test_where_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.model", made.model(scored(PIECES)))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    code, text = run(file, tmp_path / "t.json")
    assert code == 2 and "[convert]'" in text and "--unproven" in text
    assert "--unproven leaves that out" in run(file, tmp_path / "t.json", "--unproven", "--text", file)[1]
    assert "make it first" in run(file, tmp_path / "no" / "t.json", "--unproven")[1]
    assert "--pattern is for" in run(file, tmp_path / "t.json", "--pattern", "gpt2")[1]
    assert "--merges goes with" in run(file, tmp_path / "t.json", "--merges", file)[1]
    assert [*tmp_path.iterdir()] == [file]
    assert run(file, tmp_path / "t.json", "--unproven")[0] == 0
    assert "exists" in run(file, tmp_path / "t.json", "--unproven")[1]
    assert "is a tokenizer.json already" in run(tmp_path / "t.json", tmp_path / "u.json")[1]


def test_ranks_of_tiktoken(tmp_path: Path) -> None:
    tokens = [*BYTES, b"ab", b"ba", b" a", b"aba", "é".encode(), b"the"]
    file = made.tiktoken_file(tmp_path / "a.tiktoken", tokens)
    assert "--pattern" in run(file, tmp_path / "t.json", "--unproven")[1]
    words = ("--pattern", "cl100k", "--unproven")
    assert "names no token" in run(file, tmp_path / "t.json", *words)[1]
    code, text = run(file, tmp_path / "t.json", *words, "--special", f"{END}=300", "--end-of-document", END)
    assert code == 0, text
    own = loaded(tmp_path / "t.json", END)
    assert own.end_of_document == 300 and own.vocab_size == 301
    assert own.encode("abaab aé") == [tokens.index(each) for each in (b"aba", b"ab", b" a", "é".encode())]
    assert own.encode("the") == [tokens.index(b"the")], "a whole word needs no merges"
    assert 300 not in own.encode(END)


BAD_RANKS = {
    "no base64": ([b"YQ== 0", b"Y 1"], "is not base64|is not a token"),
    "twice": ([b"YQ== 0", b"YQ== 1"], "stands twice"),
    "no rank": ([b"YQ== 0", b"Yg=="], "line 2"),
    "a huge rank": ([b"YQ== 0", b"Yg== 9999999999"], "ranks are below"),
    "bytes are missing": ([b"YQ== 0"], "no token for 255"),
    "one rank": ([b"YQ== 0", b"Yg== 0"], "gives a rank to two"),
}


@pytest.mark.parametrize("case", BAD_RANKS)
def test_bad_ranks(tmp_path: Path, case: str) -> None:
    lines, reason = BAD_RANKS[case]
    file = write(tmp_path / "a.tiktoken", b"\n".join(lines))
    code, text = run(file, tmp_path / "t.json", "--pattern", "gpt2", "--unproven")
    assert code == 2 and [*tmp_path.iterdir()] == [file]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(text)


@pytest.mark.parametrize("pattern", [r"\p{N}{1,3}+|.", r"\s+$", r"^a|b"])
def test_patterns_that_another_engine_reads_otherwise(pattern: str) -> None:
    data = b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(BYTES))
    with pytest.raises(UserError, match="--pattern has a"):
        from_tiktoken(data, Path("it"), pattern, {})
    assert from_tiktoken(data, Path("it"), r"[^a$]+\$|\p{L}++|\s++", {}).size == 256


def test_tekken(tmp_path: Path) -> None:
    file = made.tekken_file(tmp_path / "tekken.json", [*BYTES, b"ab", b"dropped"], 20)
    value = json.loads(file.read_text())
    value["config"]["default_vocab_size"] -= 1
    file.write_text(json.dumps(value))
    code, text = run(file, tmp_path / "t.json", "--unproven")
    assert code == 0 and "mistral-common" in text, text
    own = loaded(tmp_path / "t.json")
    assert own.vocab_size == 277 and own.end_of_document == 2
    assert own.encode("ab c") == [276, 20 + 32, 20 + ord("c")]
    value["special_tokens"] = [{"rank": 2, "token_str": "<end>"}]
    file.write_text(json.dumps(value))
    assert "names no token" in run(file, tmp_path / "u.json", "--unproven")[1]
    assert run(file, tmp_path / "u.json", "--unproven", "--end-of-document", "<end>")[0] == 0
    file.write_text(json.dumps({"config": {}}))
    assert "is not a tekken.json" in run(file, tmp_path / "v.json")[1]


def gpt2_files(folder: Path, engine: tokenizers.Tokenizer) -> Path:
    engine.model.save(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocab | {"<|more|>": len(vocab)}))
    return folder / "vocab.json"


def test_vocabulary_and_merges(tmp_path: Path) -> None:
    engine = byte_level()
    file = gpt2_files(tmp_path, engine)
    code, text = run(file, tmp_path / "t.json", "--unproven")
    assert code == 0, text
    own = loaded(tmp_path / "t.json", END)
    assert own.encode_batch(TEXTS)[7].tolist() == engine.encode(TEXTS[7]).ids
    assert own.added_tokens == [END, "<|sep|>", "<|pad|>", "<|more|>"]
    merges = (tmp_path / "merges.txt").read_text().splitlines()
    for lines, reason in {
        (*merges, merges[-1]): "stands twice",
        (*merges, "q"): "is not two tokens",
        (*merges, "q zz"): "is not in",
        ("#version: 0.2",): "has no merges",
    }.items():
        (tmp_path / "merges.txt").write_text("\n".join(lines))
        assert reason in run(file, tmp_path / "u.json", "--unproven")[1]
    (tmp_path / "merges.txt").unlink()
    assert "give --merges" in run(file, tmp_path / "u.json", "--unproven")[1]


def test_the_alphabet_of_bytes_is_that_of_the_library() -> None:
    assert set(alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) and len(set(alphabet())) == 256


def test_published_patterns_are_those_of_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tiktoken")
    from tiktoken_ext import openai_public

    hashes: dict[str, str] = {}

    def remember(blob: str, expected_hash: str) -> dict[bytes, int]:
        hashes[blob] = expected_hash
        return {}

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", remember)
    import tiktoken

    ranks = {token: i for i, token in enumerate(BYTES)}
    for digest, (name, pattern, special) in PUBLISHED.items():
        theirs = getattr(openai_public, name)()
        assert hashes.popitem()[1] == digest and theirs["special_tokens"] == special
        encodings = [
            tiktoken.Encoding("it", pat_str=each, mergeable_ranks=ranks, special_tokens={})
            for each in (PATTERNS[pattern], theirs["pat_str"])
        ]
        for text in (*TEXTS[:3], "a\n\n \n b  \t\nc   ", "It'S 12345 ½ x\r\n\r\n/", "\u3000\u00a0x ſ'ſ \n"):
            mine, other = [encoding._core_bpe.encode_ordinary(text) for encoding in encodings]
            assert mine == other


def trained(path: Path, **options: Any) -> Path:
    """A model that SentencePiece trains itself."""
    spm = pytest.importorskip("sentencepiece")
    lines = [line for text in TEXTS for line in text.split("\n") if line.strip()]
    lines += ["<a> a/b"] * 9 + [" " * n + "return x" for n in range(2, 40)] + ["-" * n for n in range(3, 30)]
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        **{
            "vocab_size": 420,
            "model_type": "bpe",
            "normalization_rule_name": "identity",
            "byte_fallback": True,
            "remove_extra_whitespaces": False,
            "allow_whitespace_only_pieces": True,
            "hard_vocab_limit": False,
            "minloglevel": 2,
            **options,
        },
    )
    return write(path, out.getvalue())


SYMBOLS = ["[A]", "[AB]"]
TRAINED: dict[str, tuple[dict[str, Any], str]] = {
    "spaces are kept": ({}, ""),
    "spaces are removed": ({"remove_extra_whitespaces": True}, ""),
    "no bytes": ({"byte_fallback": False, "character_coverage": 0.98}, ""),
    "symbols": ({"user_defined_symbols": [*SYMBOLS, "\n"], "add_dummy_prefix": False}, ""),
    "symbols behind a prefix": ({"user_defined_symbols": SYMBOLS}, "2 of .* hard texts and 0 of .*lacks the first"),
    "replaced characters": ({"normalization_rule_name": "nmt_nfkc"}, "drops a mark behind"),
    "unigram": ({"model_type": "unigram", "vocab_size": 400, "character_coverage": 1.0}, "paths of equal score"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if i else pytest.mark.guard) for i, case in enumerate(TRAINED)]
)
def test_ids_are_those_of_sentencepiece(tmp_path: Path, case: str) -> None:
    options, reason = TRAINED[case]
    file = trained(tmp_path / "a.model", **options)
    words = write(tmp_path / "text", "\n".join(TEXTS).encode() + b"\xc3\xa9" * 2**17)
    code, text = run(file, tmp_path / "t.json", "--text", words)
    assert (tmp_path / "t.json").exists() == (not reason) == (code == 0), text
    if not reason:
        assert "0 of" in text and "lines (0.3 MB) differ" in text
        return
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(text)
    most = text.rpartition("--allow ")[2].split()[0]
    assert run(file, tmp_path / "t.json", "--text", words, "--allow", int(most) - 1)[0] == 2
    assert run(file, tmp_path / "t.json", "--text", words, "--allow", most)[0] == 0


@pytest.mark.guard
def test_runs_of_pieces_that_have_one_score(tmp_path: Path) -> None:
    """As in models of the Llama kind; SentencePiece merges the leftmost pair there, whatever its length."""
    spm = pytest.importorskip("sentencepiece")
    runs = [SPACE * n for n in (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11)]
    pieces = [*scored(["ab", f"{SPACE}ab"]), *((run_, -1e9, made.NORMAL) for run_ in [*runs, SPACE])]
    letters = [(letter, -1e6 - i, made.NORMAL) for i, letter in enumerate("abcdxyz1.\n")]
    data = made.model([*pieces, *letters])
    file = write(tmp_path / "a.model", data)
    code, text = run(file, tmp_path / "t.json")
    assert code == 0, text
    own, theirs = loaded(tmp_path / "t.json"), spm.SentencePieceProcessor(model_proto=data)
    texts = [before + " " * n + after for n in range(1, 200) for before in ("", "x") for after in ("", "ab", "1")]
    assert [each.tolist() for each in own.encode_batch(texts)] == theirs.encode(texts)
    # In the order of 16, 2, ... the list would not be right, and the command sees it.
    worse = [*scored(["ab"]), *((SPACE * n, -1e9, made.NORMAL) for n in (16, 3, 2, 4, 7, 5, 1)), *letters]
    assert "is not converted" in run(write(file, made.model(worse)), tmp_path / "u.json")[1]
    assert not (tmp_path / "u.json").exists()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in ("tiktoken", "tekken", "gpt2")]
)
def test_ids_are_those_of_tiktoken_and_of_gpt2(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("tiktoken")
    spelled = {character: byte for byte, character in enumerate(alphabet())}
    engine = byte_level(vocab_size=900)
    file = gpt2_files(tmp_path, engine)
    words: list[object] = []
    merged = [bytes(spelled[c] for c in "".join(pair)) for pair in json.loads(engine.to_str())["model"]["merges"]]
    tokens = list(dict.fromkeys([*BYTES, *merged]))
    if kind == "tiktoken":
        file, words = made.tiktoken_file(tmp_path / "a", tokens), ["--pattern", "o200k", "--special", "</s>=5000"]
        words += ["--end-of-document", "</s>"]
    elif kind == "tekken":
        file = made.tekken_file(tmp_path / "a", tokens, 100)
    text = write(tmp_path / "text", "\n".join(TEXTS).encode())
    code, said = run(file, tmp_path / "t.json", *words, "--text", text)
    assert code == 0 and " 0 of" in said, said


@pytest.mark.guard
def test_a_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    file = write(tmp_path / "a.model", made.model(scored(PIECES)))
    text = write(tmp_path / "text", b"abc\n" * 70000 + b"\xff\n")
    assert "is not UTF-8 at byte 280,000" in run(file, tmp_path / "t.json", "--text", text)[1]
    assert sorted(tmp_path.iterdir()) == [file, text]
