"""The proof: engines that are like `tokenizers` pass, others do not, whatever they do instead."""

import json
import re
import shutil
import unicodedata

import pytest

from pipeline.common.errors import UserError
from pipeline.common.limited_child import ChildLimits
from pipeline.data.tokenization import engine_check
from pipeline.data.tokenization.engine_check import compare, prove
from pipeline.data.tokenization.engine_choice import choose_engine
from pipeline.data.tokenization.engines import open_engine
from pipeline.data.tokenization.hard_texts import hard_texts
from tests.data.tokenization import broken_engine
from tests.data.tokenization import tokenizers_of_all_kinds as kinds


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return kinds.ours(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def long(ours):
    return hard_texts(ours, long=True)


@pytest.fixture(scope="module")
def kept(ours, tmp_path_factory):
    """A folder with what is kept of the real library."""
    pytest.importorskip("gigatoken")
    folder = tmp_path_factory.mktemp("kept") / "engines"
    choice = choose_engine("auto", ours, folder, set())
    assert choice.which == "gigatoken"
    assert "hard texts are those of tokenizers" in choice.why
    return folder


class TestHardTexts:
    def test_always_the_same(self, ours, long):
        assert hard_texts(ours, long=True) == long
        quick = hard_texts(ours, long=False)
        assert sum(len(text.encode()) for text in quick) < 300_000
        assert len(long) > 20_000

    def test_every_assigned_character(self, long):
        have = set("".join(long))
        assigned = {c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")}
        assert assigned <= have
        assert {"\ue000", "\U000f0000", "\ufffe", "\ufdd0", "\U0010ffff"} <= have
        assert not any("\ud800" <= c <= "\udfff" for c in have)

    def test_what_is_listed(self, ours, long):
        everything = set(long)
        assert {" " * 2**16, "\n" * 2**16, "\r\n" * 2**15, "漢" * 2**16, "7" * 1000, "9" * 40, ""} <= everything
        joined = "\x01".join(long)
        for part in (
            "<|endoftext|",
            "|endoftext|>",
            "<|sep|><|sep|>",
            "'LL",
            "\u2019ve",
            "'Re",
            "a\ufeffb",
            "\x00",
            "👩‍👩‍👧‍👦",
            "🇩🇪🇫🇷",
        ):
            assert part in joined


@pytest.mark.first(5)
@pytest.mark.parametrize("which", ["gigatoken", "fastokens"])
@pytest.mark.parametrize("kind", kinds.KINDS, ids=lambda kind: kind.__name__)
def test_what_passes_gives_the_same_ids(kind, which, tmp_path):
    """The proof against other texts than its own: all that pass here are right there."""
    pytest.importorskip(which)
    tokenizer = kind(tmp_path)
    try:
        engine = open_engine(tokenizer, which)
    except UserError:
        assert kind is not kinds.ours
        return
    failure = compare(engine, tokenizer, long=False).failure
    assert not (failure and kind is kinds.ours)
    texts = [text * 3 for text in kinds.TEXTS] + [
        "a<|sep|>b <|pad|> <|endoftext|>",
        "x    y  z\n        \n",
        "e\u0301 ﬁ",
    ]
    if not failure:
        expected = [encoding.ids for encoding in tokenizer._engine.encode_batch(texts, add_special_tokens=False)]
        ids, lengths = engine.encode(texts)
        assert ids.tolist() == [i for one in expected for i in one]
        assert lengths.tolist() == [len(one) for one in expected]
        assert (tokenizer.special_tokens.get("<|sep|>", -1) in ids) == (kind is kinds.allowing)


class TestFaults:
    @pytest.mark.first(1)
    @pytest.mark.parametrize(
        "fault",
        [
            "one text in 1,000",
            "one script",
            *(pytest.param(each, marks=pytest.mark.slow) for each in ("one id more", "wraps", "panics")),
        ],
    )
    def test_found(self, ours, tmp_path, monkeypatch, fault):
        broken_engine.install(tmp_path, monkeypatch, fault)
        found = compare(open_engine(ours, "gigatoken"), ours, long=True)
        said = {"wraps": "gives the id", "panics": "failed on '.*PanicException"}.get(fault, "differs from .* at id")
        assert re.search(said, found.failure)
        assert 0 < found.texts < 32_000

    def test_one_script_is_named(self, ours, tmp_path, monkeypatch):
        broken_engine.install(tmp_path, monkeypatch, "one script")
        failure = compare(open_engine(ours, "gigatoken"), ours, long=False).failure
        assert "ქართული" in failure or "\u10a0" in failure or any("\u10d0" <= c <= "\u10ff" for c in failure)

    def test_a_tokenizer_without_ids_for_every_text(self, ours, tmp_path):
        engine = kinds.tokenizers.Tokenizer(kinds.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="none"))
        engine.add_special_tokens(["<|endoftext|>"])
        engine.pre_tokenizer = kinds.pre_tokenizers.Whitespace()
        with pytest.raises(UserError, match="cannot encode every text"):
            kinds.load(tmp_path, engine)


class TestChild:
    """The long set runs in a process that may die."""

    @pytest.mark.first(1)
    @pytest.mark.parametrize(
        ("fault", "said"),
        [
            ("aborts", "did not survive .* was ended by SIGABRT"),
            ("hangs", "took longer than 1 s"),
            ("wraps", "gives the id"),
        ],
    )
    def test_engines_that_take_a_process_with_them(self, ours, tmp_path, monkeypatch, fault, said):
        broken_engine.install(tmp_path / "path", monkeypatch, fault)
        if fault == "hangs":
            monkeypatch.setattr(engine_check, "LIMITS", ChildLimits(cpu_s=60, wall_s=1.0))
        with pytest.raises(UserError, match=rf"data.preprocess.engine: gigatoken 9.9 {said}.*use engine: auto or tok"):
            choose_engine("gigatoken", ours, tmp_path / "cache", set())
        kept = list((tmp_path / "cache").glob("*.json"))
        assert bool(kept) == (fault == "wraps")  # a process may have been ended by something else

    @pytest.mark.slow
    def test_auto_says_why_it_falls_back(self, ours, tmp_path, monkeypatch):
        broken_engine.install(tmp_path / "path", monkeypatch, "one script")
        monkeypatch.setattr("pipeline.data.tokenization.engine_choice.FAST", ("gigatoken",))
        for _ in range(2):
            choice = choose_engine("auto", ours, tmp_path / "cache", set())
            assert (choice.which, choice.name.split()[0]) == ("tokenizers", "tokenizers")
            assert "because gigatoken 9.9 differs from tokenizers at id" in choice.why
            # The result is kept: no process is started for the second one.
            monkeypatch.setattr("sys.executable", str(tmp_path / "nothing"))


class TestKept:
    @pytest.fixture
    def no_child(self, monkeypatch, tmp_path):
        monkeypatch.setattr("sys.executable", str(tmp_path / "nothing"))

    @pytest.fixture
    def cache(self, kept, tmp_path):
        return shutil.copytree(kept, tmp_path / "copy")

    def prove(self, tokenizer, folder):
        return prove(open_engine(tokenizer, "gigatoken"), "gigatoken", tokenizer, folder)

    @pytest.mark.slow
    def test_used_again(self, ours, cache, no_child):
        found = self.prove(ours, cache)
        assert found.texts > 20_000
        assert not found.failure

    def test_not_for_another_tokenizer_library_or_cpu(self, ours, cache, no_child, tmp_path, monkeypatch):
        assert "no process" in self.prove(kinds.gpt2(tmp_path / "other"), cache).failure
        monkeypatch.setattr("tokenizers.__version__", "0.0")
        assert "no process" in self.prove(ours, cache).failure
        monkeypatch.undo()
        monkeypatch.setattr("sys.executable", str(tmp_path / "nothing"))
        monkeypatch.setattr("pipeline.data.tokenization.engine_check._cpu", lambda: "other")
        assert "no process" in self.prove(ours, cache).failure

    @pytest.mark.parametrize("content", ["", "{}", "[]", '{"about": {}, "texts": 1, "failure": ""}'])
    def test_damaged(self, ours, cache, no_child, content):
        (file,) = cache.glob("gigatoken-*.json")
        file.write_text(content)
        assert "no process" in self.prove(ours, cache).failure

    def test_the_quick_set_is_run_every_time(self, ours, cache, no_child, tmp_path, monkeypatch):
        """An engine that was right when it was proved, and is not now."""
        engine = open_engine(ours, "gigatoken")
        broken_engine.install(tmp_path / "path", monkeypatch, "one script")
        broken = open_engine(ours, "gigatoken")
        broken.name = engine.name
        assert "differs" in prove(broken, "gigatoken", ours, cache).failure

    def test_a_failure_is_kept_too(self, ours, cache, no_child):
        (file,) = cache.glob("gigatoken-*.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"failure": "differs"}))
        assert self.prove(ours, cache).failure == "differs"

    def test_a_cache_that_cannot_be_written(self, ours, tmp_path, monkeypatch):
        broken_engine.install(tmp_path / "path", monkeypatch, "wraps")
        (tmp_path / "file").touch()
        assert "gives the id" in self.prove(ours, tmp_path / "file").failure


class TestChoice:
    def test_tokenizers_is_not_questioned(self, ours, tmp_path):
        choice = choose_engine("tokenizers", ours, tmp_path, set())
        assert choice.which == "tokenizers"
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("setting", ["auto", "gigatoken"])
    def test_after_a_wrong_id_only_tokenizers_is_trusted(self, ours, tmp_path, monkeypatch, setting):
        broken_engine.install(tmp_path, monkeypatch)
        choice = choose_engine(setting, ours, tmp_path / "cache", {"gigatoken 9.9"})
        assert choice.which == "tokenizers"
        assert "because gigatoken 9.9 gave other ids" in choice.why
