"""Attentions of every kind, and what they are by a mask that is counted out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from pipeline.train.model.kernels.attention_mask import AttentionMask, Documents, Kernel, Terms
from pipeline.train.model.part_spec import Reach

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
    ahead: int | None = 0
    """Keys behind a query that it sees."""
    prefixed: bool = False
    """Half of each document is a prefix."""
    others: tuple[tuple[int, ...], ...] = ()
    """Lengths of the documents of another sequence, whose keys are seen; equally many."""
    soft_cap: float | None = None
    sinks: bool = False
    value: int | None = None
    """Size of a value head; None: that of the others."""

    @property
    def terms(self) -> Terms:
        return Terms(0.3, self.soft_cap)

    def sight(self, device: torch.device = CPU) -> AttentionMask:
        piece, length = (self.start, self.end), sum(self.rows[0])
        documents = self._documents(self.rows, device) if self.documents else None
        if self.others:
            others = self._documents(self.others, device) if self.documents else None
            both = None if documents is None or others is None else (documents, others)
            return AttentionMask.across(len(self.rows), piece, sum(self.others[0]), device, both)
        reach = replace(Reach.window(self.window), ahead=self.ahead)
        return AttentionMask.of(len(self.rows), piece, reach, device, documents, length)

    def _documents(self, rows: tuple[tuple[int, ...], ...], device: torch.device) -> Documents:
        bounds, starts, prefixes, length = [], [], [], sum(rows[0])
        for row, lengths in enumerate(rows):
            begins = [sum(lengths[:place]) for place in range(len(lengths))]
            bounds.append([begin for begin, size in zip(begins, lengths, strict=True) for _ in range(size)])
            halves = [begin + size // 2 for begin, size in zip(begins, lengths, strict=True)]
            prefixes.append([half for half, size in zip(halves, lengths, strict=True) for _ in range(size)])
            starts += [row * length + begin for begin in begins]
        given = torch.tensor(starts, dtype=torch.int32) if self.told else None
        prefix = torch.tensor(prefixes, device=device) if self.prefixed else None
        return Documents(torch.tensor(bounds, device=device), given, prefix)

    def seen(self) -> Tensor:
        """[B, 1, C, T], one query and key after the other."""
        keys = sum((self.others or self.rows)[0])
        mask = torch.zeros(len(self.rows), 1, self.end - self.start, keys, dtype=torch.bool)
        for row, lengths in enumerate(self.rows):
            document = [number for number, size in enumerate(lengths) for _ in range(size)]
            theirs = [number for number, size in enumerate((self.others or self.rows)[row]) for _ in range(size)]
            for query in range(self.start, self.end):
                half = sum(lengths[: document[query]]) + lengths[document[query]] // 2
                for key in range(keys):
                    together = not self.documents or theirs[key] == document[query]
                    near = self.window is None or query - key < self.window
                    behind = self.ahead is None or key - query <= self.ahead
                    behind = behind or (self.prefixed and key < half)
                    mask[row, 0, query - self.start, key] = together and (bool(self.others) or (near and behind))
        return mask

    def draw(self, dtype: torch.dtype, device: torch.device = CPU, size: int = HEAD) -> list[Tensor]:
        """q, k, v and the gradient of the output; and the sinks, if there are any."""
        draw = torch.Generator().manual_seed(1)
        (heads, kv), samples, queries = self.heads, len(self.rows), self.end - self.start
        keys, value = self.sight().keys, self.value or size
        shapes = ((queries, heads, size), (keys, kv, size), (keys, kv, value), (queries, heads, value))
        found = [torch.randn(samples, *shape, generator=draw) for shape in shapes]
        found += [torch.randn(heads, generator=draw)] * self.sinks
        return [x.to(device, dtype) for x in found]


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


@st.composite
def all_cases(draw: st.DrawFn) -> Case:
    """Those of `cases`, to both sides, with prefixes, of keys of another sequence."""
    case = draw(cases())
    kind = draw(st.sampled_from(["ahead", "prefix", "across"]))
    if kind == "ahead":
        return replace(case, ahead=draw(st.none() | st.integers(1, 45)))
    if kind == "prefix":
        return replace(case, documents=True, prefixed=True)
    # Equally many documents in a row as there are of the queries, and equally many keys in each row.
    most = max(map(len, case.rows))
    others = []
    for lengths in case.rows:
        sizes = [draw(st.integers(1, 5)) for _ in lengths]
        sizes[0] += 5 * most - sum(sizes)
        others.append(tuple(sizes))
    return replace(case, others=tuple(others))


TERMS = (
    {"sinks": True},
    {"soft_cap": 0.7},
    {"soft_cap": 2.0, "sinks": True},
    {"value": 5},
    {"value": 13, "sinks": True},
    {"value": 5, "soft_cap": 0.7},
)
"""Changes of a case."""


SOME = (
    Case(((40,), (7, 1, 20, 12)), True, None, 0, 40),
    Case(((40,), (7, 1, 20, 12)), True, 6, 0, 40),
    Case(((40,), (40,)), False, 6, 0, 40),
    Case(((40,), (40,)), False, None, 0, 40),
    Case(((40,), (7, 1, 20, 12)), True, None, 20, 35),
    Case(((40,), (7, 1, 20, 12)), True, 9, 20, 35),
    Case(((40,), (40,)), False, None, 20, 40),
)
BOTH = (
    Case(((40,), (7, 1, 20, 12)), True, None, 0, 40, ahead=None),
    Case(((40,), (40,)), False, None, 0, 40, ahead=None),
    Case(((40,), (7, 1, 20, 12)), True, 6, 0, 40, ahead=5),
    Case(((40,), (40,)), False, 6, 0, 40, ahead=None),
    Case(((40,), (7, 1, 20, 12)), True, None, 10, 35, ahead=None),
    Case(((40,), (7, 1, 20, 12)), True, None, 0, 40, others=((9,), (1, 2, 1, 5))),
)
"""To both sides, and of keys of another sequence."""


def reference(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax of the scores that are seen, and of the sinks, fp64 or what the inputs are."""
    copies, keys = q.shape[2] // k.shape[2], k.shape[1]
    k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * 0.3
    if case.soft_cap is not None:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    assert not case.seen()[..., keys:].any(), "keys that a piece needs"
    scores = scores.masked_fill(~case.seen()[..., :keys].to(q.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    return torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1)[..., :keys], v)


def differences(case: Case, kernel: Kernel, inputs: list[Tensor], backward: bool = True) -> dict[str, float]:
    """By output and gradient, the largest difference from the reference, over its largest value or 1."""
    gradient, given = inputs[3], [*inputs[:3], *inputs[4:]]
    ours = [x.detach().clone().requires_grad_(backward) for x in given]
    theirs = [x.detach().double().requires_grad_() for x in given]
    prepared = kernel.prepare(case.sight(gradient.device))
    found = kernel(ours[0], ours[1], ours[2], prepared, case.terms, *ours[3:])
    expected = reference(case, *theirs)
    assert found.shape == expected.shape
    pairs = {"output": (found, expected)}
    if backward:
        found.backward(gradient)
        expected.backward(gradient.double())
        for name, mine, other in zip((*"qkv", "sinks"), ours, theirs, strict=False):
            assert mine.grad is not None and other.grad is not None
            pairs[name] = (mine.grad, other.grad)
    return {
        name: float((mine.detach() - other.detach()).abs().max() / other.detach().abs().max().clamp(min=1))
        for name, (mine, other) in pairs.items()
    }
