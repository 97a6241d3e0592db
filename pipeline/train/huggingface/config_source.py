"""Values of a `config.json` of Hugging Face's models, read so that nothing in it is overlooked.

What a config.json says and we do not compute is refused by its name: an unknown key could be a feature, and weights
that load without it would give other numbers without a word.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from pipeline.common.errors import UserError
from pipeline.config.layers.mixers import MAX_ROWS

Json = dict[str, Any]

NEUTRAL_KEYS = {
    *("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "initializer_factor", "pretraining_tp"),
    *("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class"),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("keys_to_ignore_at_inference", "n_ctx", "unk_token_id", "_attn_implementation_autoset", "attn_implementation"),
    # For a head that classifies.
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    # How products are ordered, not what they are.
    *("reorder_and_upcast_attn", "rms_norm_fused"),
    # How text is generated, as older files have it.
    *("max_length", "do_sample", "temperature", "top_p", "top_k", "is_llama_config"),
}
"""Keys that do not change what the weights compute, in any family."""
_DROPOUT = (
    *("attention_dropout", "residual_dropout", "embedding_dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop"),
)


_SHOWN = 300
"""Characters of a value in a message."""
_MAX_NUMBER = 1e30
"""Factors, frequencies and bounds are far below; computing with them does not overflow."""


class ConfigSource:
    """Values of a config.json, and which of them were looked at."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self._values = values
        self._file = file
        self._seen: set[str] = set()
        self.last: str | None = None
        """Key that was looked at last."""

    def get(self, key: str, default: Any = None) -> Any:
        """A value; `default` where there is none, which is what transformers takes then."""
        self._seen.add(key)
        self.last = key
        found = self._values.get(key)
        return default if found is None else found

    def get_absent(self, key: str, absent: Any) -> Any:
        """A value that may be null; `absent` only where the key is not there at all."""
        self._seen.add(key)
        self.last = key
        return self._values.get(key, absent)

    def need(self, key: str) -> Any:
        """A value that every such file has."""
        found = self.get(key)
        if found is None:
            raise UserError(f"{self._file} has no {key}")
        return found

    def need_count(self, key: str, most: int) -> int:
        """A number of things that are gone through one by one before the rest is checked."""
        return self._whole(key, self.need(key), 1, most)

    def count(self, key: str, default: int, least: int = 0) -> int:
        """A number that is computed with before the rest is checked."""
        return self._whole(key, self.get(key, default), least, MAX_ROWS)

    def need_size(self, key: str) -> int:
        """A size that every such file has."""
        return self.need_count(key, MAX_ROWS)

    def size(self, key: str, default: int | None = None, least: int = 1) -> Any:
        """A size; `default`, which may be None, where there is none."""
        return self.size_or_null(key, default, least) if self.get(key) is not None else default

    def size_or_null(self, key: str, absent: int | None, least: int = 1) -> Any:
        """A size that may be null; `absent` only where the key is not there at all."""
        found = self.get_absent(key, absent)
        return found if found is None else self._whole(key, found, least, MAX_ROWS)

    def number(self, key: str, default: float | None = None) -> Any:
        """A number of 0 or more; `default`, which may be None, where there is none."""
        return self.as_number(key, self.get(key, default))

    def number_or_null(self, key: str, absent: float) -> Any:
        """A number that may be null; `absent` only where the key is not there at all."""
        return self.as_number(key, self.get_absent(key, absent))

    def object(self, key: str) -> Json:
        """An object; an empty one where there is none."""
        found = self.get(key, {})
        if not isinstance(found, dict):
            self.refuse(key, found, "it must be an object")
        return found

    def as_number(self, key: str, found: Any) -> Any:
        """A value of an inner object, where it is None or a number of 0 or more."""
        # Python counts True as 1, and JSON of Python has NaN, Infinity, and whole numbers that no float holds.
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
        if found is not None and not (is_number and 0 <= found <= _MAX_NUMBER):
            self.refuse(key, found, f"it must be a number from 0 to {_MAX_NUMBER:g}")
        return found

    def _whole(self, key: str, found: Any, least: int, most: int) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            self.refuse(key, found, f"it must be a whole number from {least} to {most}")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        found = self.get(key, default)
        if not isinstance(found, bool):
            self.refuse(key, found, "it must be true or false")
        return found

    def must_be(self, key: str, wanted: Collection[Any], default: Any) -> None:
        """Refuse what we do not compute."""
        found = self.get(key, default)
        if not any(found == each for each in wanted):  # a list has no hash, to look it up by
            self.refuse(key, found, f"only {' or '.join(map(repr, wanted))} is supported")

    def refuse(self, key: str, value: Any, why: str) -> NoReturn:
        """Raise an error: this value is nothing that we compute."""
        raise UserError(f"{self._file}: {key}: {shortened(value)} cannot be converted: {why}")

    def overlooked(self) -> list[str]:
        """Keys that may change the result and that nobody has looked at."""
        return [key for key in self._values if key not in {*self._seen, *NEUTRAL_KEYS, *_DROPOUT}]

    def finish(self, ignore: Collection[str]) -> None:
        """Refuse what nobody has looked at, if it is set."""
        for key in self.overlooked():
            value = self._values[key]
            if key in ignore or value in (None, False, [], {}):
                continue
            why = "it is not supported"
            if key == "auto_map":
                why = "the model needs its own code, and code that comes with weights is never run"
            hint = f"pipeline convert from-hf DIR OUT --ignore {key}"
            self.refuse(key, value, f"{why}. If it does not change what the model computes: {hint}")


def shortened(value: Any) -> str:
    """A value in words, of any size: the first parts of a long one, and the first levels of a deep one."""
    try:
        text = _REPR.repr(value)
    except ValueError:  # Python spells out no whole number of more than 4,300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxtuple, _REPR.maxlist, _REPR.maxdict, _REPR.maxset = 4, 8, 20, 20, 8
_REPR.maxstring = _REPR.maxother = 2 * _SHOWN
"""Parts of a value may be shared, so a small file may hold one that would take for ever to spell out."""
