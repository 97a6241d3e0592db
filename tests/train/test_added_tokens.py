"""Tokens that a run adds to the tokenizer of the weights it begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests import tiers, tiny
from tests.train.distributed.ranks import run as run_ranks
from tests.train.huggingface.hf_mapping import randomize
from tests.train.runs import start
from tests.train.test_warm_start import LAYOUTS, first_weights

pytestmark = pytest.mark.guard

ADDED = ["<|turn|>", "<|end|>", *(f"<|more{number}|>" for number in range(20))]
FP32 = "train.precision.compute=fp32"


@pytest.fixture(scope="module")
def base(root: Path) -> Path:
    """A random Llama with the tokenizer of the corpus and a row for each id."""
    tokenizer = run_tokenizer(load(root / "run.yaml"))
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, eos_token_id=0,
        bos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    randomize(model, seed=5)
    model.save_pretrained(root / "base")
    tokenizer.save(root / "base")
    return root / "base"


@pytest.fixture(scope="module")
def run_file(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from it with 22 tokens more, which need more rows than the base's padding has."""
    folder = tmp_path_factory.mktemp("added")
    file = tiny.write_run(folder, {"data.preprocess.workers": 1})
    values = yaml.safe_load(file.read_text())
    values["tokenizer"] = {"path": str(base), "add_tokens": ADDED}
    done = tiny.pipeline("convert", "from-hf", base, "--dry-run")
    assert done.returncode == 0, done.stderr
    values["model"] = yaml.safe_load(done.stdout)["model"] | {"vocab_multiple": 16}
    values["model"].pop("vocab_size", None)
    values["train"]["init_from"] = {"hf": str(base)}
    file.write_text(yaml.safe_dump(values))
    preprocess(load(file))
    return file


def test_their_rows_are_the_mean_of_the_others(base: Path, run_file: Path) -> None:
    found = first_weights(run_file, [FP32, f"run.dir={run_file.parent / 'alone'}"])
    theirs = LlamaForCausalLM.from_pretrained(base)
    known = theirs.config.vocab_size
    for name, rows in [
        ("embedding.weight", theirs.get_input_embeddings().weight),
        ("head.weight", theirs.get_output_embeddings().weight),
    ]:
        assert torch.equal(found[name][:known], rows), name
        mean = rows.detach().double().mean(0).float().expand(len(ADDED), -1)
        torch.testing.assert_close(found[name][known : known + len(ADDED)], mean, rtol=0, atol=1e-9)
        assert not found[name][known + len(ADDED) :].any()


@pytest.mark.parallel
@pytest.mark.parametrize("layout", tiers.first(1, LAYOUTS, rest="slow"))
def test_each_layout_has_the_same_bits(run_file: Path, layout: str) -> None:
    overrides = [FP32, f"run.dir={run_file.parent / layout}", *(f"{key}={n}" for key, n in LAYOUTS[layout].items())]
    overrides += ["parallel.pipeline.schedule=gpipe"] if layout == "pp2" else []
    found: dict[str, torch.Tensor] = {}
    for part in run_ranks(2, first_weights, run_file, overrides, connect=False):
        found |= part
    alone = first_weights(run_file, [FP32, f"run.dir={run_file.parent / f'{layout}-alone'}"])
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[name], value) for name, value in alone.items())


def test_another_tokenizer_stays_refused(base: Path, run_file: Path) -> None:
    code, out = start(run_file.parent, "small", FP32, "model.vocab_size=400")
    assert code == 2 and "set model.vocab_size=" in out
    config = load(run_file).tokenizer.model_copy(update={"add_tokens": ["<|turn|>", "a"]})
    with pytest.raises(UserError, match=r"tokenizer\.add_tokens: .* has 'a' already"):
        Tokenizer.load(base, config)


def test_a_run_of_ours_gets_them_too(root: Path, run_file: Path) -> None:
    code, out = start(root, "donor", FP32, "train.duration=1 steps", "train.schedule.warmup=0 steps")
    assert code == 0, out
    donor = root / "donor" / "checkpoints" / "step-00000001"
    values = yaml.safe_load(run_file.read_text())
    values["tokenizer"] = {"path": str(donor), "add_tokens": ADDED[:2]}
    values["model"] = yaml.safe_load((root / "run.yaml").read_text())["model"]
    values["train"]["init_from"] = {"path": str(root / "donor")}
    values["data"]["dir"] = str(run_file.parent / "data-ours")
    file = run_file.parent / "ours.yaml"
    file.write_text(yaml.safe_dump(values))
    preprocess(load(file))
    found = first_weights(file, [FP32, f"run.dir={run_file.parent / 'ours'}"])
    known = run_tokenizer(load(root / "run.yaml")).vocab_size
    rows = found["embedding.weight"]
    mean = rows[:known].double().mean(0).float().expand(2, -1)
    torch.testing.assert_close(rows[known : known + 2], mean, rtol=0, atol=1e-9)
