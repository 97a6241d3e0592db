"""Small tokenizers of the kinds that are in use, trained here with the `tokenizers` library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.data.runs import WORDS

END = "<|endoftext|>"
TEXTS = [
    " ".join(WORDS[i % 12 :] + WORDS[: i % 7]) + f"\n\ndef f{i}(x):\n        return x + {i * 977}\n" for i in range(200)
]
TEXTS += [
    "The weather isn't what it's been; they'll say I'd have known.",
    "ärger über öl, naïve café Ελλάδα Привет мир",
] * 20


def load(folder: Path, engine: tokenizers.Tokenizer, changes: dict[str, Any] | None = None, **config: Any) -> Tokenizer:
    """What a user has who loads the engine's file, after changes of its top-level keys."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(engine.to_str()) | (changes or {})))
    return Tokenizer.load(path, TokenizerConfig(path=path, **config))


def ours(folder: Path) -> Tokenizer:
    return Tokenizer.train(
        iter(TEXTS), TokenizerConfig(train={"vocab_size": 600}, special_tokens=["<|sep|>", "<|pad|>"])
    )


def byte_level(use_regex: bool = True, vocab_size: int = 600) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [END, "<|sep|>", "<|pad|>"]
    engine.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return engine


def gpt2(folder: Path) -> Tokenizer:
    return load(folder, byte_level())


def digits(folder: Path) -> Tokenizer:
    """A split like that of Llama 3, in two steps like DeepSeek's."""
    engine = byte_level()
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return load(folder, engine)


def composed(folder: Path) -> Tokenizer:
    """With a normalizer."""
    engine = byte_level()
    engine.normalizer = normalizers.NFC()
    return load(folder, engine)


def lowercase(folder: Path) -> Tokenizer:
    engine = byte_level()
    engine.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
    return load(folder, engine)


def runs_of_spaces(folder: Path) -> Tokenizer:
    """With added tokens that are not special, like GPT-NeoX."""
    engine = byte_level()
    engine.add_tokens([AddedToken(" " * n, normalized=False) for n in range(2, 9)])
    return load(folder, engine)


def greedy_names(folder: Path) -> Tokenizer:
    """With added tokens that strip spaces, stand as whole words only, or are found after normalisation."""
    engine = byte_level()
    engine.normalizer = normalizers.NFKC()
    engine.add_tokens(
        [
            AddedToken("<mask>", lstrip=True),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("whole", single_word=True),
            AddedToken("ﬁne", normalized=True),
            AddedToken("<|sep|>x"),
        ]
    )
    return load(folder, engine)


def allowing(folder: Path) -> Tokenizer:
    """Texts can contain one of its special tokens."""
    return load(folder, byte_level(), special_tokens=["<|sep|>", "<|pad|>"], allow_special=["<|sep|>"])


def llama2(folder: Path) -> Tokenizer:
    """SentencePiece's BPE: spaces are letters, bytes are for what has no token."""
    engine = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    engine.train_from_iterator(
        [text.replace(" ", " ▁") for text in TEXTS],
        trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False),
    )
    added = [token for token in json.loads(engine.to_str())["added_tokens"] if not token["content"].startswith("<0x")]
    return load(folder, engine, {"added_tokens": added})


def metaspace(folder: Path) -> Tokenizer:
    """The same with a pre-tokenizer that cuts at spaces, like Gemma's and Mistral's newer files."""
    engine = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    engine.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False))
    added = [token for token in json.loads(engine.to_str())["added_tokens"] if not token["content"].startswith("<0x")]
    return load(folder, engine, {"added_tokens": added})


def unigram(folder: Path) -> Tokenizer:
    engine = tokenizers.Tokenizer(models.Unigram())
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False),
    )
    engine.add_special_tokens([END])  # in the vocabulary a text could spell it
    return load(folder, engine)


def wordpiece(folder: Path) -> Tokenizer:
    engine = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    engine.normalizer = normalizers.BertNormalizer()
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]", END], show_progress=False)
    )
    return load(folder, engine)


KINDS = (
    *(ours, gpt2, digits, composed, lowercase, runs_of_spaces, greedy_names),
    *(allowing, llama2, metaspace, unigram, wordpiece),
)
