"""Every tested combination trains as one process does: losses, gradients, norms, weights, and the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.train.parallel.tested import OVERLAPPED, TESTED, WITHIN_LAYERS, Combination
from tests.train.distributed.ranks import Ranks
from tests.train.parallel import layouts

pytestmark = pytest.mark.parallel


QUICK = (
    *("tp2-selective", "pp2-zbv-full"),
    *("reshard-cp2-all_gather", "reshard-cp2-ulysses", "reshard-cp4-all_gather", "reshard-cp2-ulysses-tp2"),
    *("fsdp2-reshard-cp2-all_gather", "pp2-1f1b-keep-cp2-all_gather"),
    *("fsdp2-reshard-reduce_last", "pp2-1f1b-fsdp2-keep-reduce_each"),
)
"""Of the rows with cp, recomputation, compiled layers, overlapped communication or replicas of a pipeline those that
are not slow tests."""
COVERING = (
    *("tp2", "pp2-zbv-fsdp2-keep"),
    *("pp2-interleaved_1f1b", "reshard-cp2-all_gather", "reshard-cp2-ulysses"),
)
"""Of those that are not slow the ones that have no mark: every axis, and a pair of axes. The rest is guard tests."""
SLOW = (
    *("pp2-interleaved_1f1b-v3-layers_1_2_1_1_2_0", "pp4-zbv", "pp4-1f1b-layers_0_3_1_0"),
    *("pp2-interleaved_1f1b-tp2", "pp2-gpipe-tp2", "pp2-gpipe-fsdp2-reshard"),
    *("pp2-zbv-layers_1_2_1_1", "ddp2-tp2-no_sp", "pp4-interleaved_zero_bubble"),
    *("pp2-interleaved_1f1b-fsdp2-keep", "hsdp2x2-reshard", "fsdp2-keep-tp2-no_sp", "fsdp2-reshard-tp2-no_sp"),
    *("pp2-zbv-tp2", "pp2-1f1b-tp2-no_sp", "pp2-gpipe-fsdp2-keep", "pp2-1f1b-fsdp2-keep-reduce_each"),
    *("fsdp2-keep", "pp2-gpipe", "tp2-no_sp", "pp4-gpipe", "reshard-cp4-all_gather", "fsdp2-reshard-cp2-all_gather"),
    *("pp2-zbv", "fsdp2-reshard", "reshard-cp2-ulysses-tp2"),
)
"""Of the others those that are: each is much like a quick one."""


LATENT = (
    *("tp2", "tp2-no_sp", "fsdp2-reshard-tp2", "pp2-1f1b", "fsdp2-reshard-compiled"),
    *("reshard-cp2-all_gather", "reshard-cp2-ulysses", "reshard-cp2-all_gather-tp2", "reshard-cp2-ulysses-tp2"),
    *("tp2-full", "tp2-selective", "tp2-selective-compiled", "reshard-cp2-all_gather-selective"),
)
"""Rows that latent attention is tried with besides."""
LATENT_GUARD = ("pp2-1f1b", "reshard-cp2-all_gather")
"""Those of them that are guard tests. The rest are slow."""


def cases() -> Iterator[Any]:
    """Every row with two families, of equal layers or of several kinds; some with latent attention too.

    Quick are those of two processes with one family, and each second one of four.
    """
    for number, row in enumerate((*TESTED, *WITHIN_LAYERS, *OVERLAPPED)):
        for place, family in enumerate((("mixed", "branches"), ("llama", "gpt2"))[number // 2 % 2]):
            world = row.layout.world_size
            quick = world <= 4 and number % (2 if world == 2 or row.name in QUICK else 4) == place
            plain = row in TESTED and row.layout.cp == 1 and 1 in (row.layout.pp, row.layout.dp_replicate)
            quick = quick and (plain or row.name in QUICK) and row.name not in SLOW
            marks = [pytest.mark.slow] if not quick else [] if row.name in COVERING else [pytest.mark.guard]
            marks = [*layouts.trains(row.kind.schedule or ""), *marks]
            yield pytest.param(row, family, id=f"{row.name}-{family}", marks=marks)
        if row.name in LATENT:
            mark = pytest.mark.guard if row.name in LATENT_GUARD else pytest.mark.slow
            yield pytest.param(row, "latent", id=f"{row.name}-latent", marks=mark)


@pytest.mark.first(2)
@pytest.mark.parametrize(("row", "family"), list(cases()))
def test_a_layout_computes_what_one_process_does(
    families: Path, processes: Callable[[int], Ranks], row: Combination, family: str
) -> None:
    assert layouts.compare(families, family, row, processes(row.layout.world_size)) == []


_AHEAD = {
    "pp2-1f1b": "",
    **dict.fromkeys(("pp2-zbv", "reshard-cp2-all_gather"), "guard"),
    **dict.fromkeys(("reshard-cp2-ulysses", "fsdp2-reshard-compiled"), "slow"),
    **dict.fromkeys(("pp2-interleaved_zero_bubble", "tp2-no_sp", "fsdp2-reshard", "pp2-gpipe", "ddp2"), "slow"),
    **dict.fromkeys(("fsdp2-reshard-tp2", "pp2-1f1b-keep-cp2-all_gather", "pp2-zbv-keep-cp2-ulysses"), "slow"),
    **dict.fromkeys(("fsdp2-reshard-full", "pp2-zbv-full", "tp2-selective", "pp2-1f1b-fsdp2-keep-compiled"), "slow"),
    **dict.fromkeys(("pp4-1f1b-layers_0_3_1_0", "pp2-interleaved_1f1b-tp2", "hsdp2x2-keep", "pp4-zbv"), "slow"),
    **dict.fromkeys(("pp2-zbv-tp2", "pp2-dualpipev-fsdp2-keep", "tp2", "pp2-dualpipev"), "slow"),
    **dict.fromkeys(("fsdp2-keep-forward_prefetch_2-backward_prefetch_3-reduce_last",), "slow"),
}
"""Rows with multi-token prediction, and their tier."""


def ahead_cases() -> Iterator[Any]:
    """The families in turn, and the slow rows with both."""
    rows = {row.name: row for row in (*TESTED, *WITHIN_LAYERS, *OVERLAPPED)}
    for number, (name, tier) in enumerate(_AHEAD.items()):
        families = ("ahead", "ahead_tied")
        for place, family in enumerate(families):
            own = tier if place == number % 2 else "slow"
            marks = [*layouts.trains(rows[name].kind.schedule or ""), *([getattr(pytest.mark, own)] if own else [])]
            yield pytest.param(rows[name], family, id=f"{name}-{family}", marks=marks)


@pytest.mark.parametrize(("row", "family"), list(ahead_cases()))
def test_multi_token_prediction_computes_what_one_process_does(
    families: Path, processes: Callable[[int], Ranks], row: Combination, family: str
) -> None:
    assert layouts.compare(families, family, row, processes(row.layout.world_size)) == []


_ENCODERS = {
    **dict.fromkeys(("tp2", "reshard-cp2-all_gather"), "guard"),
    **dict.fromkeys(("pp2-1f1b", "fsdp2-reshard"), "slow"),
    **dict.fromkeys(("reshard-cp2-ulysses", "tp2-no_sp", "pp2-1f1b-fsdp2-keep-tp2"), "slow"),
    **dict.fromkeys(
        ("pp2-gpipe", "pp2-interleaved_1f1b", "pp2-zbv", "pp4-1f1b-layers_0_3_1_0", "hsdp2x2-keep"), "slow"
    ),
    **dict.fromkeys(("reshard-cp4-all_gather", "reshard-cp2-all_gather-tp2", "reshard-cp2-ulysses-tp2"), "slow"),
    **dict.fromkeys(("pp2-1f1b-keep-cp2-all_gather", "fsdp2-reshard-tp2", "pp2-interleaved_1f1b-tp2"), "slow"),
    **dict.fromkeys(("fsdp2-reshard-compiled", "tp2-full", "tp2-selective", "ddp2-tp2-no_sp"), "slow"),
}
"""Rows with encoders, and their tier."""


def encoder_cases() -> Iterator[Any]:
    """The families in turn, and the slow rows with both."""
    rows = {row.name: row for row in (*TESTED, *WITHIN_LAYERS, *OVERLAPPED)}
    for number, (name, tier) in enumerate(_ENCODERS.items()):
        for place, family in enumerate(layouts.ENCODER_FAMILIES):
            own = tier if place == number % 2 else "slow"
            marks = [*layouts.trains(rows[name].kind.schedule or ""), *([getattr(pytest.mark, own)] if own else [])]
            yield pytest.param(rows[name], family, id=f"{name}-{family}", marks=marks)


@pytest.mark.parametrize(("row", "family"), list(encoder_cases()))
def test_an_encoder_computes_what_one_process_does(
    families: Path, processes: Callable[[int], Ranks], row: Combination, family: str
) -> None:
    assert layouts.compare(families, family, row, processes(row.layout.world_size)) == []
