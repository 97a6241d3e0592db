"""Fingerprints of all that a resumed run depends on. The journal compares the order of the data itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.base import Section
from pipeline.config.layers.layer import LayerConfig, RopeScalingConfig
from pipeline.config.model import ModelConfig
from pipeline.config.objective import mixed_values
from pipeline.config.plugins import plugin_identities
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.part_spec import LayerSpec

Fingerprints = dict[str, Any]
"""Aspect -> JSON value. The aspects are the names that resume.allow takes."""

NUMERICS_VERSION = "0.1.0"
"""Release that last changed what a step computes from the same keys and data. Raised by hand, with a line in the
changelog (CONTRIBUTING.md says when): runs of earlier releases resume then only with `resume.allow: [code]`."""
_KDA_RATES = "0.3.0"
"""Release that took the matrices of Kimi delta attention's decay from Muon and fp8."""

_OF_SHAPES = ("model.layers", "model.dim", "model.mtp", "model.mtp.depth")
"""Keys with another value of which no weights fit: `resume.allow` would only be refused later. Of others it depends."""
_SIZES = ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn_dim", "mtp")
"""Keys that may differ where a model is a part of another one; what they have to fit is checked by shapes."""
LATER_KEYS = (
    *("vocab_size", "pattern", "kinds", "mixer", "mla", "mamba2", "delta", "experts"),
    *("rope_share", "attention_scale"),
    *("attention_soft_cap", "sinks", "output_gate", "norm_place", "residual", "norm_bias", "norm_offset"),
    *("embedding_scale", "residual_scale", "logit_scale", "dropout", "mtp"),
    *("direction", "token_types", "embedding_norm", "first_norm", "final_norm", "head_transform", "head_bias"),
    *("encoder", "relative", "mixer_options", "mlp_options"),
    *("rope_scaling.truncate", "rope_scaling.mscale", "rope_scaling.mscale_all_dim"),
)
"""Keys of `model:` that checkpoints of earlier versions do not have, with dots below a section. With its default such a
key is left out, so the default has to compute what those versions computed."""


def fingerprints(
    config: Config,
    datasets: Mapping[str, str | dict[str, str]],
    tokenizer: str,
    teacher: str | None = None,
    references: Mapping[str, Mapping[str, str]] | None = None,
) -> Fingerprints:
    """The aspects of a run that decide what its steps compute, but for the order of the data.

    Args:
        config: resolved config.
        datasets: source name -> fingerprint of its training split; a pair if a run reads what was added since it began.
        tokenizer: fingerprint of the tokenizer.
        teacher: hash of the teacher's files; None: there is no teacher, or it is not known.
        references: identity of the reference's log-probabilities by source; None: they are not known.
    """
    return {
        "data": dict(datasets),
        "tokenizer": tokenizer,
        "objective": objective_fingerprint(config),
        "model": model_fingerprint(config),
        "distill": distillation_fingerprint(config, teacher),
        "preference": preference_fingerprint(config, references),
        "code": numerics_version(config),
    }


def distillation_fingerprint(config: Config, teacher: str | None) -> dict[str, Any] | None:
    """The values that decide a teacher's part in the loss; None where it has none."""
    settings = config.train.teacher
    return None if settings is None else {"teacher": teacher, **settings.model_dump(mode="json", exclude={"teacher"})}


def preference_fingerprint(config: Config, references: Mapping[str, Mapping[str, str]] | None) -> dict[str, Any] | None:
    """The values that decide the loss of pairs; None where none are trained on."""
    settings = config.train.preference
    if settings is None:
        return None
    return {"references": references, **settings.model_dump(mode="json", exclude={"reference_dir"})}


def numerics_version(config: Config) -> str:
    """The release that last changed what a step of this run computes: `NUMERICS_VERSION`, or a later one for some."""
    of_rates = config.train.optimizer.type == "muon" or config.train.precision.fp8 is not None
    mixers = {config.model.layer(kind).mixer for kind in config.model.layer_kinds}
    return _KDA_RATES if of_rates and "kda" in mixers else NUMERICS_VERSION


def model_fingerprint(config: Config) -> dict[str, Any]:
    """The values that decide the function that the weights compute: every key of `model:`."""
    keys = config.model.model_dump(mode="json")
    if config.model.positions == "learned":
        # By default the longest windows decide, and a phase with longer ones may be appended.
        keys["max_positions"] = config.max_positions
    for kind in keys["kinds"].values():
        # A kind may write out what it would have all the same.
        for key in [key for key, value in kind.items() if value == keys[key]]:
            del kind[key]
    for name in LATER_KEYS:
        _leave_out_default(keys, config.model, name)
    # Without it all sizes grow, as with [].
    if fixed := keys["init"].pop("mup_fixed"):
        keys["init"]["mup_fixed"] = sorted(fixed)
    if plugins := layer_plugins(config.model):
        keys["plugins"] = plugins
    return keys


def layer_plugins(model: ModelConfig) -> dict[str, Any]:
    """Identities of the plug-ins that layers are of, by kind and name."""
    layers = [model.layer(name) for name in dict.fromkeys([*model.encoder_kinds, *model.layer_kinds])]
    mixers = plugin_identities("mixers", (layer.mixer for layer in layers))
    mlps = plugin_identities("mlps", (layer.mlp for layer in layers))
    return {kind: found for kind, found in (("mixers", mixers), ("mlps", mlps)) if found}


def _leave_out_default(values: dict[str, Any], section: Section, name: str) -> None:
    """Take a key with dots out of the values of a section where it has its default; a section may be missing."""
    key, _, below = name.partition(".")
    value = getattr(section, key)
    if below and isinstance(value, Section):
        _leave_out_default(values[key], value, below)
    elif not below and value == _default(type(section), key):
        del values[key]


def _default(section: type[Section], key: str) -> Any:
    return section.model_fields[key].get_default(call_default_factory=True)


def _with_later_keys(model: dict[str, Any]) -> dict[str, Any]:
    """Keys of `model:`, or of a kind of layers, and `LATER_KEYS` of sections that are there."""
    scaling = model.get("rope_scaling")
    if scaling is None:
        return model
    later = [name.partition(".")[2] for name in LATER_KEYS if name.startswith("rope_scaling.")]
    return model | {"rope_scaling": {key: _default(RopeScalingConfig, key) for key in later} | scaling}


def computing_keys(model: dict[str, Any], spec: DecoderSpec) -> dict[str, Any]:
    """The keys of `model` that decide what weights of the shapes of `spec` compute; those of layers once per kind."""
    later = {key: _default(ModelConfig, key) for key in LATER_KEYS if "." not in key}
    model = _with_later_keys(later | model)
    # The tensors have shown what the vocabulary is, and nothing is dropped but in training. Of how the weights were
    # drawn, the base width of muP alone matters later: it scales attention and logits.
    apart = ("max_positions", "vocab_size", "vocab_multiple", "dropout", "pattern", "kinds", *LayerConfig.model_fields)
    whole = {key: value for key, value in model.items() if key not in apart}
    whole["init"] = {"mup_base_dim": model["init"].get("mup_base_dim")}
    pattern, shared = model["pattern"], {key: model[key] for key in LayerConfig.model_fields if key in model}
    if not pattern:
        return whole | shared | _same_meaning(spec.layers[0], model)
    names = [pattern[index % len(pattern)] for index in range(model["layers"])]
    kinds = {name: shared | _with_later_keys(model["kinds"][name]) for name in dict.fromkeys(names)}
    for name, layer in dict(zip(names, spec.layers, strict=False)).items():  # one of the two may have more layers
        kinds[name] |= _same_meaning(layer, whole | kinds[name])
    return whole | {"pattern": names, "kinds": kinds}


def computing_differences(old: dict[str, Any], new: dict[str, Any], spec: DecoderSpec) -> list[tuple[str, Any, Any]]:
    """Differences of two `model:` in what weights of the shapes of `spec` compute, see `differences`.

    Kinds of layers may have other names, or be as many as the layers, if each layer is the same.
    """
    found = [computing_keys(each, spec) for each in (old, new)]
    of_layers = [_by_layer(each) for each in found]
    if of_layers[0] == of_layers[1]:
        found = [
            {key: value for key, value in each.items() if key not in ("pattern", "kinds", *LayerConfig.model_fields)}
            for each in found
        ]
    return differences("model", *found)


def pruned_differences(
    old: dict[str, Any], new: dict[str, Any], specs: tuple[DecoderSpec, DecoderSpec], layers: Sequence[int]
) -> list[tuple[str, Any, Any]]:
    """Differences of two `model:` besides sizes, of which the second has a part of the first; see `differences`.

    Args:
        old: of the source.
        new: of the part.
        specs: of both.
        layers: the source's layer for each of the part.
    """
    theirs, ours = (computing_keys(values, spec) for values, spec in zip((old, new), specs, strict=True))
    of_layers = zip((_by_layer(theirs)[layer] for layer in layers), _by_layer(ours), strict=True)
    found = [
        (f"{name} (layer {index})", before, now)
        for index, pair in enumerate(of_layers)
        for name, before, now in differences("model", *map(_without_sizes, pair))
    ]
    apart = ("pattern", "kinds", *LayerConfig.model_fields)
    whole = [{key: value for key, value in each.items() if key not in apart} for each in (theirs, ours)]
    return differences("model", *map(_without_sizes, whole)) + found


def _without_sizes(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys of a model or a layer without those that pruning changes."""
    kept = {key: value for key, value in keys.items() if key not in _SIZES}
    if isinstance(experts := kept.get("experts"), dict):
        kept["experts"] = {key: value for key, value in experts.items() if key not in ("count", "shared_ffn_dim")}
    return kept


def _by_layer(keys: dict[str, Any]) -> list[dict[str, Any]]:
    """Keys of each layer, of `computing_keys`."""
    if "pattern" in keys:
        return [keys["kinds"][name] for name in keys["pattern"]]
    return [{key: value for key, value in keys.items() if key in LayerConfig.model_fields}] * int(keys["layers"])


def _same_meaning(layer: LayerSpec, keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for part in layer.parts.values() for key, value in part.same_meaning(keys).items()}


def objective_fingerprint(config: Config) -> dict[str, Any]:
    """The values that decide how a window becomes inputs and targets: the keys that the type of objective reads."""
    values = mixed_values(config.train.objective)
    if any(phase.objective is not None for phase in config.blend.phases):
        values["phases"] = {
            str(number): mixed_values(phase.objective)
            for number, phase in enumerate(config.blend.phases)
            if phase.objective is not None
        }
    return values


def compare(saved: Fingerprints, now: Fingerprints, allow: Iterable[str]) -> list[str]:
    """Differences that were allowed, as lines to show.

    Raises:
        UserError: an aspect differs that `resume.allow` does not name; the message shows each difference.
    """
    allowed = set(allow)
    accepted: list[str] = []
    refused: list[str] = []
    advice = "or start a new run in another run.dir"
    for aspect in sorted(now):
        if saved.get(aspect) != now[aspect]:
            found = _differences_of(aspect, saved.get(aspect), now[aspect])
            lines = [f"{name}: {shown(old)} -> {shown(new)}" for name, old, new in found]
            (accepted if aspect in allowed else refused).extend(lines)
            if aspect not in allowed and aspect != "code":
                advice = "set the values back, or use another run.dir"
            if aspect not in allowed and not any(name in _OF_SHAPES for name, *_ in found):
                fits = ", if the weights still fit" if aspect == "model" else ""
                why = _releases(saved.get(aspect), now[aspect]) if aspect == "code" else ""
                refused.append(f"  ({why}resume.allow=[{aspect}] accepts this{fits})")
    if refused:
        raise UserError(
            "this run differs from its checkpoint (checkpoint -> now):\n  " + "\n  ".join(refused) + f"\n{advice}"
        )
    return accepted


def _releases(saved: Any, now: str) -> str:
    """The release that resumes a run as it was, given those that last changed what a step computes, as words."""
    if _numbers(saved) < _numbers(now):
        return f"{now} changed what a step computes, see CHANGELOG.md; a release before it resumes the run as it was; "
    return f"what a step computes is that of {shown(saved)}: that release or a later one resumes the run as it was; "


def _numbers(release: Any) -> list[int]:
    # A checkpoint of others may have anything here.
    return [int(number) for number in re.findall(r"\d{1,9}", str(release or ""))]


def _differences_of(aspect: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """`differences` of an aspect, with names that are keys of the run file where it has them."""
    if aspect in ("distill", "preference"):
        return differences(f"train.{aspect}", old, new)
    if aspect != "objective":
        return differences(aspect, old, new)
    of_run = [{**(each or {})} for each in (old, new)]
    phases = [{number: {"objective": values} for number, values in each.pop("phases", {}).items()} for each in of_run]
    return differences("train.objective", *of_run) + differences("blend.phases", *phases)


def differences(name: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """Differences of two JSON values: dotted name below `name`, old and new value."""
    if isinstance(old, dict) and isinstance(new, dict):
        rows: list[tuple[str, Any, Any]] = []
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                rows += differences(f"{name}.{key}", old.get(key), new.get(key))
        return rows
    return [(name, old, new)]


def shown(value: Any) -> str:
    """A JSON value in one line, as a run file has it; keys without a value are left out."""
    if value is None or isinstance(value, bool):
        return {None: "none", False: "false", True: "true"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(below)}" for key, below in value.items() if below is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return '""' if value == "" else str(value)
