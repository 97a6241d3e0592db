"""Files of others: bounds that are read before the library sees them, the probe, and panics."""

from __future__ import annotations

import ast
import base64
import json
import os
import struct
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from pipeline.common import paths
from pipeline.common.errors import UserError
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.tokenization import probe
from pipeline.data.tokenization.definition import COMPONENTS, KNOWN_PATTERNS, check_definition
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.bounded import refused
from tests.data.tokenization import tokenizers_of_all_kinds as kinds
from tests.repository import ROOT

END = "<|endoftext|>"
CATASTROPHE = "(?:a|aa)+$"


def definition(vocab: Any = None, **sections: Any) -> dict[str, Any]:
    """A byte-level tokenizer.json without merges, with other sections."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END: 0} | {symbol: i + 1 for i, symbol in enumerate(alphabet)}
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.add_special_tokens([END])
    state = json.loads(engine.to_str())
    state["model"]["vocab"] |= vocab or {}
    return state | sections


def write(folder: Path, state: dict[str, Any]) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(state))
    return path


def load(folder: Path, state: dict[str, Any]) -> Tokenizer:
    path = write(folder, state)
    return Tokenizer.load(path, TokenizerConfig(path=path))


def steps(kind: str, *parts: dict[str, Any]) -> dict[str, Any]:
    key = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[kind]
    return {kind: {"type": "Sequence", key: list(parts)}}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def charsmap(table: bytes, texts: bytes, size: int | None = None) -> dict[str, Any]:
    data = struct.pack("<I", len(table) if size is None else size) + table + texts
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


BOMB = [part for _ in range(6) for part in ({"type": "Prepend", "prepend": "aaaaaaaa"}, replace("a", "aaaaaaaa"))]
TEMPLATE = {"Sequence": {"id": "A", "type_id": 0}}
PAIR = [TEMPLATE, {"Sequence": {"id": "B", "type_id": 0}}]
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "byte_fallback": False}
WORDPIECE = {
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "vocab": {END: 0, "[UNK]": 1},
}
ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "12 nested steps that grow": (definition(**steps("normalizer", *BOMB)), "normalizers.0 .* times as long"),
    "10 MB of content": (definition(normalizer=replace("a", "x" * 10**7)), r"normalizer\.content has 10,000,000 char"),
    "10 MB of prefix": (definition(normalizer={"type": "Prepend", "prepend": "x" * 10**7}), r"normalizer\.prepend has"),
    "decoder that grows": (definition(**steps("decoder", *[replace("a", "aa")] * 40)), "decoder.*times as long"),
    "regex that may match everywhere": (
        definition(**steps("normalizer", *[replace("x*", "ab" * 50, "Regex")] * 3)),
        "long",
    ),
    "byte-level again and again": (definition(**steps("normalizer", *[{"type": "ByteLevel"}] * 20)), "times as long"),
    "100 steps": (definition(**steps("normalizer", *[{"type": "NFC"}] * 100)), "at most 64 steps"),
    "deep sequences": (
        definition(
            **reduce(
                lambda inner, _: steps("normalizer", inner["normalizer"]), range(50), {"normalizer": {"type": "NFC"}}
            )
        ),
        "nested more than 8 deep",
    ),
    "sequences of sequences": (
        definition(
            **reduce(
                lambda inner, _: steps("normalizer", *[inner["normalizer"]] * 8),
                range(4),
                {"normalizer": {"type": "NFC"}},
            )
        ),
        "more than 64 steps",
    ),
    "deep JSON": (definition(normalizer=reduce(lambda inner, _: [inner], range(900), [])), "names no type"),
    "id 4294967295": (definition({"x1": 2**32 - 1}), r"model\.vocab gives 'x1' the id 4294967295"),
    "id 2^28": (definition({"x1": 2**28}), "the id 268435456"),
    "an id far from the others": (definition({"x1": 2**27}), "the id 134217728"),
    "id that is negative": (definition({"x1": -1}), "the id -1"),
    "id that is no number": (definition({"x1": 1.5}), r"the id 1\.5"),
    "id that is true": (definition({"x1": True}), "the id True"),
    "id twice": (definition({"x1": 7}), r"model\.vocab has the id 7 twice"),
    "added id": (definition(added_tokens=[{"id": 2**31, "content": "x1", **ADDED}]), "added_tokens gives 'x1' the id"),
    "added id twice": (definition(added_tokens=[{"id": 300, "content": c, **ADDED} for c in "xy"]), "the id 300 twice"),
    "added tokens that grow": (
        definition(
            normalizer={"type": "NFKD"},
            added_tokens=[
                {"id": 300 + n, "content": f"{n}\ufdfa" * 9, **ADDED, "normalized": True} for n in range(9000)
            ],
        ),
        "added_tokens may have more than",
    ),
    "added tokens that are long": (
        definition(added_tokens=[{"id": 300, "content": "x" * 2**21, **ADDED}]),
        "characters",
    ),
    "words without end": (
        definition(model=WORDPIECE | {"max_input_chars_per_word": 10**18}),
        "max_input_chars_per_word",
    ),
    "entry that is long": (definition({"x" * 5000: 300}), "an entry of 5,000 characters"),
    "charsmap of nothing": (definition(normalizer=charsmap(b"", b"")), "precompiled_charsmap"),
    "charsmap that is no base64": (
        definition(normalizer={"type": "Precompiled", "precompiled_charsmap": "%"}),
        "charsmap",
    ),
    "charsmap larger than itself": (definition(normalizer=charsmap(b"1234", b"", 2**31)), "would take 2147483648"),
    "charsmap that grows": (definition(normalizer=charsmap(b"1234", b"x" * 9000)), "times as long"),
    "score that is no number": (definition(model=UNIGRAM | {"vocab": [[END, float("nan")]]}), "is not JSON"),
    "score that is infinite": (definition(model=UNIGRAM | {"vocab": [[END, float("inf")]]}), "is not JSON"),
    "vocabulary that is none": (definition(model=UNIGRAM | {"vocab": [[END]]}), r"model\.vocab"),
    "template that repeats": (
        definition(
            post_processor={"type": "TemplateProcessing", "single": [TEMPLATE] * 50, "pair": PAIR, "special_tokens": {}}
        ),
        "single that names A, A",
    ),
    "template that is long": (
        definition(
            post_processor={
                "type": "TemplateProcessing",
                "single": [TEMPLATE] * 10**5,
                "pair": PAIR,
                "special_tokens": {},
            }
        ),
        "at most 64 pieces",
    ),
    "pieces of nothing": (definition(pre_tokenizer={"type": "FixedLength", "length": 0}), "length 0"),
    "type of a later library": (
        definition(normalizer={"type": "Later"}),
        "'Later', which is not one of BertNormalizer",
    ),
    "long regex": (definition(pre_tokenizer=split("a" * 2**15)), r"pre_tokenizer\.pattern has 32,768"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_bounds_are_checked_before_the_library_sees_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, said = ATTACKS[name]
    monkeypatch.setattr(tokenizers, "Tokenizer", None)
    path = write(tmp_path, state)
    with pytest.raises(UserError, match=rf"^tokenizer\.path: .*tokenizer\.json.*{said}") as error:
        Tokenizer.load(path, TokenizerConfig(path=path))
    assert len(str(error.value)) < 600


HARMLESS: dict[str, dict[str, Any]] = {
    "padding to 10^12": definition(
        padding={
            "strategy": {"Fixed": 10**12},
            "direction": "Right",
            "pad_to_multiple_of": 10**12,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        },
        truncation={"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 10**12},
    ),
    "an added token of nothing": definition(
        added_tokens=[{"id": 0, "content": END, **ADDED}, {"id": 257, "content": "", **ADDED}]
    ),
    "a template that adds 60 tokens": definition(
        post_processor={
            "type": "TemplateProcessing",
            "single": [TEMPLATE, *[{"SpecialToken": {"id": END, "type_id": 0}}] * 60],
            "pair": PAIR,
            "special_tokens": {END: {"id": END, "ids": [0] * 50, "tokens": [END] * 50}},
        }
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_matter_changes_no_id(name: str, tmp_path: Path) -> None:
    plain = load(tmp_path, definition()).encode("a boat é")
    found = load(tmp_path, HARMLESS[name])
    assert found.encode("a boat é") == plain
    assert found.encode_batch(["a boat é", ""])[0].tolist() == plain


def test_what_was_checked_is_what_the_library_reads(tmp_path: Path) -> None:
    """A key that stands twice: JSON readers differ in which one they take."""
    text = json.dumps(definition(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "CONTENT"}))
    path = tmp_path / "tokenizer.json"
    path.write_text(text.replace('"content": "CONTENT"', '"content": "' + "x" * 10**6 + '", "content": "b"'))
    loaded = Tokenizer.load(path, TokenizerConfig(path=path))
    assert loaded.encode("a") == loaded.encode("b")


def test_every_type_of_the_library_has_a_bound() -> None:
    sections = {
        "normalizer": tokenizers.normalizers,
        "pre_tokenizer": tokenizers.pre_tokenizers,
        "post_processor": tokenizers.processors,
        "decoder": tokenizers.decoders,
        "model": tokenizers.models,
    }
    others = {"Normalizer", "PreTokenizer", "PostProcessor", "Decoder", "Model", "Sequence", "DecodeStream"}
    for section, module in sections.items():
        types = {name for name, value in vars(module).items() if isinstance(value, type)} - others
        assert types == set(COMPONENTS[section]), section
    assert all(bound.why for bounds in COMPONENTS.values() for bound in bounds.values())


@pytest.mark.first(2)
@pytest.mark.parametrize("kind", kinds.KINDS, ids=lambda kind: kind.__name__)
def test_growth_is_within_its_bound(kind: Any, tmp_path: Path) -> None:
    tokenizer = kind(tmp_path)
    found = check_definition(tokenizer.definition.encode(), "file")
    engine = tokenizer._engine
    for text in ("İ" * 50, "\ufdfa" * 50, "é", " ", "漢" * 9, "a", "ﬁ\u1d160", "1 a"):
        normal = text if engine.normalizer is None else engine.normalizer.normalize_str(text)
        pieces = [p for p, _ in engine.pre_tokenizer.pre_tokenize_str(normal)] if engine.pre_tokenizer else [normal]
        assert sum(len(piece.encode()) for piece in pieces) <= found.growth * len(text.encode())


def test_usual_tokenizers_need_no_probe(tmp_path: Path) -> None:
    needed = {
        kind.__name__
        for kind in kinds.KINDS
        if not probe.is_proved(check_definition(kind(tmp_path / kind.__name__).definition.encode(), "file"))
    }
    assert needed == {"digits", "greedy_names"}


@pytest.mark.parametrize("regex", sorted(KNOWN_PATTERNS))
def test_known_regexes_take_steps_in_proportion(regex: str) -> None:
    """None fails on long runs, where the library gives up one that takes more than 10 million steps."""
    cut = pre_tokenizers.Split(Regex(regex), "isolated")
    for run in (" ", "\n", " \n", "a", "1", ".", "'", "é"):
        text = run * 2**17 + "\0"
        assert "".join(piece for piece, _ in cut.pre_tokenize_str(text)) == text


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pretraining-pipeline" / "tokenizers"


class TestProbe:
    def test_a_regex_that_backtracks_is_named(self, tmp_path: Path, cache: Path) -> None:
        state = definition(
            **steps(
                "pre_tokenizer",
                split(r"\p{N}"),
                split(CATASTROPHE),
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            )
        )
        with pytest.raises(UserError) as error:
            load(tmp_path, state)
        for part in ("tokenizer.path: ", "tokenizer.json", f"pretokenizers.1.pattern = '{CATASTROPHE}'", "retry-limit"):
            assert part in str(error.value)
        assert not cache.exists()

    def test_what_passed_is_kept(self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        state = definition(pre_tokenizer=split(r"\w+|\W"))
        load(tmp_path, state)
        (kept,) = cache.iterdir()
        monkeypatch.setattr("sys.executable", str(tmp_path / "nothing"))
        monkeypatch.setattr(paths, "_PASSED", set())
        load(tmp_path, state)
        kept.unlink()
        load(tmp_path, state)  # of this process
        monkeypatch.setattr(paths, "_PASSED", set())
        with pytest.raises(UserError, match="no process could be started"):
            load(tmp_path, state)

    def test_memory_and_growth(self, tmp_path: Path) -> None:
        """Found by the child's own functions, which need no child here."""
        state = definition(**steps("normalizer", *[replace("a", "a" * 8)] * 2))
        problem = probe._find_problem({"definition": json.dumps(state), "patterns": {}})
        assert "normalizers make" in problem and "64 times as many" in problem

    def test_a_table_that_makes_the_library_panic(self) -> None:
        state = definition(normalizer=charsmap(bytes(range(1, 201)) * 2, b"x\0"))
        found = check_definition(json.dumps(state).encode(), "file")
        assert found.doubts == ["normalizer"] and not probe.is_proved(found)
        assert isinstance(probe._find_problem({"definition": json.dumps(state), "patterns": {}}), str)


def panicking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """A tokenizer whose regex fails on texts that the probe does not have."""
    monkeypatch.setattr("pipeline.data.tokenization.tokenizer.probe", lambda *_: None)
    return load(folder, definition(pre_tokenizer=split(CATASTROPHE)))


def test_a_panic_is_an_error_that_names_file_and_regex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = panicking(tmp_path, monkeypatch)
    text = "a" * 300 + "b"
    for use in (
        tokenizer.encode,
        lambda t: tokenizer.encode_batch([t]),
        lambda t: tokenizer.encode_flat(["x", t]),
        lambda t: tokenizer.cache_words([t]),
    ):
        with pytest.raises(UserError, match=r"tokenizer\.json: pre_tokenizer\.pattern = .* fails on a text") as error:
            use(text)
        assert CATASTROPHE in str(error.value)


def test_a_panic_of_a_decoder_is_an_error(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, definition(decoder={"type": "Strip", "content": "a", "start": 0, "stop": 10**15}))
    with pytest.raises(UserError, match=r"tokenizer\.json: it fails on a text"):
        tokenizer.decode(tokenizer.encode("a"))


def test_memory_of_a_small_file(tmp_path: Path) -> None:
    """In a process with limits: nothing is taken before it is refused."""
    path = write(tmp_path, ATTACKS["12 nested steps that grow"][0])
    said = refused(
        "Tokenizer.load(sys.argv[1], TokenizerConfig(path=sys.argv[1])).encode('a' * 15000)",
        """
        from pipeline.config.tokenizer import TokenizerConfig
        from pipeline.data.tokenization.tokenizer import Tokenizer
        """,
        path,
    )
    assert "times as long" in said


def test_one_place_opens_tokenizers() -> None:
    """A scan of the source: `tokenizers.Tokenizer.from_...`, and the classes of transformers."""
    found = set()
    for path in [*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("slurm/**/*.py")]:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "Tokenizer" in text else ():
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("from_"):
                continue
            if ast.unparse(node.value).rpartition(".")[2] in ("Tokenizer", "AutoTokenizer", "PreTrainedTokenizerFast"):
                found.add((path.relative_to(ROOT).as_posix(), ast.unparse(node)))
    # Another library, which gets a definition that was checked.
    assert found == {
        ("pipeline/data/tokenization/definition.py", "tokenizers.Tokenizer.from_buffer"),
        ("pipeline/data/tokenization/engines.py", "importlib.import_module('fastokens').Tokenizer.from_json_str"),
    }


def test_a_file_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    os.truncate(path, 2**40)
    with pytest.raises(UserError, match=r"tokenizer\.json has 1,099,511,627,776 bytes, of which at most 134,217,728"):
        Tokenizer.load(path, TokenizerConfig(path=path))
