"""Tensors that files have twice, and keys of config.json that two families read otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pipeline.common.errors import UserError
from pipeline.train.huggingface.configs import from_hf_config
from pipeline.train.huggingface.folder import HuggingFaceFolder
from tests.train.huggingface import encoder_rows
from tests.train.huggingface.parity import Row
from tests.train.huggingface.test_t5 import ROWS as T5_ROWS
from tests.train.huggingface.test_t5 import save_weights

COPIES = {
    "bert": (encoder_rows.bert(), "cls.predictions.decoder.bias", "cls.predictions.bias"),
    "roberta": (encoder_rows.roberta(), "lm_head.decoder.bias", "lm_head.bias"),
    "t5-encoder": (T5_ROWS["1.0"], "encoder.embed_tokens.weight", "shared.weight"),
    "t5-decoder": (T5_ROWS["1.1"], "decoder.embed_tokens.weight", "shared.weight"),
}


@pytest.mark.parametrize(("row", "copy", "name"), COPIES.values(), ids=COPIES)
def test_copies(row: Row, copy: str, name: str, tmp_path: Path) -> None:
    """One that differs is what transformers would compute with: it is never dropped."""
    folder = tmp_path / "theirs"
    if copy.endswith("bias"):
        row.build().save_pretrained(folder)
    else:
        save_weights(row.build(), folder)
    file = folder / "model.safetensors"
    weights = {key: value for key, value in load_file(file).items() if key != copy}
    weights[copy] = weights[name].clone()
    save_file(weights, file, {"format": "pt"})
    assert HuggingFaceFolder(folder).tensors
    weights[copy][-1] += 1
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"{copy} differs from {name}"):
        _ = HuggingFaceFolder(folder).tensors


def test_scaled_rope_of_modernbert() -> None:
    """`rope_scaling` is that of both types of layers, as transformers reads it."""
    shape = {"hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 44, "num_hidden_layers": 3}
    values = {"model_type": "modernbert", "vocab_size": 310, **shape}
    scaled = {**values, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    _, model = from_hf_config(scaled, "config.json")
    factors = [kind.rope_scaling and kind.rope_scaling.factor for kind in map(model.layer, model.layer_kinds)]
    assert factors == [2.0] * 3


def test_keys_of_t5() -> None:
    values = {"model_type": "t5", "vocab_size": 310, "d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    _, model = from_hf_config({**values, "scale_decoder_outputs": True}, "config.json")
    assert model.tie_embeddings and model.logit_scale == 0.25
    for key, value in {"is_encoder_decoder": False, "scale_decoder_outputs": None, "d_model": "16"}.items():
        with pytest.raises(UserError, match=f"config.json: {key}: {value!r}"):
            from_hf_config({**values, key: value}, "config.json")
