"""Attentions of every kind, and what they are by a mask that is counted out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from pipeline.train.model.kernels.attention_mask import AttentionMask, Documents, Kernel

CPU = torch.device("cpu")
HEAD = 8


@dataclass(frozen=True)
class Case:
    """A piece of the queries of a batch."""

    rows: tuple[tuple[int, ...], ...]
    """Lengths of the documents of each row; equal sums."""
    documents: bool
    window: int | None
    start: int
    end: int
    heads: tuple[int, int] = (4, 2)
    told: bool = True
    """Whether the starts are given, or taken from the bounds."""

    def sight(self, device: torch.device = CPU) -> AttentionMask:
        documents = None
        if self.documents:
            bounds, starts, length = [], [], sum(self.rows[0])
            for row, lengths in enumerate(self.rows):
                begins = [sum(lengths[:place]) for place in range(len(lengths))]
                bounds.append([begin for begin, size in zip(begins, lengths, strict=True) for _ in range(size)])
                starts += [row * length + begin for begin in begins]
            given = torch.tensor(starts, dtype=torch.int32) if self.told else None
            documents = Documents(torch.tensor(bounds, device=device), given)
        return AttentionMask.of(len(self.rows), (self.start, self.end), self.window, device, documents)

    def seen(self) -> Tensor:
        """[B, 1, C, T], one query and key after the other."""
        mask = torch.zeros(len(self.rows), 1, self.end - self.start, self.end, dtype=torch.bool)
        for row, lengths in enumerate(self.rows):
            document = [number for number, size in enumerate(lengths) for _ in range(size)]
            for query in range(self.start, self.end):
                for key in range(query + 1):
                    together = not self.documents or document[key] == document[query]
                    near = self.window is None or query - key < self.window
                    mask[row, 0, query - self.start, key] = together and near
        return mask

    def draw(self, dtype: torch.dtype, device: torch.device = CPU, size: int = HEAD) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        draw = torch.Generator().manual_seed(1)
        (heads, kv), samples, queries = self.heads, len(self.rows), self.end - self.start
        shapes = ((queries, heads), (self.end, kv), (self.end, kv), (queries, heads))
        return [torch.randn(samples, *shape, size, generator=draw).to(device, dtype) for shape in shapes]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length = draw(st.integers(1, 40))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=12))) if length > 1 else []
        ends = [*cuts, length]
        rows.append(tuple(end - begin for begin, end in zip([0, *cuts], ends, strict=True)))
    end = draw(st.integers(1, length))
    start = draw(st.integers(0, end - 1))
    window = draw(st.none() | st.integers(1, 45))
    heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    return Case(tuple(rows), draw(st.booleans()), window, start, end, heads, draw(st.booleans()))


SOME = (
    Case(((40,), (7, 1, 20, 12)), True, None, 0, 40),
    Case(((40,), (7, 1, 20, 12)), True, 6, 0, 40),
    Case(((40,), (40,)), False, 6, 0, 40),
    Case(((40,), (40,)), False, None, 0, 40),
    Case(((40,), (7, 1, 20, 12)), True, None, 20, 35),
    Case(((40,), (7, 1, 20, 12)), True, 9, 20, 35),
    Case(((40,), (40,)), False, None, 20, 40),
)


def reference(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax of the scores that are seen, fp64 or what the inputs are."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * 0.3
    weights = scores.masked_fill(~case.seen().to(q.device), -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhe->bqhe", weights, v)


def differences(case: Case, kernel: Kernel, inputs: list[Tensor], backward: bool = True) -> dict[str, float]:
    """By output and gradient, the largest difference from the reference, over its largest value or 1."""
    *qkv, gradient = inputs
    ours = [x.detach().clone().requires_grad_(backward) for x in qkv]
    theirs = [x.detach().double().requires_grad_() for x in qkv]
    found = kernel(ours[0], ours[1], ours[2], kernel.prepare(case.sight(qkv[0].device)), 0.3)
    expected = reference(case, theirs[0], theirs[1], theirs[2])
    pairs = {"output": (found, expected)}
    if backward:
        found.backward(gradient)
        expected.backward(gradient.double())
        for name, mine, other in zip("qkv", ours, theirs, strict=True):
            assert mine.grad is not None and other.grad is not None
            pairs[name] = (mine.grad, other.grad)
    return {
        name: float((mine.detach() - other.detach()).abs().max() / other.detach().abs().max().clamp(min=1))
        for name, (mine, other) in pairs.items()
    }
