"""What `train_gpu.py` compares: variants as overrides of a run file, their memory by plan, and their time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.config.load import load
from pipeline.train.host.devices import Device, device_of_driver
from pipeline.train.model.flops import num_parameters
from pipeline.train.parallel.step_shapes import step_shapes
from pipeline.train.planning.memory import memory
from pipeline.train.planning.plan import RESERVE
from pipeline.train.planning.timing import basis, step_time
from pipeline.train.rules.layout import check_layout
from pipeline.train.rules.layout_check import planned_spec

PRECISIONS: dict[str, list[str]] = {
    "bf16": ["train.precision.compute=bf16"],
    "fp32": ["train.precision.compute=fp32"],
    "fp8": ["train.precision.compute=bf16", "train.precision.fp8={backend: torchao}"],
    "fp8-rowwise": ["train.precision.compute=bf16", "train.precision.fp8={backend: torchao, recipe: rowwise}"],
    "fp8-te": ["train.precision.compute=bf16", "train.precision.fp8={backend: te}"],
    "fp8-emulated": [
        "train.precision.compute=bf16",
        "train.precision.fp8={backend: torchao, emulate: true, min_size: 16}",
    ],
}
_NOT_COMPILED = ("fp8-te", "te")
"""Precisions and kernels of attention that compiled layers are refused with."""
RECOMPUTE: dict[str, list[str]] = {
    "none": ["train.recompute.mode=none"],
    "selective": ["train.recompute.mode=selective"],
    "attention": ["train.recompute.mode=selective", "train.recompute.keep=[attention]"],
    "full": ["train.recompute.mode=full"],
    "budget": ["train.recompute.mode=budget"],
}
BACKENDS = ("auto", "sdpa", "flex", "varlen", "flash", "te")
DOCUMENTS = ("one", "many")
PEERS = ("sdpa", "flash_attention_2", "autocast")
"""transformers with bf16 weights beside fp32 ones, by its kernel of attention; and under autocast, with sdpa."""

SHARED = (
    *("run.dir=/nowhere", "train.validation.samples=0", "parallel.dp_shard=-1"),
    "train.metrics.tensorboard=false",
)
"""Overrides of all variants: nothing is read or written but the run file."""

TINY = (
    *("model.layers=2", "model.dim=64", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=192"),
    *("model.vocab_size=512", "train.loss.chunk_tokens=64", "train.optimizer.lr=3e-3"),
    "launch.threads=1",
)
"""A model for trying the benchmark on a CPU."""

_PEER_STATES = 18
"""Bytes of a parameter: weights in fp32 and bf16, gradient and two moments in fp32."""
_PEER_LOGIT = 12
"""Bytes of a logit, all of a micro-batch at once: in bf16 and fp32, and the same of the gradient."""

START_S = {False: 25.0, True: 60.0}
"""Guesses, by whether layers are compiled: seconds of a process without its steps, until one has been seen."""


@dataclass(frozen=True)
class Variant:
    """One of the things that are compared."""

    sequence: int
    precision: str
    compiled: bool
    backend: str
    documents: str
    recompute: str
    peer: str | None = None
    """None: this package. Else transformers; backend, documents and recompute are the base's then."""

    @property
    def name(self) -> str:
        """All there is to it, in words without blanks."""
        words = [str(self.sequence), self.precision, "compiled" if self.compiled else "eager"]
        if self.peer is not None:
            return " ".join([*words, f"transformers:{self.peer}"])
        return " ".join(
            [*words, f"attention:{self.backend}", f"documents:{self.documents}", f"recompute:{self.recompute}"]
        )

    def about(self, layers: int | None) -> dict[str, Any]:
        """What tables tell of it."""
        return {
            "variant": self.name,
            "sequence": self.sequence,
            "precision": self.precision,
            "compile": self.compiled,
            "attention": self.backend,
            "documents": self.documents,
            "recompute": self.recompute,
            "peer": self.peer,
            "layers": layers,
        }

    @property
    def overrides(self) -> list[str]:
        """Of the run file."""
        return [
            f"train.sequence_length={self.sequence}",
            *PRECISIONS[self.precision],
            f"train.compile={str(self.compiled).lower()}",
            f"train.attention.backend={self.backend}",
            f"model.document_attention={str(self.documents == 'many').lower()}",
            *RECOMPUTE[self.recompute],
        ]


def variants(
    sequences: Sequence[int],
    precisions: Sequence[str],
    compiled: Sequence[bool],
    backends: Sequence[str],
    documents: Sequence[str],
    recompute: Sequence[str],
    peers: Sequence[str],
    *,
    cross: bool = False,
) -> list[Variant]:
    """The base, which has the first of everything, the peers of it, then what differs from it in one thing.

    With document masks that one thing comes with each of the backends, whose purpose they are.

    Args:
        cross: All combinations instead.
    """
    base = Variant(sequences[0], precisions[0], compiled[0], backends[0], documents[0], recompute[0])
    if cross:
        axes = (sequences, precisions, compiled, backends, documents, recompute)
        found = [Variant(*values) for values in itertools.product(*axes)]
        rivals = [
            replace(base, sequence=length, compiled=whether, peer=peer)
            for length, whether, peer in itertools.product(sequences, compiled, peers)
        ]
        return list(dict.fromkeys([found[0], *rivals, *found[1:]]))
    return list(
        dict.fromkeys(
            [
                base,
                *(replace(base, peer=peer) for peer in peers),
                *_one_changed(base, sequences, precisions, compiled, backends, documents, recompute),
            ]
        )
    )


def _one_changed(
    base: Variant,
    sequences: Sequence[int],
    precisions: Sequence[str],
    compiled: Sequence[bool],
    backends: Sequence[str],
    documents: Sequence[str],
    recompute: Sequence[str],
) -> Iterator[Variant]:
    # What matters most comes first, as there may not be time for all of it.
    for each in precisions[1:]:
        yield replace(base, precision=each, compiled=base.compiled and each not in _NOT_COMPILED)
    yield from (replace(base, documents=each) for each in documents[1:])
    yield from (replace(base, recompute=each) for each in recompute[1:])
    yield from (replace(base, sequence=each) for each in sequences[1:])
    yield from (replace(base, compiled=each) for each in compiled[1:])
    for kind in documents:
        for each in backends[1:]:
            compiles = base.compiled and each not in _NOT_COMPILED
            yield replace(base, backend=each, documents=kind, compiled=compiles)


@dataclass(frozen=True)
class Sizes:
    """What all variants have in common."""

    run_file: Path
    common: tuple[str, ...]
    """Overrides of it."""
    tokens: int
    """Of a micro-batch on one process."""
    micro_batches: int
    """Of a step on one process."""
    processes: int

    def overrides(self, variant: Variant, layers: int | None = None) -> list[str]:
        """Of the run file, for a variant."""
        windows = max(1, self.tokens // variant.sequence)
        return [
            *self.common,
            *([] if layers is None else [f"model.layers={layers}"]),
            *variant.overrides,
            f"train.micro_batch_size={windows}",
            f"train.batch_size={windows * self.micro_batches * self.processes}",
            "train.duration=1000 steps",
        ]

    def config(self, variant: Variant, layers: int | None = None) -> Config:
        """The run file of a variant."""
        return load(self.run_file, self.overrides(variant, layers))


def planned_bytes(config: Config, processes: int, peer: str | None = None, device_type: str = "cuda") -> int:
    """What a process needs by plan; for the peer what its tensors sum up to, activations being those of a plan."""
    layout, spec = check_layout(config, processes), planned_spec(config)
    (shape,) = step_shapes(config, layout.dp)
    ranks = memory(config, layout, spec, shape, "cuda" if device_type == "cuda" else "cpu")
    if peer is None:
        return max(rank.total for rank in ranks)
    logits = _PEER_LOGIT * shape.micro_batch_size * shape.sequence_length * spec.vocab_padded
    return _PEER_STATES * num_parameters(spec) + ranks[0].activations + logits


def most_layers(sizes: Sizes, of: Sequence[Variant], memory_bytes: int) -> int:
    """The most layers, up to those of the run file, with which all variants fit by plan; at least 1."""
    limit = memory_bytes * (1 - RESERVE)
    most = sizes.config(of[0]).model.layers
    few, more = 4, 8  # what a layer takes is the difference
    for variant in of:
        less, much = (planned_bytes(sizes.config(variant, n), sizes.processes, variant.peer) for n in (few, more))
        most = min(most, int(few + (limit - less) / ((much - less) / (more - few))))
    return max(1, most)


def planned_seconds(config: Config, processes: int, device: Device) -> float:
    """A step's time by plan."""
    layout, spec = check_layout(config, processes), planned_spec(config)
    (shape,) = step_shapes(config, layout.dp)
    return float(step_time(config, layout, spec, shape, device, [num_parameters(spec)]).seconds.total)


def planned(config: Config, processes: int, device_name: str) -> dict[str, float | str | None]:
    """`planned_gb` (10^9 bytes, of the largest process), `planned_s` (of a step), `planned_from`: its basis.

    Args:
        config: The run file; all of its steps have one shape.
        processes: Of the run.
        device_name: As the driver gives it. All values are None where nothing is known of it, as of a CPU.

    Raises:
        UserError: The layout is refused.
    """
    device = device_of_driver(device_name)
    if device is None:
        return {"planned_gb": None, "planned_s": None, "planned_from": None}
    return {
        "planned_gb": round(planned_bytes(config, processes) / 1e9, 2),
        "planned_s": round(planned_seconds(config, processes, device), 5),
        "planned_from": basis(device),
    }
