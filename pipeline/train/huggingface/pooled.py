"""Files with which sentence-transformers loads an encoder that transformers loads: one vector for each text."""

from __future__ import annotations

from pathlib import Path

from pipeline.common import storage

POOLING = "1_Pooling"
_MODULES = (("", "Transformer"), (POOLING, "Pooling"))


def write_pooled(folder: Path, dim: int, positions: int) -> None:
    """Add them to a folder: a vector is the mean of those of all tokens of a text.

    Args:
        folder: With the files for transformers.
        dim: Size of a vector.
        positions: Tokens of a text at most; what is after them is cut off.
    """
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate(_MODULES)
    ]
    storage.put_json(folder / "modules.json", modules)
    storage.put_json(folder / "sentence_bert_config.json", {"max_seq_length": positions, "do_lower_case": False})
    (folder / POOLING).mkdir()
    modes = dict.fromkeys(
        ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"), False
    )
    values = {f"pooling_mode_{mode}": on for mode, on in (modes | {"mean_tokens": True}).items()}
    storage.put_json(
        folder / POOLING / "config.json", {"word_embedding_dimension": dim, **values, "include_prompt": True}
    )
