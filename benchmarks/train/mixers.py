"""What recurrent mixers cost on a CPU, beside what transformers computes without kernels, as JSON lines.

    OMP_NUM_THREADS=1 python benchmarks/train/mixers.py [--rounds 9] [--only scan delta kda documents conv kept step]

    scan       Mamba-2's scan forward and backward, as called and within a compiled function, beside transformers'
               (`mamba2_chunk_scan`) with chunks of 256, as Mamba-2 has them by default, of 128 and of 64
    delta      the gated delta rule beside transformers' (Qwen3-Next)
    kda        Kimi delta attention beside transformers' (Kimi Linear)
    documents  each of them, and the convolution, with documents of 300 positions on average beside one document
    conv       the convolution with silu, as called and within a compiled function, beside torch's own
    kept       bytes that a position leaves for the backward pass, in all, of function and inputs
    step       a training step of 3 layers with the gated delta rule and a full one beside Qwen3-Next of transformers

All sides of a line are called in turn; `ratio` is how many times faster we are, by medians. Times are the
processor's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.one_process import stepper_of
from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.host.cpu_allocator import keep_freed_memory
from pipeline.train.model.kernels.recurrence.base import PLAIN
from pipeline.train.model.kernels.recurrence.causal_conv import causal_conv
from pipeline.train.model.kernels.recurrence.chunks import Chunks
from pipeline.train.model.kernels.recurrence.ssd import ssd

LENGTH, DIM, VOCABULARY = 2048, 512, 1024
HEADS, HEAD_DIM, STATE = 16, 64, 128
"""Of Mamba-2 at this width."""
GOALS = {
    "scan": 2.0,
    "scan compiled": 2.8,
    "delta": 1.8,
    "kda": 4.0,
    "documents": 1 / 1.05,
    "conv": 1.0,
    "conv compiled": 1.0,
    "step": 1.5,
}
"""Times faster, at least."""
KEPT = 30 * 1024
"""Bytes of a position, at most."""

Call = Callable[[], object]
Function = Callable[[list[Tensor], Chunks], Tensor]


def medians(sides: dict[str, Call], rounds: int) -> dict[str, float]:
    """Milliseconds of each side, called in turn after a first round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, call in sides.items():
            begin = time.process_time()
            call()
            times[name] += [1e3 * (time.process_time() - begin)] * (number > 0)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def row(what: str, ours: str, other: str, found: dict[str, float], **more: Any) -> dict[str, Any]:
    """A line of the result."""
    ratio, wanted = found[other] / found[ours], GOALS[what]
    milliseconds = {f"{name}_ms": value for name, value in found.items()}
    return {
        "what": what,
        **more,
        **milliseconds,
        "beside": other,
        "ratio": round(ratio, 3),
        "goal": round(wanted, 3),
        "met": ratio >= wanted,
    }


def random(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def both_passes(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Call:
    """Forward and backward."""
    for tensor in inputs:
        tensor.requires_grad_()
    gradient = torch.ones_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, gradient)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def documents_of(length: int) -> Chunks:
    """Of 300 positions on average."""
    draw = torch.Generator().manual_seed(0)
    begins = torch.rand(length, generator=draw) < 1 / 300
    place = torch.arange(length)
    return Chunks.of(length, torch.where(begins, place, 0).cummax(0).values[None])


WHOLE, DOCUMENTS = Chunks.of(LENGTH), documents_of(LENGTH)


def scan_inputs() -> list[Tensor]:
    """x, dt, a, b, c."""
    x, dt, a, b, c = random(
        (1, LENGTH, HEADS, HEAD_DIM), (1, LENGTH, HEADS), (HEADS,), (1, LENGTH, 1, STATE), (1, LENGTH, 1, STATE)
    )
    return [x, F.softplus(dt - 2), -a.abs() * 4 - 0.5, b, c]


def delta_inputs(*, by_channel: bool) -> list[Tensor]:
    """q, k, v, g, beta: 8 heads of 64."""
    heads = (1, LENGTH, 8, 64)
    q, k, v, g, beta = random(heads, heads, heads, heads if by_channel else heads[:3], heads[:3])
    return [q, F.normalize(k, dim=-1), v, -F.softplus(g), beta.sigmoid()]


def conv_inputs() -> list[Tensor]:
    """x, weights, biases."""
    channels = HEADS * HEAD_DIM + 2 * STATE
    return random((1, LENGTH, channels), (channels, 4), (channels,))


def scanned(chunks: Chunks) -> Callable[..., Tensor]:
    return lambda *inputs: ssd(*inputs, chunks)[0]


def delta(chunks: Chunks) -> Callable[..., Tensor]:
    return lambda *inputs: PLAIN.delta_rule(*inputs, chunks)[0]


def convolved(chunks: Chunks) -> Callable[..., Tensor]:
    return lambda x, weight, bias: causal_conv(x, weight, bias, None, chunks)


def scan(rounds: int) -> Iterator[dict[str, Any]]:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    inputs = scan_inputs()

    def theirs(size: int) -> Callable[..., Tensor]:
        return lambda *given: mamba2_chunk_scan(*given, size)

    others = {f"transformers {size}": both_passes(theirs(size), inputs) for size in (256, 128, 64)}
    ours = both_passes(scanned(WHOLE), inputs)
    found = medians({"ours": ours, "compiled": both_passes(compiled(scanned(WHOLE)), inputs), **others}, rounds)
    for other in others:
        yield row("scan", "ours", other, found)
        yield row("scan compiled", "compiled", other, found)


def rule(name: str, theirs: Callable[..., tuple[Tensor, Any]], rounds: int) -> dict[str, Any]:
    """Ours against transformers' function."""
    inputs = delta_inputs(by_channel=name == "kda")
    sides = {
        "ours": both_passes(delta(WHOLE), inputs),
        "transformers": both_passes(lambda *given: theirs(*given)[0], inputs),
    }
    return row(name, "ours", "transformers", medians(sides, rounds))


def delta_rule(rounds: int) -> Iterator[dict[str, Any]]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    yield rule("delta", torch_chunk_gated_delta_rule, rounds)


def kda(rounds: int) -> Iterator[dict[str, Any]]:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    yield rule("kda", chunk_kimi_delta_attention, rounds)


FUNCTIONS: dict[str, tuple[Callable[[Chunks], Callable[..., Tensor]], Callable[[], list[Tensor]]]] = {
    "scan": (scanned, scan_inputs),
    "delta": (delta, lambda: delta_inputs(by_channel=False)),
    "kda": (delta, lambda: delta_inputs(by_channel=True)),
    "conv": (convolved, conv_inputs),
}


def documents(rounds: int) -> Iterator[dict[str, Any]]:
    for name, (function, inputs_of) in FUNCTIONS.items():
        inputs = inputs_of()
        sides = {"documents": both_passes(function(DOCUMENTS), inputs), "one": both_passes(function(WHOLE), inputs)}
        yield row("documents", "documents", "one", medians(sides, rounds), of=name)


def conv(rounds: int) -> Iterator[dict[str, Any]]:
    inputs = conv_inputs()

    def by_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        padded = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=len(weight))
        return F.silu(padded[..., :LENGTH].transpose(1, 2))

    sides = {
        "ours": both_passes(convolved(WHOLE), inputs),
        "compiled": both_passes(compiled(convolved(WHOLE)), inputs),
        "torch": both_passes(by_torch, inputs),
    }
    found = medians(sides, rounds)
    yield row("conv", "ours", "torch", found)
    yield row("conv compiled", "compiled", "torch", found)


def kept(rounds: int) -> Iterator[dict[str, Any]]:
    """Storages that the graph holds, each once."""
    for name, (function, inputs_of) in FUNCTIONS.items():
        inputs, held = [tensor.requires_grad_() for tensor in inputs_of()], dict[int, int]()

        def pack(tensor: Tensor, held: dict[int, int] = held) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(DOCUMENTS)(*inputs)
        found = sum(held.values()) // LENGTH
        yield {"what": "kept", "of": name, "bytes_per_position": found, "goal": KEPT, "met": found <= KEPT}


def step(rounds: int) -> Iterator[dict[str, Any]]:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    delta_sizes = {"key_heads": 8, "value_heads": 16, "key_dim": 64, "value_dim": 64}
    model = {
        "layers": 4,
        "dim": DIM,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 64,
        "ffn_dim": 1536,
        "pattern": ["delta", "delta", "delta", "full"],
        "kinds": {"full": {"output_gate": True}, "delta": {"mixer": "gated_delta", "delta": delta_sizes}},
    }
    train = {"sequence_length": LENGTH, "precision": {"compute": "fp32"}, "compile": False}
    tokens = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        torch.ones(1, LENGTH),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        {},
    )
    stepper = stepper_of(torch.device("cpu"), VOCABULARY, model=model, train=train)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1536,
        mlp_only_layers=[0, 1, 2, 3],
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    other = Qwen3NextForCausalLM(config)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-4, fused=True)

    def theirs() -> None:
        other(input_ids=tokens[:, :-1], labels=tokens[:, :-1], use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    sides: dict[str, Call] = {
        "ours": lambda: stepper.step(StepData(0, [batch], LENGTH, samples=range(1)), 1e-4),
        "transformers": theirs,
    }
    yield row("step", "ours", "transformers", medians(sides, rounds))


PARTS: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "scan": scan,
    "delta": delta_rule,
    "kda": kda,
    "documents": documents,
    "conv": conv,
    "kept": kept,
    "step": step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    # As a training does.
    keep_freed_memory()
    for part in given.only:
        for line in PARTS[part](given.rounds):
            print(json.dumps(line | {"threads": torch.get_num_threads()}), flush=True)


if __name__ == "__main__":
    main()
