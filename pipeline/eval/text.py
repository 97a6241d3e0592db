"""Continue prompts with a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from pipeline.common.console import Console, echo, say
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.eval import GenerateConfig
from pipeline.data.tokenization.chat_prompts import chat_prompts
from pipeline.eval.expert_choices import ExpertChoices, check_has_experts, show_choices
from pipeline.eval.generation.batch import Token
from pipeline.eval.generation.detokenize import TextTokenizer
from pipeline.eval.generation.generate import Continuation, as_they_end, encode_prompt, stream
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.inference import Loaded, load_decoder
from pipeline.train.checkpoint.exported import Evaluated, ExportedWeights, WeightsOf, section_of

SLOTS = 32
"""Prompts that are continued at the same time."""


def sampling_of(config: GenerateConfig, logprobs: int | None = None) -> Sampling:
    """Sampling by the `generate:` section."""
    return Sampling(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        stop=tuple(config.stop),
        seed=config.seed,
        logprobs=logprobs,
    )


def continue_prompt(
    config: Config,
    which: WeightsOf = None,
    console: Console | None = None,
    *,
    chat: bool = False,
    chat_template: Path | None = None,
) -> str:
    """Print `generate.prompt` and its continuation as it is generated; returns the continuation.

    Args:
        config: Of the run.
        which: Checkpoint or folder of the weights; by default the latest checkpoint.
        console: Where to.
        chat: The prompt is a message of a user, and the continuation its answer.
        chat_template: File of a template in place of the model's own.
    """
    console = console or Console()
    loaded = load_decoder(config, which)
    _say_weights(console, config, loaded.source)
    (prompt,), sampling = _as_asked(
        loaded, [config.generate.prompt], sampling_of(config.generate), chat=chat, template=chat_template
    )
    coming = stream(loaded.model, loaded.tokenizer, prompt, sampling)
    _show(console, config.generate.prompt + ("\n" if chat else ""), style="bold")
    pieces = []
    for piece in coming:
        _show(console, piece.text)
        pieces.append(piece.text)
    console.print()
    return "".join(pieces)


def continue_prompts(
    config: Config,
    prompts: Sequence[str],
    which: WeightsOf = None,
    *,
    as_json: bool = False,
    logprobs: int | None = None,
    experts: bool = False,
    chat: bool = False,
    chat_template: Path | None = None,
    console: Console | None = None,
) -> None:
    """Print prompts and their continuations, which are generated together, in the order given.

    Args:
        config: Its `generate.prompt` is not looked at.
        prompts: Texts.
        which: Checkpoint or folder of the weights; by default the latest checkpoint.
        as_json: Print nothing but an object a line: `prompt`, `text`, `finish`, and `tokens`, each of which has
            `id`, `text`, `logprob` and `top`, a list of objects with `id`, `text` and `logprob`.
        logprobs: See `Sampling.logprobs`.
        experts: Show which experts the tokens chose. JSON then has `prompt_tokens` too. `experts` of a token are a
            list by layer, or null for the last one if the model has not read it; `expert_shares` has by layer the share
            of the tokens that chose each expert.
        chat: Each prompt is a message of a user, and its continuation the answer.
        chat_template: File of a template in place of the model's own.
        console: Where to.

    Raises:
        UserError: Experts of a model that has none; a conversation with a model without a chat template.
    """
    console = console or Console()
    if experts:
        check_has_experts(config)
    loaded = load_decoder(config, which)
    if not as_json:
        _say_weights(console, config, loaded.source)
    asked, settings = _as_asked(
        loaded, prompts, sampling_of(config.generate, logprobs), chat=chat, template=chat_template
    )
    ended = as_they_end(loaded.model, loaded.tokenizer, asked, settings, slots=SLOTS, experts=experts)
    counts = {layer: mixture.router.count for layer, mixture in loaded.model.spec.expert_layers.items()}
    for number, (index, continuation) in enumerate(_in_order(ended)):
        if as_json:
            values = _values(prompts[index], continuation)
            if continuation.choices is not None:
                values = _with_experts(values, continuation.choices, counts, loaded.tokenizer)
            echo(orjson.dumps(values).decode(), flush=True)
            continue
        if number:
            console.print()
        _show(console, prompts[index] + ("\n" if chat else ""), style="bold")
        _show(console, continuation.text + "\n")
        if continuation.choices is not None:
            console.print()
            show_choices(console, continuation.choices, counts, lambda token: loaded.tokenizer.decode([token]))


def _as_asked(
    loaded: Loaded, prompts: Sequence[str], sampling: Sampling, *, chat: bool, template: Path | None
) -> tuple[Sequence[str | Sequence[int]], Sampling]:
    """Prompts and sampling as they go to the model: texts to continue, or conversations to answer."""
    if not chat:
        return prompts, sampling
    found = chat_prompts(loaded.source.path, loaded.tokenizer, template)
    if found is None:
        raise UserError(
            f"--chat: the model in {loaded.source.path} has no chat template; give one with --chat-template FILE"
        )
    ids = [found.encode([{"role": "user", "content": prompt}]) for prompt in prompts]
    found.close()
    return ids, replace(sampling, **found.sampling)


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file: each line is one; in a `.jsonl` file a JSON text, or an object with a text as `prompt`.

    Raises:
        UserError: The file has none, or a line is not such a thing.
    """
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {file} is not UTF-8 text: {error}") from None
    # Not at the further characters that `splitlines` takes for line ends, which a text may have.
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
    if file.suffix == ".jsonl":
        lines = [_of_json(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not lines:
        raise UserError(f"--prompts {file} is empty; write a prompt on each line")
    return lines


def _of_json(file: Path, number: int, line: str) -> str:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UserError(f"--prompts {file}, line {number}: not JSON ({error})") from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise UserError(f'--prompts {file}, line {number}: write a text, or an object like {{"prompt": "a text"}}')
    return prompt


def _say_weights(console: Console, config: Config, source: Evaluated) -> None:
    name = f"{source.path.name} ({source.name})" if isinstance(source, ExportedWeights) else source.path.name
    of = ", moving average" if section_of(source, config.eval.weights) == "ema" else ""
    say(console, f"{name}{of}:")


def _show(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, end="", style=style, markup=False, highlight=False, soft_wrap=True)


def _in_order(ended: Iterator[tuple[int, Continuation]]) -> Iterator[tuple[int, Continuation]]:
    """Each one as soon as all before it have ended."""
    waiting: dict[int, Continuation] = {}
    following = 0
    for index, continuation in ended:
        waiting[index] = continuation
        while following in waiting:
            yield following, waiting.pop(following)
            following += 1


def _values(prompt: str, continuation: Continuation) -> dict[str, Any]:
    def values(token: Token) -> dict[str, Any]:
        top = [{"id": number, "text": text, "logprob": logprob} for number, text, logprob in token.top]
        scores = {} if token.logprob is None else {"logprob": token.logprob, "top": top}
        return {"id": token.id, "text": token.text, **scores}

    return {
        "prompt": prompt,
        "text": continuation.text,
        "finish": continuation.finish,
        "tokens": [values(token) for token in continuation.tokens],
    }


def _with_experts(
    values: dict[str, Any], choices: ExpertChoices, counts: Mapping[int, int], tokenizer: TextTokenizer
) -> dict[str, Any]:
    """The values of a continuation with the experts of its tokens and of its prompt's."""

    def of(place: int) -> dict[str, Any]:
        found = choices.of_token(place)
        return {"experts": None if found is None else {str(layer): ids for layer, ids in found.items()}}

    prompt = encode_prompt(tokenizer, values["prompt"])
    return {
        **values,
        "prompt_tokens": [
            {"id": token, "text": tokenizer.decode([token]), **of(place)} for place, token in enumerate(prompt)
        ],
        "tokens": [token | of(len(prompt) + place) for place, token in enumerate(values["tokens"])],
        "expert_shares": {str(layer): shares for layer, shares in choices.shares(counts).items()},
    }
