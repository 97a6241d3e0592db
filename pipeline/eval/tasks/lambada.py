"""LAMBADA (Paperno et al. 2016): the last word of a passage, which takes all of the passage to know.

A passage is right if each token of the last word is the most probable one: that is Megatron-LM's `--strict-lambada`
(its other mode looks at the last token alone), and lm-evaluation-harness's `lambada_openai`. The two cut the passage in
the same place, before the last space; Megatron encodes each part separately, the harness the whole passage, of
which what follows the tokens of the first part is the word. This is the same wherever a tokenizer begins a new token
with the space before a word, and otherwise it is the harness's way here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.eval.scoring import Request, Scored, truncated
from pipeline.eval.tasks.wikitext import numbered_lines, read_text, record_text


def read_passages(path: Path) -> list[str]:
    """The passages of a file with a JSON object a line.

    Raises:
        UserError: there is no such file, it has no passages, or one of a single word.
    """
    found = []
    for number, line in numbered_lines(read_text(path)):
        text = record_text(path, number, line, ("text",))
        if not text.rpartition(" ")[0].strip() or text.endswith(" "):
            raise UserError(f"{path}:{number} has no last word after a space: {text[-40:]!r}")
        found.append(text)
    if not found:
        raise UserError(f"{path} has no passages")
    return found


def last_word(tokenizer: Tokenizer, passage: str, max_length: int) -> Request:
    """The request that predicts a passage's last word with the space before it.

    Raises:
        UserError: no token is the word's alone.
    """
    context, _, word = passage.rpartition(" ")
    before, following = encode_pair(tokenizer.encode, context, f" {word}")
    if not following:
        raise UserError(f"the tokenizer merges the last word of a passage with the text before it: {passage[-40:]!r}")
    return truncated(before, following, max_length)


def encode_pair(
    encode: Callable[[str], list[int]], context: str, continuation: str
) -> tuple[Sequence[int], Sequence[int]]:
    """Tokens of a context and of what follows, as the harness splits them; spaces between the two are the latter's."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    first = encode(context)
    return first, encode(context + continuation)[len(first) :]


def lambada_figures(requests: Sequence[Request], scored: Sequence[Scored]) -> dict[str, float]:
    """Figures that people compare, from the scored last words."""
    count = len(scored)
    nats = sum(each.nats for each in scored)
    accuracy = sum(each.greedy for each in scored) / count
    return {
        "accuracy": accuracy,
        # Of a mean of zeros and ones, with Bessel's correction as in the harness.
        "accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / max(1, count - 1)),
        "perplexity": math.exp(min(nats / count, 700.0)),
        "nats": nats,
        "passages": count,
        "truncated": sum(request.is_truncated for request in requests),
    }
