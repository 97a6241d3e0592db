"""Features of training against kinds of models: which pairs work, and which are refused.

Each row has a letter for each feature. A kind or a feature that is added has no letters until somebody has thought
about them: `tests/train/test_feature_table.py` takes the kinds from their registries and tries each cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.common.format import table


@dataclass(frozen=True)
class Feature:
    """A feature that kinds of models have or refuse."""

    name: str
    """In the table."""
    settings: tuple[str, ...]
    """Overrides of a small run file that switch it on."""
    run: int
    """Features of one number go together: all that work with a kind are tried in one run."""


FEATURES = (
    Feature("muP", ("model.init.scheme=mup", "model.init.mup_base_dim=16", "model.init.mup_fixed=[]"), 0),
    Feature("moving average of weights", ("train.ema={}",), 0),
    Feature("average of checkpoints", ("train.checkpoint.every_steps=1",), 0),
    Feature("moments in bf16", ("train.optimizer.states=bf16",), 0),
    Feature("fp16", ("train.precision.compute=fp16", "train.precision.loss_scale.initial=16"), 0),
    Feature("recomputation, full", ("train.recompute.mode=full",), 0),
    Feature("dropout", ("model.dropout=0.1",), 0),
    Feature("z-loss", ("train.loss.z_loss=0.0001",), 0),
    Feature("masked starts of documents", ("train.loss.mask_document_start=true",), 0),
    Feature("attention within documents", ("model.document_attention=true",), 0),
    Feature("metrics by layer", ("train.metrics.layers_every_steps=1",), 0),
    Feature("multi-token prediction", ("model.mtp={}",), 0),
    Feature("depth_scaled", ("model.init.scheme=depth_scaled",), 1),
    Feature("Muon", ("train.optimizer.type=muon",), 1),
    Feature("fp8", ("train.precision.fp8={emulate: true, min_size: 16}",), 1),
    Feature("recomputation, selective", ("train.recompute.mode=selective",), 1),
    Feature("parameter groups", ("train.optimizer.groups=[{match: '*', weight_decay: 0, lr_scale: 0.5}]",), 1),
    Feature("loss in chunks", ("train.loss.chunk_tokens=16",), 1),
    Feature("loss weights of sources", ("data.sources.0.loss_weight=2",), 1),
    Feature("tied embeddings", ("model.tie_embeddings=true",), 1),
    Feature("losses of routers", ("train.balance.z_loss=0.001",), 1),
)

Letters = Mapping[str, str]
_DENSE = dict.fromkeys(
    ("swiglu", "gelu", "gelu_exact", "geglu", "geglu_exact", "relu", "relu2"), "wwwwwwwwwwww wwwwwwww-"
)
_WITHOUT_EXPERTS = ("gpt2", "starcoder2", "llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "smollm3", "phi3")
_OF_SCALE = ("granite", "gemma2", "gemma3_text")
_EXPERTS = ("deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe", "qwen2_moe", "qwen3_moe", "olmoe", "mixtral")
_RECURRENT = ("mamba2", "bamba", "granitemoehybrid", "nemotron_h", "qwen3_5_text", "olmo_hybrid")
_RECURRENT_EXPERTS = ("qwen3_next", "qwen3_5_moe_text", "kimi_linear")

KINDS: Mapping[str, Letters] = {
    "model.mixer": {
        "attention": "wwwwwwwwwwww wwwwwwww-",
        "mla": "wwwwwwwwwwww wwwwwwww-",
        "mamba2": "rwwwwwwwwwww wwwwwwww-",
        "gated_delta": "rwwwwwwwwwww wwwwwwww-",
        "kda": "rwwwwwwwwwww wwwwwwww-",
        "none": "wwwwwwwww-ww wwwwwwww-",
    },
    "model.mlp": {**_DENSE, "experts": "wwwwwwwwwwww wwwwwwwww", "none": "wwwwwwwwwwww wwwwwwww-"},
    "train.objective.type": {
        "causal": "wwwwwwwwwwww wwwwwwww-",
        "fim": "wwwwwwwwwwwr wwwwwwww-",
        "masked": "wwwwwwww-wwr wwwwwwww-",
        "prefix": "wwwwwwwwwwwr wwwwwwww-",
        "spans": "wwwwwwww-wwr wwrwwwww-",
        "ul2": "wwwwwwww-wwr wwrwwwww-",
    },
    "family": {
        **dict.fromkeys((*_WITHOUT_EXPERTS, "gpt_neox", "cohere2"), "wwwwwwwwwwww wwwwwwww-"),
        **dict.fromkeys(_OF_SCALE, "rwwwwwwwwwww wwwwwwww-"),
        **dict.fromkeys(_EXPERTS, "wwwwwwwwwwww wwwwwwwww"),
        **dict.fromkeys(_RECURRENT, "rwwwwwwwwwww wwwwwwww-"),
        **dict.fromkeys(_RECURRENT_EXPERTS, "rwwwwwwwwwww wwwwwwwww"),
        **dict.fromkeys(("bert", "roberta", "modernbert"), "rwwwwwww-wwr wwwwwwww-"),
        "t5": "rwwwwwww-wwr wwrwwwww-",
    },
}
"""By registry, and by kind, a letter for each feature: w, it works; r, it is refused by name; -, it is accepted and has
nothing to act on. A space divides the two runs."""


def letter(registry: str, kind: str, feature: Feature) -> str:
    """The cell of a kind and a feature."""
    return KINDS[registry][kind].replace(" ", "")[FEATURES.index(feature)]


def features() -> str:
    """A table of what each feature is refused with, and has nothing to act on."""
    rows = []
    for feature in FEATURES:
        cells = [", ".join(_with(feature, mark)) for mark in "r-"]
        keys = ", ".join(f"`{setting}`" for setting in feature.settings)
        rows.append((feature.name, keys, *cells))
    return table(("feature", "tried with", "refused with", "without an effect with"), rows)


def _with(feature: Feature, mark: str) -> Iterator[str]:
    for registry, kinds in KINDS.items():
        found = [kind for kind in kinds if letter(registry, kind, feature) == mark]
        others = [kind for kind in kinds if kind not in found]
        if found and len(found) > len(kinds) / 2:
            yield f"any {registry} but {', '.join(f'`{kind}`' for kind in others)}" if others else f"any {registry}"
        elif found:
            yield f"{registry}: {', '.join(f'`{kind}`' for kind in found)}"
