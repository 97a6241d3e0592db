"""`config.json` of Hugging Face's models to the `model:` section and back, by the families that there are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pipeline.common.errors import UserError
from pipeline.config.model import ModelConfig
from pipeline.train.checkpoint.weight_source import validated_model
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family
from pipeline.train.huggingface.quantized import KEY as QUANTIZATION
from pipeline.train.huggingface.quantized import read_quantization
from pipeline.train.huggingface.registry import FAMILIES, READ_AS, REFUSED


def from_hf_config(values: Mapping[str, Any], file: str, ignore: Collection[str] = ()) -> tuple[Family, ModelConfig]:
    """The `model:` section that computes what a config.json describes.

    Args:
        values: of the file.
        file: its path, for messages.
        ignore: keys that the user says do not matter.

    Raises:
        UserError: an unsupported architecture or feature, by name.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{file}: model_type: {model_type!r} names no family of models")
    if model_type in READ_AS and values.get("architectures") in (None, [FAMILIES[READ_AS[model_type]].architecture]):
        model_type = READ_AS[model_type]
    if model_type not in FAMILIES:
        why = f": {REFUSED[model_type]}" if model_type in REFUSED else ""
        raise UserError(
            f"{file}: model_type: {model_type!r} cannot be converted{why}; these can: {', '.join(sorted(FAMILIES))}"
        )
    family, source = FAMILIES[model_type], ConfigSource(values, file)
    try:
        model = family.read(source)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        # A family checks what it computes with where that is likely; this is for files that nobody writes.
        key = source.last
        raise UserError(
            f"{file}: a value cannot be read, at or ahead of {key}: {values.get(str(key))!r}: {error}"
        ) from error
    if QUANTIZATION not in ignore:
        read_quantization(source)
    source.finish(ignore)
    return family, validated_model(model, f"{file} describes a model that cannot be built")


def to_hf_config(model: ModelConfig, vocab_size: int, positions: int) -> tuple[Family, Json]:
    """The family that computes what a `model:` section describes, and its config.json.

    Args:
        model: the section.
        vocab_size: tokens, without padding.
        positions: the longest context that the model was trained with.

    Raises:
        UserError: no family computes this; the message names the key.
    """
    family = _family_of(model)
    return family, family_config(family, model, vocab_size, positions)


def family_config(family: Family, model: ModelConfig, vocab_size: int, positions: int) -> Json:
    """config.json of a model that a family computes; see `to_hf_config`."""
    common = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init.std,
        "use_cache": True,
    }
    if family.pads:
        common["pad_token_id"] = None
    return common | family.write(model, positions)


def _family_of(model: ModelConfig) -> Family:
    if model.init.scheme == "mup":
        raise _no_family("model.init.scheme is 'mup'", "muP has factors on attention and logits")
    misfits = {name: family.misfits(model) for name, family in FAMILIES.items()}
    for name, keys in misfits.items():
        if not keys:
            return FAMILIES[name]
    nearest = _nearest(misfits)
    key = misfits[nearest.model_type][0]
    raise _no_family(nearest.misfit(model, key), nearest.has(model, key))


def _nearest(misfits: Mapping[str, Collection[str]]) -> Family:
    """The family with the fewest misfits of those whose mark the model has; the last of several, see `FAMILIES`."""
    marked = [name for name, keys in misfits.items() if FAMILIES[name].mark not in keys] or list(misfits)
    return FAMILIES[min(reversed(marked), key=lambda name: len(misfits[name]))]


def _no_family(what: str, why: str) -> UserError:
    return UserError(f"{what}: no supported family of Hugging Face models computes this ({why})")
