"""The tokenizer against the library's own objects, and against texts that are meant to break it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from pipeline.common.errors import UserError
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.tokenization.tokenizer import Tokenizer, short_words

TEXTS = ["def f(x):\n    return x + 1\n", "don't STOP 12345 漢字 <|endoftext|>", "ünï \r\n\r\n\t  x" * 5] * 20


def train(texts=TEXTS, vocab_size=300, **config):
    train = {"vocab_size": vocab_size, "min_frequency": config.pop("min_frequency", 2)}
    return Tokenizer.train(iter(texts), TokenizerConfig(train=train, **config))


def byte_vocabulary():
    return {symbol: i for i, symbol in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}


def write(path, vocab, special=("<|endoftext|>",), **model):
    """A byte-level tokenizer.json without merges."""
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], **model))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.add_special_tokens(list(special))
    engine.save(str(path))
    return path


@pytest.fixture(scope="module")
def trained():
    return train()


class TestTrain:
    def test_special_tokens_come_first(self):
        tokenizer = train(end_of_document="<|end|>", special_tokens=["<|a|>", "<|b|>"])
        assert (tokenizer.end_of_document, tokenizer.special_tokens) == (0, {"<|a|>": 1, "<|b|>": 2})
        assert tokenizer.vocab_size == 300

    @given(st.text())
    @settings(max_examples=300)
    def test_every_text_comes_back(self, text):
        tokenizer = self.tokenizer
        assert tokenizer.decode(tokenizer.encode(text)) == text

    @pytest.fixture(autouse=True)
    def _tokenizer(self, trained):
        type(self).tokenizer = trained

    def test_every_byte_has_an_id(self, trained):
        text = "".join(map(chr, range(0x800))) + "\U0010ffff"
        assert trained.decode(trained.encode(text)) == text

    def test_long_runs(self, trained):
        for text in (" " * 10**6 + "x", "a" * 10**6, "漢" * 10**5, "\n" * 10**6, "9" * 10**5):
            assert trained.decode(trained.encode_batch([text])[0]) == text

    def test_same_texts_same_tokenizer_in_another_process_and_order(self, trained):
        code = (
            "from tests.data.tokenization.test_tokenizer import TEXTS, train; t = train(TEXTS[::-1]); "
            "print(t.fingerprint, t._engine.to_str())"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert found.strip() == f"{trained.fingerprint} {trained._engine.to_str()}"

    def test_too_small(self):
        with pytest.raises(UserError, match=r"vocab_size: 257 .* need 258"):
            train(vocab_size=257, special_tokens=["<|a|>"])

    def test_an_end_of_document_that_text_can_spell_is_refused(self):
        with pytest.raises(UserError, match="'END'"):
            train(["END END END"] * 50, end_of_document="END")


class TestSpecialText:
    def test_it_is_ordinary_text(self, trained, tmp_path):
        trained.save(tmp_path)
        for tokenizer in (trained, Tokenizer.open(tmp_path)):
            for text in ("<|endoftext|>", "a<|endoftext|>b", " <|endoftext|>" * 3):
                (batched,) = tokenizer.encode_batch([text])
                assert tokenizer.end_of_document not in batched
                assert tokenizer.encode(text) == batched.tolist()
                assert tokenizer.decode(batched) == text

    @pytest.mark.parametrize("flag", [True, False, None])
    def test_also_when_the_file_does_not_flag_it(self, tmp_path, flag):
        """Special, added but not special, and in the vocabulary only."""
        path = write(tmp_path / "t.json", {**byte_vocabulary(), "<|endoftext|>": 256})
        state = json.loads(path.read_text())
        state["added_tokens"] = [] if flag is None else [{**state["added_tokens"][0], "special": flag}]
        path.write_text(json.dumps(state))
        tokenizer = Tokenizer.load(path, TokenizerConfig(path=path))
        assert tokenizer.end_of_document == 256
        assert 256 not in tokenizer.encode("a<|endoftext|>b")


class TestAllowSpecial:
    """A special token that texts may contain, beside one that they may not."""

    TEXTS = ("a<|sep|>b<|pad|>c", "<|sep|>", " <|sep|> <|endoftext|>", "<|<|sep|>|>", "<|sep|<|sep|>", "<|SEP|>")

    @pytest.fixture
    def allowing(self):
        return train(special_tokens=["<|sep|>", "<|pad|>"], allow_special=["<|sep|>"])

    def test_it_is_itself_and_the_others_are_text(self, allowing):
        plain = train(special_tokens=["<|sep|>", "<|pad|>"])
        for text in self.TEXTS:
            expected = []
            for number, part in enumerate(text.split("<|sep|>")):
                expected += ([1] if number else []) + plain.encode(part)
            assert allowing.encode(text) == allowing.encode_batch([text])[0].tolist() == expected
            assert allowing.decode(expected) == text
            assert not {0, 1, 2} & set(plain.encode(text))

    def test_saved_and_opened(self, allowing, tmp_path):
        allowing.save(tmp_path)
        again = Tokenizer.open(tmp_path)
        assert again.allow_special == ["<|sep|>"]
        assert [again.encode(text) for text in self.TEXTS] == [allowing.encode(text) for text in self.TEXTS]
        assert again.fingerprint == allowing.fingerprint
        # Others who read the file see a special token.
        entries = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
        assert [(entry["content"], entry["special"]) for entry in entries] == [
            ("<|endoftext|>", True),
            ("<|sep|>", True),
            ("<|pad|>", True),
        ]
        again.save(tmp_path / "again")
        for name in ("tokenizer.json", "special_tokens.json"):
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()

    def test_loaded(self, allowing, tmp_path):
        allowing.save(tmp_path)
        config = {"path": tmp_path, "special_tokens": ["<|sep|>", "<|pad|>"]}
        loaded = Tokenizer.load(tmp_path, TokenizerConfig(**config, allow_special=["<|sep|>"]))
        assert [loaded.encode(text) for text in self.TEXTS] == [allowing.encode(text) for text in self.TEXTS]
        plain = Tokenizer.load(tmp_path, TokenizerConfig(**config))
        assert 1 not in plain.encode("<|sep|>")
        assert len({loaded.fingerprint, allowing.fingerprint, plain.fingerprint}) == 2

    def test_without_it_nothing_changes(self, trained, tmp_path):
        trained.save(tmp_path)
        assert json.loads((tmp_path / "special_tokens.json").read_text()) == {
            "end_of_document": "<|endoftext|>",
            "special_tokens": [],
        }
        assert Tokenizer.open(tmp_path).allow_special == []


class TestEncodeFlat:
    def test_it_is_encode_batch_in_one_array(self, trained):
        texts = ["", *TEXTS, ""]
        ids, lengths = trained.encode_flat(texts)
        assert [one.tolist() for one in np.split(ids, np.cumsum(lengths)[:-1])] == [trained.encode(t) for t in texts]
        assert [one.tolist() for one in trained.encode_batch(texts)] == [trained.encode(t) for t in texts]
        assert (ids.dtype, lengths.dtype) == (np.uint16, np.int64)
        assert trained.encode_batch([]) == []


class TestLoad:
    def test_file_or_folder(self, tmp_path, trained):
        trained.save(tmp_path)
        config = TokenizerConfig(path=tmp_path)
        for path in (tmp_path, tmp_path / "tokenizer.json"):
            assert Tokenizer.load(path, config).fingerprint == trained.fingerprint
        assert Tokenizer.open(tmp_path).fingerprint == trained.fingerprint

    def test_missing_special_token_names_key_and_candidates(self, tmp_path):
        path = write(tmp_path / "t.json", byte_vocabulary(), special=["<|end_of_text|>", "<pad>"])
        with pytest.raises(UserError) as error:
            Tokenizer.load(path, TokenizerConfig(path=path))
        assert "tokenizer.end_of_document" in str(error.value)
        assert str(error.value).endswith("has no token '<|endoftext|>'; did you mean '<|end_of_text|>'?")
        config = TokenizerConfig(path=path, end_of_document="<|end_of_text|>", special_tokens=["<padding>"])
        with pytest.raises(UserError, match=r"tokenizer\.special_tokens: .*'<padding>'.*'<pad>'"):
            Tokenizer.load(path, config)

    def test_only_a_near_name_is_a_guess(self, tmp_path):
        path = write(tmp_path / "t.json", byte_vocabulary(), special=["<|endoftext|>", "<s>"])
        with pytest.raises(UserError) as error:
            Tokenizer.load(path, TokenizerConfig(path=path, special_tokens=["<padding>"]))
        assert str(error.value).endswith("; it has the special tokens '<|endoftext|>', '<s>'")

    def test_no_file_and_no_tokenizer(self, tmp_path):
        with pytest.raises(UserError, match=r"tokenizer\.path: .* does not exist"):
            Tokenizer.load(tmp_path / "none.json", TokenizerConfig(path=tmp_path))
        for content, said in [
            ("words", r"tokenizer\.json is not JSON"),
            ("", r"tokenizer\.json is not JSON"),
            ('{"a": 1}', r"tokenizer\.json has no model: it is not a tokenizer\.json of the tokenizers library"),
            ("[1]", r"tokenizer\.json has no model"),
            ('{"model": {"type": "XY"}}', r"tokenizer\.json: model\.type is .XY., not one of BPE"),
        ]:
            (tmp_path / "tokenizer.json").write_text(content)
            with pytest.raises(UserError, match=rf"tokenizer\.path: .*{said}"):
                Tokenizer.load(tmp_path, TokenizerConfig(path=tmp_path))

    @pytest.mark.parametrize("name", ["tokenizer.json", "special_tokens.json"])
    @pytest.mark.parametrize("content", ["", "{}", "[1]", "garbage"])
    def test_damaged(self, tmp_path, trained, name, content):
        trained.save(tmp_path)
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=name):
            Tokenizer.open(tmp_path)

    def test_a_model_without_ids_for_some_text(self, tmp_path):
        engine = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|endoftext|>": 0, "known": 1}, unk_token="[UNK]"))
        engine.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        engine.save(str(tmp_path / "t.json"))
        with pytest.raises(UserError, match="cannot encode every text.*UNK"):
            Tokenizer.load(tmp_path / "t.json", TokenizerConfig(path=tmp_path / "t.json"))

    def test_dropout_is_refused(self, tmp_path):
        path = write(tmp_path / "t.json", byte_vocabulary(), dropout=0.1)
        with pytest.raises(UserError, match="dropout"):
            Tokenizer.load(path, TokenizerConfig(path=path))

    def test_padding_truncation_and_templates_of_the_file_do_not_count(self, tmp_path):
        path = write(tmp_path / "t.json", byte_vocabulary())
        plain = Tokenizer.load(path, TokenizerConfig(path=path))
        engine = tokenizers.Tokenizer.from_file(str(path))
        engine.enable_truncation(3)
        engine.enable_padding(length=9)
        engine.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", engine.token_to_id("<|endoftext|>"))]
        )
        engine.save(str(path))
        tokenizer = Tokenizer.load(path, TokenizerConfig(path=path))
        assert tokenizer.encode("hello") == plain.encode("hello") == tokenizer.encode_batch(["hello"])[0].tolist()
        assert tokenizer.fingerprint == plain.fingerprint

    @pytest.mark.first(1)
    @pytest.mark.parametrize(("size", "dtype"), [(65_499, "uint16"), (65_500, "int32"), (65_536, "int32")])
    def test_large_vocabularies(self, tmp_path, size, dtype):
        vocab = byte_vocabulary() | {f"Ġ#{i}": i for i in range(256, size - 1)}
        path = write(tmp_path / "t.json", vocab, ignore_merges=True)
        tokenizer = Tokenizer.load(path, TokenizerConfig(path=path))
        assert (tokenizer.vocab_size, tokenizer.dtype) == (size, np.dtype(dtype))
        assert tokenizer.end_of_document == size - 1
        (ids,) = tokenizer.encode_batch(["a"])
        assert ids.dtype == np.dtype(dtype)


class TestFingerprint:
    def test_formatting_and_order_of_keys_do_not_count(self, tmp_path):
        path = write(tmp_path / "a.json", byte_vocabulary())
        state = json.loads(path.read_text())
        other = tmp_path / "b.json"
        other.write_text(json.dumps(dict(reversed(list(state.items())))))
        config = TokenizerConfig(path=path)
        assert Tokenizer.load(path, config).fingerprint == Tokenizer.load(other, config).fingerprint

    def test_what_decides_the_ids_counts(self, tmp_path):
        prints = set()
        vocab = byte_vocabulary()
        swapped = vocab | {"a": vocab["b"], "b": vocab["a"]}
        for number, (words, special, changes) in enumerate(
            [
                (vocab, ["<|endoftext|>"], {}),
                (swapped, ["<|endoftext|>"], {}),
                (vocab, ["<|x|>", "<|endoftext|>"], {}),
                (vocab, ["<|endoftext|>"], {"normalizer": {"type": "Lowercase"}}),
                (vocab, ["<|endoftext|>"], {"pre_tokenizer": None}),
            ]
        ):
            path = write(tmp_path / f"{number}.json", words, special)
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))
            prints.add(Tokenizer.load(path, TokenizerConfig(path=path)).fingerprint)
        assert len(prints) == 5


@pytest.mark.parametrize("key", ["end_of_document", "special_tokens", "allow_special"])
@pytest.mark.parametrize("value", [7, [7], {"a": 1}, None])
def test_special_tokens_of_another_kind_are_refused(key: str, value: object, tmp_path: Path) -> None:
    config = TokenizerConfig.model_validate({"train": {"vocab_size": 300}})
    Tokenizer.train(iter(["a boat on the sea"]), config).save(tmp_path)
    file = tmp_path / "special_tokens.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError, match=r"special_tokens\.json is damaged"):
        Tokenizer.open(tmp_path)


def test_training_cuts_long_words():
    texts = ["", " a b\n\nc  ", "x" * 1024 + " y"]
    assert list(short_words(texts)) == texts
    long = " a " + "x" * 3000 + " b"
    pieces = list(short_words([long]))
    assert "".join(pieces) == long
    assert max(len(word) for piece in pieces for word in piece.split()) == 1024
    # Without the cut this takes hours: the trainer's time grows with the square of a word's length.
    config = TokenizerConfig(train={"vocab_size": 300})
    # The bytes, the end of a document, and a's in powers of two up to 1,024.
    assert Tokenizer.train(iter(["a" * 2**21, "b c"]), config).vocab_size == 256 + 1 + 10


def test_what_a_template_would_add_is_said(tmp_path: Path) -> None:
    engine = tokenizers.Tokenizer.from_str(train(special_tokens=["<bos>"]).definition)
    plain = tmp_path / "plain.json"
    engine.save(str(plain))
    engine.post_processor = TemplateProcessing("<bos> $A", None, [("<bos>", engine.token_to_id("<bos>"))])
    marked = tmp_path / "marked.json"
    engine.save(str(marked))
    loaded = [Tokenizer.load(file, TokenizerConfig(path=file)) for file in (plain, marked)]
    assert [each.encode("a b") for each in loaded] == [train(special_tokens=["<bos>"]).encode("a b")] * 2
    notes = [each.template_note for each in loaded]
    assert notes[0] == "" and "puts <bos> around" in notes[1]
