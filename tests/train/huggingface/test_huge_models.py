"""Folders of others that say their model is of absurd size: refused before anything of that size is made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from pipeline.common.errors import UserError
from pipeline.config.model import ModelConfig
from pipeline.train.checkpoint.weight_source import open_weights
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.start.setup import check_has_weights
from tests import bounded

LLAMA = {
    **{"model_type": "llama", "vocab_size": 310, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
}
TINY = {"layers": 2, "dim": 32, "heads": 4, "vocab_size": 310}


def folder(path: Path, **values: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_bytes(orjson.dumps(LLAMA | values))
    return path


@pytest.mark.guard
def test_a_billion_layers(tmp_path: Path) -> None:
    message = bounded.refused(
        "HuggingFaceFolder(Path(sys.argv[1])).mapping",
        "from pathlib import Path\nfrom pipeline.train.huggingface.folder import HuggingFaceFolder",
        folder(tmp_path / "hf", num_hidden_layers=10**9),
    )
    assert "config.json" in message and "layers" in message and "4096" in message


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim"])
def test_other_sizes(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError, match=f"{key}: {2**40} .* whole number from 1 to"):
        _ = HuggingFaceFolder(folder(tmp_path / "hf", **{key: 2**40})).mapping


def test_billions_of_experts(tmp_path: Path) -> None:
    moe = {"model_type": "mixtral", "num_experts_per_tok": 2}
    with pytest.raises(UserError, match="num_local_experts: 1000000000 .* whole number from 1 to"):
        _ = HuggingFaceFolder(folder(tmp_path / "hf", **moe, num_local_experts=10**9)).mapping


@pytest.mark.guard
def test_more_experts_in_all_than_have_names_in_memory(tmp_path: Path) -> None:
    """Layers and experts that are each within their bounds, before any file of weights is looked at."""
    moe = {"model_type": "mixtral", "num_experts_per_tok": 2}
    message = bounded.refused(
        "HuggingFaceFolder(Path(sys.argv[1])).mapping",
        "from pathlib import Path\nfrom pipeline.train.huggingface.folder import HuggingFaceFolder",
        folder(tmp_path / "hf", **moe, num_local_experts=2**14, num_hidden_layers=4096),
    )
    assert "layers 4096 and experts.count 16384" in message and "67,108,864" in message and "131,072" in message


def test_as_many_experts_as_published_models_have(tmp_path: Path) -> None:
    """Kimi K2's 60 layers of 384 experts, in the order of their numbers."""
    moe = {"model_type": "mixtral", "num_experts_per_tok": 8, "num_local_experts": 384, "num_hidden_layers": 60}
    mapping = HuggingFaceFolder(folder(tmp_path / "hf", **moe)).mapping
    experts = [name for name in mapping.theirs if ".experts." in name]
    assert len(experts) == 60 * 384 * 3
    assert [name.split(".")[5] for name in experts[:384]] == [str(expert) for expert in range(384)]


def test_exported_weights(tmp_path: Path) -> None:
    fingerprints = {"model": TINY | {"layers": 10**9}}
    about = {
        "files": {},
        "weights": "model",
        "fingerprints": fingerprints,
        "run": "",
        "checkpoints": [],
        "positions": 64,
    }
    (tmp_path / "export.json").write_bytes(orjson.dumps(about))
    with pytest.raises(UserError, match="describes a model that cannot be built: layers: .*less than or equal to 4096"):
        open_weights(tmp_path, None, "model")


def test_a_checkpoint_that_has_not_so_many_bytes() -> None:
    checkpoint: Any = SimpleNamespace(path=Path("step-1"), size=200_000)
    check_has_weights(checkpoint, decoder_spec(ModelConfig(**TINY), 310, 64))
    with pytest.raises(UserError, match="step-1 has 200,000 bytes, but the model that it names has weights of"):
        check_has_weights(checkpoint, decoder_spec(ModelConfig(**TINY | {"dim": 2**20, "layers": 4096}), 310, 64))
