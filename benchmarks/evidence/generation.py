"""New tokens per second of `pipeline.eval.generation.generate`, beside transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.eval.generate_cache import Shape, Texts, both_sides, compare, models, random_prompts
from evidence.item import Result
from pipeline.train.model.decoder import Context, Decoder

TIE = 1e-5
"""Logits that differ by less, in units of their standard deviation, are in an order that rounding decides."""


def measure(
    device: str,
    work: Path,
    *,
    model: Mapping[str, int],
    rows: Sequence[int],
    new: int,
    rounds: int,
    exact_model: Mapping[str, int],
    exact_rows: int,
    exact_new: int,
) -> Result:
    """Greedy continuations of random prompts of 20 to 200 tokens by random weights, reading of the prompts included.

    In bf16 the speeds of both, and how far the texts agree: rounding decides between tokens that are almost as likely.
    In fp32, on a small model, the texts of both have to be equal, up to a tie.

    Args:
        device: Where the models are.
        work: Not used.
        model: A `Shape`, measured in bf16.
        rows: Prompts that are continued at once.
        new: New tokens of each.
        rounds: Calls of each side that are timed, after one that is not; medians.
        exact_model: The `Shape` in fp32.
        exact_rows: The same as `rows`.
        exact_new: The same as `new`.
    """
    exact = compare_exactly(*models(Shape(**exact_model), device), exact_rows, exact_new)
    ours, theirs = models(Shape(**model), device, torch.bfloat16)
    speeds, complete = [], True
    for number in rows:
        line, texts = compare(_sides(ours, theirs, number, new), rounds)
        found = agreement(texts["ours"], texts["transformers"])
        complete &= found["tokens"] == [number * new] * 2
        speeds.append(
            {"rows": number, **line["tokens_per_s"], "ratio": line["ratio"]}
            | {key: found[key] for key in ("equal_rows", "equal_tokens")}
        )
    return {
        "parameters": sum(parameter.numel() for parameter in ours.parameters()),
        "attention": theirs.config._attn_implementation,
        "cache": _cache(theirs),
        "tokens_per_second": speeds,
        "exact": exact,
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device == "cuda" else None,
        "checks": {
            "greedy texts in fp32 are equal up to ties": all(part["gap"] <= TIE for part in exact["parts"]),
            "every text has all its tokens": complete,
        },
    }


def compare_exactly(ours: Decoder, theirs: LlamaForCausalLM, rows: int, new: int) -> dict[str, Any]:
    """`agreement` of two models, with `parts`: each row whose texts differ, and how near a tie the first such token is.

    `gap` is the difference of both tokens' logits, by the standard deviation of all logits there.
    """
    sides = _sides(ours, theirs, rows, new)
    mine, other = sides["ours"](), sides["transformers"]()
    found = agreement(mine, other)
    parts = []
    for row, prompt in enumerate(random_prompts(rows, ours.spec.vocab_size)):
        place = found["equal_tokens"][row]
        if place < new:
            tokens = torch.tensor([[*prompt, *mine[row][:place]]], device=theirs.device)
            with torch.no_grad():
                logits = cast(Tensor, ours(tokens, Context()))[0, -1, : ours.spec.vocab_size]
            gap = (logits[mine[row][place]] - logits[other[row][place]]).abs() / logits.std()
            parts.append({"row": row, "token": place, "gap": gap.item()})
    return {**found, "parts": parts}


def _sides(ours: Decoder, theirs: LlamaForCausalLM, rows: int, new: int) -> dict[str, Callable[[], Texts]]:
    """Both, each with the kernels that it has when it is used for inference."""
    sides = both_sides(ours, theirs, random_prompts(rows, ours.spec.vocab_size), new)

    def here() -> Texts:
        # As `load_decoder` does, for the whole process.
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            return sides["ours"]()
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)

    return {**sides, "ours": here}


def _cache(theirs: LlamaForCausalLM) -> str:
    """The type of cache that `generate` takes where nothing is said."""
    tokens = torch.tensor([[1, 2, 3]], device=theirs.device)
    found = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=2,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    return type(found.past_key_values).__name__


def agreement(ours: Texts, theirs: Texts) -> dict[str, Any]:
    """How far texts agree.

    Returns:
        `rows`; `equal_rows`; `equal_tokens`: of each row, before the first that differs; `tokens`: of both sides.
    """
    equal = []
    for mine, other in zip(ours, theirs, strict=True):
        pairs = enumerate(zip(mine, other, strict=False))
        equal.append(next((index for index, (a, b) in pairs if a != b), min(len(mine), len(other))))
    return {
        "rows": len(ours),
        "equal_rows": sum(mine == other for mine, other in zip(ours, theirs, strict=True)),
        "equal_tokens": equal,
        "tokens": [sum(map(len, ours)), sum(map(len, theirs))],
    }
