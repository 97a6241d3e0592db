"""A family of Hugging Face's models: what its files are called, say and demand. Each family is one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.names import Names

_ALL_HAVE = {
    *("layers", "dim", "heads", "ffn_dim", "norm_eps", "tie_embeddings", "init"),
    # Not of the weights, or seen in their shapes.
    *("vocab_size", "vocab_multiple", "max_positions", "document_attention"),
    # Of training alone; `to_hf` says so where it leaves multi-token prediction out.
    *("dropout", "mtp"),
}
"""Keys of `model:` that fit every family with any value, unless it says otherwise."""


@dataclass(frozen=True)
class Need:
    """The demand of a family on a key of `model:`."""

    fits: Callable[[Any, ModelConfig], bool]
    """Given the value of the key, and all of `model:`."""
    has: str
    """Completes "Llama has ..." where a model does not fit."""


def anything() -> Need:
    """Every value of the key can be written."""
    return Need(lambda value, model: True, "")


def only(*values: Any, has: str | None = None) -> Need:
    """These values of the key can be written."""
    return Need(lambda value, model: value in values, has or " or ".join(map(_text, values)))


def where(fits: Callable[[ModelConfig], bool], has: str) -> Need:
    """Values of the key that go with those of others."""
    return Need(lambda value, model: fits(model), has)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models in transformers."""

    model_type: str
    """Value of `model_type` in `config.json`."""
    architecture: str
    """Name of its class with a language-model head."""
    title: str
    """Name of it in messages."""
    what: str
    """Keys of `model:` that differ from Llama's, for the docs."""
    read: Callable[[ConfigSource], Json]
    """Values of `model:` that compute what a config.json describes. It looks at every key that changes the result."""
    write: Callable[[ModelConfig, int], Json]
    """Keys of config.json that are this family's, of a model without `misfits` and the longest context it is trained
    with."""
    mark: str
    """The key of `model:` that sets the family apart. Where no family computes a model, the message is about one whose
    `mark` fits."""
    needs: Mapping[str, Need]
    """By key of `model:`. A key that is neither here nor one that all have must be at its default: so a key that is
    added to `model:` is refused by all families that do not know it."""
    names: Names
    varies: frozenset[str] = frozenset()
    """Keys of `model:` that may differ between layers."""
    alike: Mapping[str, Callable[[ModelConfig], Any]] = field(default_factory=dict)
    """By key of those, the type of a layer: layers of a type have the same value."""
    special: Callable[[Sequence[ModelConfig]], bool] = lambda layers: True
    """True of the kinds of layers of a model that is this family's: others are rather one of an earlier family, which
    computes less, and do not have the `mark`."""
    order: Callable[[ModelConfig], bool] = lambda model: True
    """True of a model whose kinds of layers follow each other as this family has them; others do not have the
    `mark`."""
    prefix: str = "model."
    """Files of the model without its head lack it in their names."""
    ignored: tuple[str, ...] = ()
    """Patterns of names of buffers that files of old versions have, and that are computed today."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that files may have a second time -> the one that is read, which must be the same."""
    extra_layers: bool = False
    """Files may have layers after the last one, for tokens further ahead, which are left out."""
    extra: str | None = None
    """The same where the names of their tensors begin with this."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of names -> what other versions of transformers write there."""
    positions: tuple[str, int] = ("max_position_embeddings", 2048)
    """The key that has the longest context, and what transformers takes where it is not there."""
    pads: bool = False
    """True if transformers takes a padding token where config.json does not say that there is none."""
    padding: int | None = None
    """Id of a token that transformers leaves out where it counts positions."""
    splits_alike: Callable[[str], bool] | None = None
    """For a family whose texts AutoTokenizer splits in one way, whatever the files say: true of the tokenizers (their
    `tokenizer.json`) that split so."""

    def misfits(self, model: ModelConfig) -> list[str]:
        """Keys of `model:` whose values this family does not compute; none if it computes the model."""
        kinds = [model.layer(name) for name in dict.fromkeys(model.layer_kinds)]
        keys = list(dict.fromkeys(("mixer", *self.needs, *_KEYS)))
        found = [key for key in keys if not all(self._fits(each, key) for each in kinds)]
        found += [key for key in LayerConfig.model_fields if key not in self.varies and _differs(key, kinds)]
        for key, type_of in self.alike.items():
            types = [type_of(each) for each in kinds]
            same = ([each for each, other in zip(kinds, types, strict=True) if other == one] for one in types)
            found += [key] * any(_differs(key, layers) for layers in same)
        found += [] if self.special(kinds) and self.order(model) else [self.mark]
        return list(dict.fromkeys(found))

    def _fits(self, layer: ModelConfig, key: str) -> bool:
        if key in self.needs:
            # Those of heads are asked of layers without attention, too.
            with_heads = layer.model_copy(update={"heads": 1}) if layer.heads is None else layer
            return self.needs[key].fits(getattr(layer, key), with_heads)
        return key in _ALL_HAVE or is_default(layer, key)

    def has(self, model: ModelConfig, key: str) -> str:
        """Words for what the family has where a model has a key of its `misfits`."""
        differs = key != self.mark and not self._unfit(model, key)
        if differs or (key in self.needs and not self.needs[key].has):
            return f"{self.title} has the same {key} in all layers{' of a type' if key in self.varies else ''}"
        if key in self.needs:
            return f"{self.title} has {self.needs[key].has}"
        default = ModelConfig.model_fields[key].default
        return f"{self.title} has {f'{key} {_text(default)}' if default else f'no {key}'}"

    def misfit(self, model: ModelConfig, key: str) -> str:
        """Words for a key of the model's `misfits`, after that by which it was taken for one of this family."""
        unfit = self._unfit(model, key)
        if unfit:
            found = f"{_path(model, unfit[0], key)} is {getattr(model.layer(unfit[0]), key)!r}"
        else:
            found = f"model.{key} differs between layers"
        return found if key == self.mark else f"{self._marked(model)} and {found}"

    def _unfit(self, model: ModelConfig, key: str) -> list[str | None]:
        """Kinds of layers whose value of a key no layer of this family has."""
        return [name for name in dict.fromkeys(model.layer_kinds) if not self._fits(model.layer(name), key)]

    def _marked(self, model: ModelConfig) -> str:
        """Words for the key by which a model was taken for one of this family, in the layers that have it."""
        names = list(dict.fromkeys(model.layer_kinds))
        name = next((each for each in names if not is_default(model.layer(each), self.mark)), names[0])
        return f"{_path(model, name, self.mark)} is {_text(getattr(model.layer(name), self.mark))}"


def is_default(model: ModelConfig, key: str) -> bool:
    """True if a key of `model:` has its default."""
    return bool(getattr(model, key) == ModelConfig.model_fields[key].default)


_KEYS = [key for key in ModelConfig.model_fields if key not in ("pattern", "kinds")]


def _differs(key: str, kinds: Sequence[ModelConfig]) -> bool:
    return any(getattr(each, key) != getattr(kinds[0], key) for each in kinds)


def _path(model: ModelConfig, kind: str | None, key: str) -> str:
    """Path of a key of a kind of layers in a run file."""
    own = kind is not None and key in model.kinds[kind].model_fields_set
    return f"model.{f'kinds.{kind}.' if own else ''}{key}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    return repr(value) if isinstance(value, str) else "none" if value is None else "set"
