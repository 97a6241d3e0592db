"""`tokenizer:`: load one, or train one from the sources."""

from __future__ import annotations

from pydantic import Field, model_validator

from pipeline.config.base import MAX_BYTES, Bytes, PathOrUrl, Section, Text
from pipeline.config.layers.mixers import MAX_ROWS


class TokenizerTrainConfig(Section):
    """Train a byte-level BPE tokenizer on the documents of the training split."""

    vocab_size: int = Field(default=32768, ge=257, le=MAX_ROWS)
    """Entries, special tokens included."""
    min_frequency: int = Field(default=2, ge=1)
    """A pair is merged only if it occurs this often."""
    max_bytes: Bytes = Field(default=256 * 2**20, ge=1, le=MAX_BYTES)
    """Train on a keyed sample of the documents of about this many bytes of text in all."""


class TokenizerConfig(Section):
    """Exactly one of `path` and `train`."""

    path: PathOrUrl | None = None
    """A `tokenizer.json` of the `tokenizers` library, a folder that has one, or the URL of such a file
    (`docs/object-storage.md`)."""
    train: TokenizerTrainConfig | None = None
    """Train a tokenizer instead of loading one."""
    end_of_document: Text = Field(default="<|endoftext|>", min_length=1)
    """The special token that closes every document. A loaded tokenizer must contain it."""
    special_tokens: list[Text] = Field(default_factory=list)
    """Further special tokens. A trained tokenizer gets them after `end_of_document`; a loaded one must have them."""
    add_tokens: list[Text] = Field(default_factory=list)
    """Special tokens that a loaded tokenizer does not have, as the marks of a chat template: they get the ids behind
    its last one. `train.init_from` starts their rows with the mean of all others."""
    allow_special: list[Text] = Field(default_factory=list)
    """Special tokens that are recognized in the text of a document. All others are ordinary characters there."""

    @model_validator(mode="after")
    def _one_way(self) -> TokenizerConfig:
        if (self.path is None) == (self.train is None):
            raise ValueError("give exactly one of tokenizer.path (load) and tokenizer.train (train one)")
        if self.add_tokens and self.train is not None:
            raise ValueError("add_tokens is for tokenizer.path; with tokenizer.train, name them in special_tokens")
        names = [self.end_of_document, *self.special_tokens, *self.add_tokens]
        if len(set(names)) != len(names):
            raise ValueError(f"special tokens must differ from each other, got {names}")
        for token in self.allow_special:
            if token == self.end_of_document:
                raise ValueError(f"allow_special: {token!r} is end_of_document; a text must not end its own document")
            if token not in names:
                raise ValueError(f"allow_special: {token!r} is not in special_tokens {names[1:]}")
        return self
