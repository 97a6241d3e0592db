"""Texts that a checkpoint writes for the fixed prompts of `eval.continuations`, kept in the evaluation's report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.common.console import Console, verbatim, warn
from pipeline.common.errors import UserError
from pipeline.common.redaction import masked
from pipeline.config import Config
from pipeline.config.eval import ContinuationsConfig
from pipeline.data.sources.records import printable
from pipeline.eval.engine import GenerationEngine
from pipeline.eval.generation.detokenize import Detokenizer
from pipeline.eval.generation.generate import encode_prompt, generate
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.inference import decoder_of
from pipeline.eval.scoring import Prompt, continue_greedily

_SHOWN = 200
"""Characters of a text on the console."""


@dataclass(frozen=True)
class Continuations:
    """Continued prompts, as a report keeps them."""

    made_with: dict[str, Any]
    """The section `eval.continuations`."""
    texts: list[dict[str, str]]
    """For each prompt `prompt`, `text` (without the prompt) and `finish`: `stop` at the end of the document, else
    `length`. Empty if there is an error."""
    error: str | None = None
    """Why there are none, as of a model that diverged."""


def refuse_continuations(config: Config, processes: int) -> None:
    """Refuse draws on several processes, which continue texts only greedily.

    Raises:
        UserError: `eval.continuations.temperature` is not 0.
    """
    settings = config.eval.continuations
    if settings is not None and settings.temperature and processes > 1:
        raise UserError(
            f"eval.continuations.temperature is {settings.temperature:g}, but {processes} processes continue texts "
            "only greedily; set it to 0, or evaluate on one process (eval.processes: 1)"
        )


def write_continuations(
    engine: GenerationEngine, console: Console, beat: Callable[[], None] = lambda: None
) -> Continuations | None:
    """Continue the prompts of `eval.continuations`; None without the section. Every rank calls this.

    What cannot be continued does not end the evaluation: the reason is printed and kept.

    Args:
        engine: the model.
        console: where the texts are printed.
        beat: a sign of life, called after each token.
    """
    settings = engine.config.eval.continuations
    if settings is None:
        return None
    alone = engine.setup.mesh.layout.world_size == 1
    made_with = settings.model_dump(mode="json")
    try:
        found = _alone(engine, settings) if alone else _together(engine, settings, beat)
    except UserError as error:
        warn(console, f"eval.continuations: {error}")
        return Continuations(made_with, [], masked(str(error)))
    beat()
    for prompt, (text, _) in zip(settings.prompts, found, strict=True):
        shown = f"{prompt}{text}"
        verbatim(console, printable(shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"))
    texts = [
        {"prompt": prompt, "text": text, "finish": finish}
        for prompt, (text, finish) in zip(settings.prompts, found, strict=True)
    ]
    return Continuations(made_with, texts)


def _alone(engine: GenerationEngine, settings: ContinuationsConfig) -> list[tuple[str, str]]:
    model = decoder_of(engine.config, engine.model.whole, engine.tokenizer)
    sampling = Sampling(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed)
    found = generate(model, engine.tokenizer, settings.prompts, sampling, slots=engine.config.eval.batch_size)
    return [(each.text, each.finish) for each in found]


def _together(
    engine: GenerationEngine, settings: ContinuationsConfig, beat: Callable[[], None]
) -> list[tuple[str, str]]:
    encoded = [encode_prompt(engine.tokenizer, prompt) for prompt in settings.prompts]
    longest = max(map(len, encoded))
    if longest + settings.max_tokens > engine.max_length + 1:
        raise UserError(
            f"a prompt of {longest:,} tokens and {settings.max_tokens:,} new ones are more than eval.max_length "
            f"({engine.max_length:,}) allows; shorten the prompt, or lower eval.continuations.max_tokens"
        )
    found = continue_greedily(
        engine,
        [Prompt(ids, settings.max_tokens) for ids in encoded],
        batch_size=engine.config.eval.batch_size,
        advance=lambda prompts: beat(),
    )
    texts = []
    for ids, new in zip(encoded, found, strict=True):
        detokenizer = Detokenizer(engine.tokenizer, ids)
        text = "".join(map(detokenizer.add, new)) + detokenizer.finish()
        texts.append((text, "length" if len(new) == settings.max_tokens else "stop"))
    return texts
