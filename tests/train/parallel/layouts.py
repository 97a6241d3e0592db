"""Whole training runs on any layout, and what they computed, to compare with one process.

A run starts from a seed checkpoint with a real history, so that its optimizer has moments, and trains a few steps with
the trainer that users call. Each rank keeps the weights that it would have started with from scratch, and the gradients
that it had at the first and the last step, and compares its own shards with those of the one process.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.config.load import load
from pipeline.config.parallel import ZERO_BUBBLE
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.distributed.axes import axis_names
from pipeline.train.loop import trainer
from pipeline.train.model.init import local_range
from pipeline.train.optim.gradients import Gradients
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.tested import Combination
from pipeline.train.run.folder import read_metrics
from pipeline.train.torch_compat.core import plain
from pipeline.train.torch_compat.pipeline_stage import SPLITS_BACKWARD
from tests import tiny
from tests.train.distributed import ranks

SEED_STEP, LAST_STEP = 2, 7
_SPLITS_BACKWARD = pytest.mark.skipif(not SPLITS_BACKWARD, reason="refused: this torch cannot split backward passes")


def trains(schedule: str) -> list[pytest.MarkDecorator]:
    """Marks of a test that trains with a schedule: it is skipped where the installed torch cannot."""
    return [_SPLITS_BACKWARD] if schedule in ZERO_BUBBLE else []


def in_turn(
    rows: Sequence[Combination],
    families: Collection[str],
    covering: Collection[str],
    guard: Collection[str],
    possible: Callable[[Combination, str], bool] = lambda row, family: True,
) -> list[Any]:
    """Parameters of a test: every row with every family, all slow but some rows with one of them, in turn.

    Args:
        rows: Layouts.
        families: Of models.
        covering: Names of the rows without a mark.
        guard: Names of the rows of guard tests.
        possible: False of what a rule refuses.
    """
    found = []
    for number, row in enumerate(rows):
        for place, family in enumerate(families):
            if not possible(row, family):
                continue
            marks = [pytest.mark.slow]
            if number % len(families) == place and row.name in (*covering, *guard):
                marks = [] if row.name in covering else [pytest.mark.guard]
            marks = [*trains(row.kind.schedule or ""), *marks]
            found.append(pytest.param(row, family, id=f"{row.name}-{family}", marks=marks))
    return found


BATCH_SIZE = 16

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "model.kv_heads": 4,
        "model.document_attention": True,
    },
    "gpt2": {
        "model.norm": "layernorm",
        "model.mlp": "gelu",
        "model.bias": "all",
        "model.positions": "learned",
        "model.tie_embeddings": True,
        "model.document_attention": True,
        "model.dropout": 0.1,
    },
    "qwen3": {
        "model.kv_heads": 2,
        "model.qk_norm": True,
        "model.head_dim": 16,
        "model.tie_embeddings": True,
        "train.loss.z_loss": 1e-3,
    },
    "mixed": {
        "model.kv_heads": 4,
        "model.document_attention": True,
        "model.norm_offset": 1.0,
        "model.embedding_scale": 8.0,
        "model.pattern": ["near", "far"],
        "model.kinds": {
            "near": {
                "sliding_window": 7,
                "rope_theta": 500.0,
                "rope_share": 0.5,
                "qk_norm": "full",
                "output_gate": True,
                "sinks": True,
                "norm_place": "both",
                "mlp": "geglu",
                "bias": "attention",
            },
            "far": {
                "positions": "none",
                "kv_heads": 2,
                "qk_norm": True,
                "attention_soft_cap": 3.0,
                "norm_place": "output",
                "mlp": "relu2",
            },
        },
    },
    "branches": {
        "model.norm": "layernorm",
        "model.norm_bias": False,
        "model.residual_scale": 0.5,
        "model.logit_scale": 0.25,
        "model.tie_embeddings": True,
        "model.pattern": ["shared", "post"],
        "model.kinds": {
            "shared": {"residual": "parallel_shared", "head_dim": 16, "mlp": "gelu_exact", "bias": "mlp"},
            "post": {"mixer": "none", "norm_place": "post", "ffn_dim": 64},
        },
    },
    "latent": {
        "model.document_attention": True,
        "model.mixer": "mla",
        "model.pattern": ["wide", "near"],
        "model.kinds": {
            "wide": {
                "mla": {"kv_rank": 24, "q_rank": 20, "nope_dim": 8, "rope_dim": 4, "value_dim": 6},
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4,
                    "original_max_positions": 16,
                    "beta_fast": 4,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.7,
                },
            },
            "near": {
                "mla": {"kv_rank": 12, "nope_dim": 4, "rope_dim": 6, "value_dim": 12},
                "sliding_window": 7,
                "sinks": True,
            },
        },
    },
    "ahead": {
        "model.kv_heads": 4,
        "model.document_attention": True,
        "model.embedding_scale": 8.0,
        "model.mtp": {"depth": 2},
        "train.loss.z_loss": 1e-3,
    },
    "ahead_tied": {
        "model.kv_heads": 4,
        "model.tie_embeddings": True,
        "model.pattern": ["near", "far"],
        "model.kinds": {"near": {"sliding_window": 7}, "far": {"positions": "none", "norm_place": "output"}},
        "model.dropout": 0.1,
        "model.mtp": {"depth": 1},
        "train.loss.mtp": 0.5,
    },
}
"""GPT-2-like, Llama-like, one with what those two do not have, three whose layers are of several kinds, and two with
multi-token prediction."""

RECURRENT_FAMILIES: dict[str, dict[str, Any]] = {
    "mamba": {
        "model.document_attention": True,
        "model.pattern": ["state", "near"],
        "model.kinds": {
            "state": {
                "mixer": "mamba2",
                "mamba2": {"heads": 8, "head_dim": 6, "state_dim": 5, "groups": 2, "dt_min": 0.01},
                "mlp": "none",
            },
            "near": {"kv_heads": 4, "sliding_window": 7, "sinks": True, "positions": "none", "mlp": "relu2"},
        },
    },
    "one_group": {
        "model.tie_embeddings": True,
        "model.heads": None,
        "model.mixer": "mamba2",
        "model.pattern": ["alone", "both"],
        "model.kinds": {
            "alone": {"mamba2": {"heads": 8, "head_dim": 4, "state_dim": 8, "conv_bias": False}, "mlp": "none"},
            "both": {"mamba2": {"heads": 16, "head_dim": 4, "state_dim": 6, "groups": 4, "norm_groups": 2}},
        },
    },
    "delta": {
        "model.document_attention": True,
        "model.norm_offset": 1.0,
        "model.pattern": ["gated", "kimi"],
        "model.kinds": {
            "gated": {
                "mixer": "gated_delta",
                "delta": {"key_heads": 4, "value_heads": 8, "key_dim": 6, "value_dim": 5, "beta_max": 2},
            },
            "kimi": {"mixer": "kda", "delta": {"key_heads": 4, "key_dim": 5, "value_dim": 6, "rank": 7}},
        },
    },
}
"""Models with recurrences. Documents go through the cuts of sequences."""
FAMILIES |= RECURRENT_FAMILIES
_DELTA = {"key_heads": 4, "value_heads": 8, "key_dim": 6, "value_dim": 5}
FAMILIES["every"] = {
    "model.document_attention": True,
    "model.mtp": {"depth": 1},
    "model.pattern": ["state", "mlp", "gated", "latent", "near", "far"],
    "model.kinds": {
        "state": {
            "mixer": "mamba2",
            "mamba2": {"heads": 8, "head_dim": 6, "state_dim": 5, "groups": 2, "dt_min": 0.01},
            "mlp": "none",
        },
        "mlp": {"mixer": "none", "mlp": "relu2"},
        "gated": {"mixer": "gated_delta", "delta": _DELTA, "norm_place": "output"},
        "latent": {"mixer": "mla", "mla": {"kv_rank": 24, "q_rank": 20, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}},
        "near": {"kv_heads": 4, "sliding_window": 7, "sinks": True, "positions": "none"},
        "far": {"qk_norm": True, "output_gate": True},
    },
}
"""Every kind of mixer beside the others, layers without a mixer or without an mlp, and multi-token prediction."""

ENCODER_FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {
        "train.objective": {"type": "masked", "rate": 0.3},
        "model.direction": "both",
        "model.document_attention": True,
        "model.norm": "layernorm",
        "model.norm_place": "post",
        "model.final_norm": False,
        "model.positions": "learned",
        "model.token_types": 2,
        "model.embedding_norm": True,
        "model.mlp": "gelu_exact",
        "model.bias": "all",
        "model.head_transform": "gelu_exact",
        "model.head_bias": True,
        "model.tie_embeddings": True,
        "model.dropout": 0.1,
    },
    "modernbert": {
        "train.objective": {"type": "masked", "rate": 0.15, "keep_share": 0.3},
        "model.direction": "both",
        "model.document_attention": True,
        "model.norm": "layernorm",
        "model.norm_bias": False,
        "model.embedding_norm": True,
        "model.first_norm": False,
        "model.mlp": "geglu_exact",
        "model.head_transform": "gelu_exact",
        "model.head_bias": True,
        "model.pattern": ["far", "near"],
        "model.kinds": {"far": {}, "near": {"sliding_window": 6, "rope_theta": 500.0}},
        "train.loss.z_loss": 1e-3,
    },
}
"""Models that see both sides; one with a head of its own."""
FAMILIES |= ENCODER_FAMILIES
_SPANS = {"type": "spans", "rate": 0.3125, "mean_span": 2.0}
SIDED_FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {
        "train.objective": _SPANS,
        "model.document_attention": True,
        "model.encoder": {"layers": 2},
        "model.positions": "relative",
        "model.relative": {"buckets": 12, "max_distance": 20},
        "model.attention_scale": 1.0,
        "model.mlp": "geglu",
        "model.tie_embeddings": True,
        "model.logit_scale": 0.125,
        "model.dropout": 0.1,
    },
    "sides": {
        "train.objective": _SPANS,
        "model.document_attention": True,
        "model.kv_heads": 4,
        "model.qk_norm": True,
        "model.encoder": {"layers": 2},
        "model.pattern": ["far", "near"],
        "model.kinds": {
            "near": {"sliding_window": 7, "mlp": "geglu", "bias": "all"},
            "far": {"positions": "none", "output_gate": True},
        },
        "train.loss.z_loss": 1e-3,
    },
}
"""Encoder-decoders, of which pieces of 28 and 16 positions see 32 tokens: T5's, and one with layers of two kinds."""
FAMILIES |= SIDED_FAMILIES

EXPERT_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model.mlp": "experts",
        "model.experts": {"count": 8, "top_k": 2, "ffn_dim": 32},
        "model.document_attention": True,
        "train.balance": {"loss": 0.02, "z_loss": 1e-3},
    },
    "deepseek": {
        "model.pattern": ["dense", "routed"],
        "model.experts": {
            **{"count": 12, "top_k": 3, "ffn_dim": 16, "score": "sigmoid", "score_bias": True, "scale": 1.5},
            **{"groups": 4, "top_groups": 2, "shared_ffn_dim": 24, "shared_gate": True},
        },
        "model.kinds": {"dense": {}, "routed": {"mlp": "experts"}},
        "model.mixer": "mla",
        "model.mla": {"kv_rank": 24, "q_rank": 20, "nope_dim": 8, "rope_dim": 4, "value_dim": 8},
        "model.mtp": {"depth": 1},
        "train.balance": {"loss": 0.02, "over": "batch", "bias_rate": 0.01},
    },
    "gpt_oss": {
        "model.mlp": "experts",
        "model.experts": {
            **{"count": 8, "top_k": 2, "ffn_dim": 32, "bias": True, "router_bias": True},
            **{"activation": "clamped_swiglu", "clamp": 0.5},
        },
        "model.sinks": True,
        "model.bias": "attention",
        "model.pattern": ["near", "far"],
        "model.kinds": {"near": {"sliding_window": 7}, "far": {}},
        "model.tie_embeddings": True,
    },
}
"""Models with experts; not all samples of a micro-batch are real."""
for _keys in EXPERT_FAMILIES.values():
    _keys["train.batch_size"] = 15
FAMILIES |= EXPERT_FAMILIES
FAMILIES["few"] = EXPERT_FAMILIES["mixtral"] | {"model.experts": {"count": 2, "top_k": 1, "ffn_dim": 32, "bias": True}}
"""Fewer experts than processes that they are sharded over."""
FAMILIES["loose"] = EXPERT_FAMILIES["mixtral"] | {"train.balance": {"loss": 0.0}}
"""Nothing balances the experts."""

CHUNK_TOKENS = {"llama": 37, "gpt2": "null", "qwen3": 16, "mixed": 21, "branches": "null", "latent": 29}
CHUNK_TOKENS |= {"mamba": 37, "one_group": "null", "delta": 23, "every": 19}
CHUNK_TOKENS |= {"t5": 23, "sides": "null"}
CHUNK_TOKENS |= {"bert": 23, "modernbert": "null"}
CHUNK_TOKENS |= {"ahead": 41, "ahead_tied": "null"}
CHUNK_TOKENS |= {"few": 37, "loose": 37, "mixtral": 37, "deepseek": "null", "gpt_oss": 16}
"""What the layouts compute their loss in; the one process does so in one piece."""

COMMON: dict[str, Any] = {
    "model.dim": 64,
    "model.heads": 8,
    "model.ffn_dim": 96,
    "model.vocab_multiple": 16,
    "tokenizer.special_tokens": ["[MASK]", *(f"<extra_id_{number}>" for number in range(20))],
    "train.duration": f"{LAST_STEP} steps",
    "train.batch_size": BATCH_SIZE,
    "train.precision": {"compute": "fp32"},
    "train.optimizer": {"lr": 1e-3, "clip_norm": 0.5},
    "train.loss": {"mask_document_start": True},
    "train.validation": {"every_steps": 100, "samples": 5},
    "train.checkpoint": {"every_steps": 100},
    "blend": {"skip": [{"samples": "34-35"}, {"source": "sea", "documents": ["1-2"]}]},
}
"""Masked labels, documents, accumulation and clipping in every run."""


def write(root: Path) -> None:
    """A corpus, its datasets, and a run file for each family."""
    for name, keys in FAMILIES.items():
        file = tiny.write_run(root, {**COMMON, **keys}, f"{name}.yaml")
    preprocess(load(file))


def reference(root: Path, family: str, layers: int) -> Path:
    """The run of one process: its folder has the seed checkpoint, and `tensors.pt` what it computed."""
    folder = root / f"{family}-{layers}-layers"
    if not folder.exists():
        ranks.run(1, _run_one, root, family, folder, layers, connect=False)
    return folder


def train(file: Path, values: list[str]) -> None:
    """What a rank does that trains."""
    trainer.train(load(file, values))


def compare(root: Path, family: str, row: Combination, processes: ranks.Ranks, *, name: str = "") -> list[str]:
    """Train on a layout from the seed checkpoint of one process; what differs, in words.

    Args:
        name: Of the run, where a row has several.
        processes: As many as the layout has. They may have trained on other layouts before.

    Raises:
        RankFailed: with the differences between tensors, which every rank looks at itself.
    """
    one = reference(root, family, row.layers)
    run = root / f"{family}-{name or row.name}"
    seed = f"step-{SEED_STEP:08d}"
    shutil.copytree(one / "checkpoints" / seed, run / "checkpoints" / seed)
    parallel = row.parallel.model_dump(mode="json", exclude_unset=True)
    values = [
        f"parallel={orjson.dumps(parallel).decode()}",
        f"model.layers={row.layers}",
        f"train.micro_batch_size={BATCH_SIZE // row.layout.dp // row.micro_batches}",
        f"train.loss.chunk_tokens={CHUNK_TOKENS[family]}",
        f"train.recompute={orjson.dumps(row.recompute.model_dump(mode='json', exclude_unset=True)).decode()}",
        f"train.compile={str(row.compile).lower()}",
    ]
    # Compiling takes its time where no run has done so before.
    processes.call(_run_layout, root, family, run, one, values, timeout=500)
    return differences(run, one)


def compare_chain(
    root: Path, family: str, chain: list[tuple[int, dict[str, Any]]], processes: Callable[[int], ranks.Ranks]
) -> list[str]:
    """Differences between a run that changes its layout on the way, and the same on one process.

    Args:
        root: folder of `write`.
        family: which model.
        chain: sections `parallel:`, each with the step at which it ends.
        processes: by their number.
    """
    common = ["model.layers=4", "train.micro_batch_size=4", "train.schedule={type: constant, warmup: 0 steps}"]
    runs = [root / f"{family}-straight", root / f"{family}-chain"]
    straight: list[tuple[int, dict[str, Any]]] = [(LAST_STEP, {})]
    for run, parts in zip(runs, (straight, chain), strict=True):
        for end, degrees in parts:
            values = [f"run.dir={run}", f"parallel={orjson.dumps(degrees).decode()}", f"train.duration={end} steps"]
            world_size = math.prod(degree for key, degree in degrees.items() if key in axis_names())
            processes(world_size).call(train, root / f"{family}.yaml", [*common, *values])
    return differences(runs[1], runs[0])


def differences(run: Path, one: Path) -> list[str]:
    """How the metrics of a run differ from those of the one process, in words."""
    found = []
    expected = {row["step"]: row for row in read_metrics(one)}
    rows = read_metrics(run)
    rows = [row for row in rows if row["step"] > SEED_STEP]
    if [row["step"] for row in rows] != list(range(SEED_STEP + 1, LAST_STEP + 1)):
        return [f"steps {[row['step'] for row in rows]}"]
    for row in rows:
        other = expected[row["step"]]
        for key in ("order_hash", "data_hash", "tokens", "lr", "skipped"):
            if row[key] != other[key]:
                found.append(f"step {row['step']}: {key} {row[key]} instead of {other[key]}")
        for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("validation_loss", 1e-5)):
            if key in other and not abs(row[key] - other[key]) <= tolerance * abs(other[key]):
                found.append(f"step {row['step']}: {key} {row[key]} instead of {other[key]}")
        for key, value in row.get("experts", {}).items():
            # How many rows a rank's experts got is a matter of the layout.
            expected_value = other["experts"][key]
            if key != "rows_max_over_mean" and not abs(value - expected_value) <= 1e-5 * max(1e-3, abs(expected_value)):
                found.append(f"step {row['step']}: {key} {value} instead of {expected_value}")
        mine, its = (each.get("mtp_loss_by_depth", {}) for each in (row, other))
        if mine.keys() != its.keys() or any(not abs(mine[depth] - its[depth]) <= 1e-5 * its[depth] for depth in its):
            found.append(f"step {row['step']}: mtp_loss_by_depth {mine} instead of {its}")
        if row["loss_by_source"].keys() != other["loss_by_source"].keys():
            found.append(f"step {row['step']}: loss_by_source {row['loss_by_source']}")
    return found


Tensors = dict[str, dict[str, Tensor]]
"""What a probe keeps: `initial`, `gradient STEP`, `weights STEP`; whole, by the parameter's name."""


class Probe:
    """A context manager that keeps what a rank starts with and its gradients, while `trainer.train` runs.

    Args:
        first_step: Steps that the run has behind it.
        steps: Those whose gradients are kept.
        weights: Keep the weights after each of them too.
        lead: What a probe kept of another run. The weights are set to those of that run after each step, so that every
            step starts from one state: rounding in one step, and what an optimizer makes of it, is not in the next.
    """

    def __init__(
        self,
        first_step: int,
        steps: Collection[int] = (SEED_STEP + 1, LAST_STEP),
        *,
        weights: bool = False,
        lead: Tensors | None = None,
    ) -> None:
        self.tensors: Tensors = {}
        self._step = first_step
        self._steps = steps
        self._weights = weights
        self._lead = lead
        self._model: ParallelModel | None = None

    def __enter__(self) -> Probe:
        self._before = trainer.build_model, Gradients.scale, Optimizers.step
        (build, scale, update), probe = self._before, self

        def build_model(*args: Any, **kwargs: Any) -> ParallelModel:
            probe._model = build(*args, **kwargs)
            probe._keep("initial", lambda parameter: plain(parameter.detach()))
            return probe._model

        def scaled(self: Gradients, factor: Tensor) -> None:
            probe._step += 1
            if probe._step in probe._steps:
                probe._keep(f"gradient {probe._step}", lambda parameter: parameter.grad)
            scale(self, factor)

        def updated(self: Optimizers, lr: float, finite: Tensor) -> None:
            update(self, lr, finite)
            if probe._weights and probe._step in probe._steps:
                probe._keep(f"weights {probe._step}", lambda parameter: plain(parameter.detach()))
            if probe._lead is not None:
                probe._follow(probe._lead[f"weights {probe._step}"])

        trainer.build_model = build_model  # type: ignore[assignment]
        Gradients.scale = scaled  # type: ignore[method-assign]
        Optimizers.step = updated  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        trainer.build_model, Gradients.scale, Optimizers.step = self._before  # type: ignore[method-assign]

    def _keep(self, kind: str, what: Any) -> None:
        assert self._model is not None
        kept = self.tensors.setdefault(kind, {})
        for name, parameter in self._model.named_parameters():
            tensor = what(parameter)
            assert isinstance(tensor, DTensor), name
            whole = tensor.full_tensor().clone()
            # A tied embedding may be here twice: both copies must be the same.
            assert name not in kept or torch.equal(kept[name], whole), f"the two copies of {name} differ"
            kept[name] = whole
        if kind != "initial":
            for part in self._model.parts.values():
                kept |= {name: buffer.clone() for name, buffer in part.named_buffers()}

    @torch.no_grad()
    def _follow(self, weights: dict[str, Tensor]) -> None:
        assert self._model is not None
        for name, parameter in self._model.named_parameters():
            own = plain(parameter.detach())
            assert isinstance(own, DTensor), name
            own.to_local().copy_(own_part(parameter, weights[name]))


def own_part(parameter: Tensor, whole: Tensor) -> Tensor:
    """Those elements of `whole` that this rank has of a parameter."""
    for dim in range(parameter.ndim):
        part = local_range(parameter, dim)
        whole = whole.narrow(dim, part.start, len(part))
    return whole.contiguous()


def _run_one(root: Path, family: str, folder: Path, layers: int) -> None:
    values = [f"run.dir={folder}", f"model.layers={layers}", f"train.checkpoint.every_steps={SEED_STEP}"]
    with Probe(0) as probe:
        trainer.train(load(root / f"{family}.yaml", [*values, "train.checkpoint.keep=9", "train.micro_batch_size=4"]))
    torch.save(probe.tensors, folder / "tensors.pt")


def _run_layout(root: Path, family: str, run: Path, one: Path, values: list[str]) -> None:
    with Probe(SEED_STEP) as probe:
        trainer.train(load(root / f"{family}.yaml", [f"run.dir={run}", *values]))
    expected = torch.load(one / "tensors.pt", weights_only=True)
    found = []
    for kind, tensors in probe.tensors.items():
        assert tensors, f"rank {os.environ['RANK']} has no part of the model"
        for name, tensor in tensors.items():
            other = expected[kind][name]
            if kind == "initial":
                if not torch.equal(tensor, other):
                    found.append(f"initial {name} is not bitwise equal")
                continue
            # A key bias adds the same to all scores of a query: its gradient is 0, and what is computed is noise.
            scale = expected[kind][name.replace("wk.bias", "wq.bias")].abs().max()
            error = ((tensor - other).abs().max() / scale).item()
            if not error <= 1e-4:
                found.append(f"{kind} of {name}: error {error:.2g}")
    assert set(probe.tensors) == set(expected), "steps are missing"
    assert not found, "\n".join(found)
