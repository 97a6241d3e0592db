"""Input of objectives: the section of the run file that asks for one, and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.common.errors import UserError
from pipeline.config.objective import ObjectiveConfig
from pipeline.config.root import Config
from pipeline.data.loading.objectives.words import WordTable, word_table
from pipeline.data.order.permutation import IntArray

if TYPE_CHECKING:
    from pipeline.data.datasets.manifest import TokenizerInfo


class Use(NamedTuple):
    """An objective where the run file has it."""

    key: str
    """Of the section."""
    objective: ObjectiveConfig
    length: int
    """Tokens of its windows."""


@dataclass(frozen=True)
class Making:
    """Sources of an objective: run file and tokenizer."""

    config: Config
    use: Use
    tokenizer: TokenizerInfo
    folder: Path | None
    """Of the tokenizer; None where no objective reads its vocabulary."""

    def special(self, key: str, token: str, needs: str) -> int:
        """Id of a special token that no text has.

        Args:
            key: The key that names it, below that of the objective.
            token: Its text.
            needs: How many of which kind the objective needs, for the message.
        """
        config, special_tokens = self.config, self.tokenizer.special_tokens
        key = f"{self.use.key}.{key}: {token!r}"
        if token in config.tokenizer.allow_special:
            raise UserError(
                f"{key} is in tokenizer.allow_special, so documents may contain it; a sentinel must not occur in a "
                "text: choose another token"
            )
        if token not in special_tokens:
            have = ", ".join(map(repr, special_tokens)) or "none"
            # A model that sees both sides does not learn the next token.
            causal = config.model.direction == "causal" and config.model.encoder is None
            otherwise = f"; or set {self.use.key}.type: causal" if causal else ""
            raise UserError(
                f"{key} is not a special token of the tokenizer; besides the end-of-document token it has {have}. Use "
                f"{needs} of these; or add {'it' if needs == 'one' else 'the sentinels'} to the tokenizer: "
                f"{how_to_get_sentinels(config)}{otherwise}"
            )
        return special_tokens[token]

    @property
    def ordinary(self) -> IntArray:
        """Ids of the tokens that texts are made of."""
        special = [*self.tokenizer.special_tokens.values(), self.tokenizer.end_of_document]
        return np.setdiff1d(np.arange(self.tokenizer.vocab_size), special)

    @property
    def words(self) -> WordTable | None:
        """Words of the tokenizer, if words are masked."""
        if not self.use.objective.whole_words:
            return None
        assert self.folder is not None, "whole words are read from the tokenizer"
        return _words(self.folder)


@lru_cache(maxsize=4)
def _words(folder: Path) -> WordTable:
    from pipeline.data.tokenization.tokenizer import Tokenizer

    return word_table(Tokenizer.open(folder))


def how_to_get_sentinels(config: Config) -> str:
    """Ways to a tokenizer that has the sentinels, for messages."""
    if all(source.dataset is not None for source in config.data.sources):
        return (
            "make the datasets with tokenizer.special_tokens in the run file, or `pipeline data adopt --special-token`"
        )
    if config.tokenizer.train is not None:
        return (
            "list them in tokenizer.special_tokens and run `pipeline preprocess` with another data.dir, since the "
            "tokenizer is trained with them"
        )
    return (
        "if its file has them, list them in tokenizer.special_tokens, remove the copy of the tokenizer in "
        f"{config.data_dir / 'tokenizer'}, and run `pipeline preprocess`, which keeps the existing token ids"
    )
