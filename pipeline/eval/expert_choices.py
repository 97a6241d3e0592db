"""Experts that the tokens of a text chose: collected while texts are continued, and shown by token and layer.

Shapes: R rows, S positions, T tokens of a text, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from pipeline.common.console import Console, print_table
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.train.model.context import RoutingObserver
from pipeline.train.model.mlps.experts.routing import Routed
from pipeline.train.rules.base import spec_of

_TOKEN_WIDTH = 16
"""Characters of a token in a table at most."""
_GAP = 2
"""Spaces between columns of a table."""


@dataclass(frozen=True)
class ExpertChoices:
    """Experts of the tokens of a text that the model has read: all but the last of those that it wrote.

    Attributes:
        tokens: Their ids.
        layers: Of each layer with experts the experts of each token, ascending.
    """

    tokens: tuple[int, ...]
    layers: Mapping[int, Sequence[Sequence[int]]]

    def of_token(self, place: int) -> dict[int, Sequence[int]] | None:
        """Experts by layer of the token in a place; None if the model has not read it."""
        if place >= len(self.tokens):
            return None
        return {layer: chosen[place] for layer, chosen in self.layers.items()}

    def shares(self, counts: Mapping[int, int]) -> dict[int, list[float]]:
        """Share of the tokens that chose each expert, by layer; they add up to the experts of a token.

        Args:
            counts: Experts of each layer.
        """
        found = {}
        for layer, chosen in self.layers.items():
            ids = torch.tensor(chosen, dtype=torch.int64).flatten()
            chosen_E = torch.bincount(ids, minlength=counts[layer])
            found[layer] = (chosen_E.double() / max(1, len(self.tokens))).tolist()
        return found


class ChoiceCollector:
    """Notes the experts that tokens choose in forward passes of several texts at once."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, list[Tensor]]] = {}  # key of a text -> layer -> [T, K] of each pass

    def observer(self, keys: Sequence[int], counts: Sequence[int]) -> RoutingObserver:
        """The observer of a forward pass.

        Args:
            keys: Of the text of each row.
            counts: Tokens of each row that count; the rest is padding on the right.
        """

        def note(layer: int, routed: Routed) -> None:
            ids_RSK = routed.ids_TK.view(len(keys), -1, routed.ids_TK.shape[-1])
            for row, (key, length) in enumerate(zip(keys, counts, strict=True)):
                self._parts.setdefault(key, {}).setdefault(layer, []).append(ids_RSK[row, :length])

        return note

    def take(self, key: int, tokens: Sequence[int]) -> ExpertChoices:
        """The choices of a text, which are forgotten here.

        Args:
            key: Of the text.
            tokens: Its prompt and its new tokens; the last ones need not have been read.
        """
        layers = {layer: torch.cat(parts).sort(-1).values for layer, parts in self._parts.pop(key, {}).items()}
        read = max(map(len, layers.values()), default=0)
        return ExpertChoices(tuple(tokens[:read]), {layer: ids_TK.tolist() for layer, ids_TK in layers.items()})

    def forget(self, key: int) -> None:
        """Nobody asks for a text any more."""
        self._parts.pop(key, None)


def check_has_experts(config: Config) -> None:
    """Raise a `UserError` if no layer of the model has experts."""
    if not spec_of(config).expert_layers:
        raise UserError("--experts: no layer of the model has experts (model.mlp is not experts); leave --experts out")


def show_choices(
    console: Console, choices: ExpertChoices, counts: Mapping[int, int], text: Callable[[int], str]
) -> None:
    """Print the experts of each token by layer, then for each layer which experts the tokens chose most.

    Args:
        console: Where to; as many layers beside each other as it is wide.
        choices: Of a text.
        counts: Experts of each layer.
        text: Of a token.
    """
    tokens = [_quoted(text(token)) for token in choices.tokens]
    columns = {f"layer {layer}": [" ".join(map(str, of)) for of in chosen] for layer, chosen in choices.layers.items()}
    for names in _blocks(columns, console.width - max(map(len, tokens), default=0)):
        table = Table("token", box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for name in names:
            table.add_column(name, no_wrap=True)
        for place, token in enumerate(tokens):
            table.add_row(token, *(columns[name][place] for name in names))
        print_table(console, table)
        console.print()
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for name in ("layer", "unused"):
        table.add_column(name, no_wrap=True, min_width=len(name))
    table.add_column("share of tokens by expert, most first", no_wrap=True, overflow="ellipsis")
    for layer, shares in choices.shares(counts).items():
        most = sorted(range(len(shares)), key=lambda expert: (-shares[expert], expert))
        words = [f"{expert}: {shares[expert]:.0%}" for expert in most if shares[expert]]
        table.add_row(str(layer), f"{shares.count(0.0)} of {len(shares)}", "  ".join(words))
    print_table(console, table)


def _quoted(text: str) -> str:
    """A token in quotes, with line ends and the like spelled out."""
    quoted = repr(text)
    return quoted if len(quoted) <= _TOKEN_WIDTH else quoted[: _TOKEN_WIDTH - 1] + "\u2026"


def _blocks(columns: Mapping[str, Sequence[str]], width: int) -> Iterator[list[str]]:
    """Names of columns that fit beside each other; at least one at a time."""
    block: list[str] = []
    used = 0
    for name, cells in columns.items():
        own = _GAP + max(map(len, (name, *cells)))
        if block and used + own > width:
            yield block
            block, used = [], 0
        block.append(name)
        used += own
    if block:
        yield block
