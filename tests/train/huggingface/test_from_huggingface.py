"""Runs that start from a model of transformers', and what is exported of them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline.common import storage
from pipeline.config.load import load
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.huggingface.convert import to_hf
from tests import tiny
from tests.train.distributed.ranks import run as run_ranks
from tests.train.huggingface.hf_mapping import randomize
from tests.train.runs import column, start, train
from tests.train.test_warm_start import LAYOUTS, first_weights

QUIET = Console(file=io.StringIO())
VOCAB = 310  # some rows more than the tokenizer has ids
FP32 = "train.precision.compute=fp32"


@pytest.fixture(scope="module")
def llama(root: Path) -> Path:
    """A random Llama that takes the ids of the corpus."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    return _saved(LlamaForCausalLM(config), root / "llama", root)


@pytest.fixture(scope="module")
def gpt2(root: Path) -> Path:
    """A random GPT-2, whose matrices are stored the other way round and three in one."""
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=0)
    return _saved(GPT2LMHeadModel(config), root / "gpt2", root)


def _saved(model: LlamaForCausalLM | GPT2LMHeadModel | Qwen3MoeForCausalLM, folder: Path, root: Path) -> Path:
    randomize(model, seed=5)
    model.save_pretrained(folder, max_shard_size="50KB")
    run_tokenizer(load(root / "run.yaml")).save(folder)
    return folder


@pytest.fixture(scope="module")
def files(root: Path, llama: Path, gpt2: Path) -> dict[str, str]:
    """Run files that start from these models, made of what `pipeline convert from-hf --dry-run` prints."""
    names = {}
    for folder in (llama, gpt2):
        done = tiny.pipeline("convert", "from-hf", folder, "--dry-run")
        assert done.returncode == 0, done.stderr
        part = yaml.safe_load(done.stdout)
        everything = tiny.values(root)
        everything["model"] = part["model"]
        everything["train"] |= part["train"]
        names[folder.name] = f"{folder.name}.yaml"
        (root / names[folder.name]).write_text(yaml.safe_dump(everything))
    return names


@pytest.mark.slow
def test_what_a_run_exports_is_what_it_trained(root: Path, llama: Path, files: dict[str, str]) -> None:
    """Its held-out loss, computed by transformers from the export, is the one that it logged."""
    run = train(root, "exports", FP32, "train.ema.decay=0.5", file=files["llama"])
    done = tiny.pipeline("convert", "to-hf", run, root / "exported-llama", "--max-shard", "50KB")
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout and "step-00000008" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(root / "exported-llama")
    tokenizer = AutoTokenizer.from_pretrained(root / "exported-llama")
    ids = tokenizer("the old keeper\n\nof the sea ", return_tensors="pt").input_ids
    assert ids[0].tolist() == run_tokenizer(load(root / "run.yaml")).encode("the old keeper\n\nof the sea ")
    assert tokenizer.decode(ids[0]) == "the old keeper\n\nof the sea "
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == 0
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] <= ids.shape[1] + 4
    config = load(root / files["llama"], [f"run.dir={run}", FP32])
    from pipeline.train.start.open_run import open_heldout

    nats = torch.zeros((), dtype=torch.float64)
    count = 0.0
    for split in open_heldout(config, "heldout").values():
        batch = split.batch(range(len(split)))
        with torch.no_grad():
            logits = model(batch.tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        nats += (loss * batch.weight.flatten()).double().sum()
        count += float(batch.weight.sum())
    done = tiny.pipeline("eval", root / files["llama"], f"run.dir={run}", FP32)
    assert done.returncode == 0, done.stderr
    report = json.loads((run / "eval" / "step-00000008.json").read_bytes())
    assert report["blended"]["loss"] == pytest.approx(nats.item() / count, rel=1e-5)
    to_hf(run, root / "exported-ema", weights="ema", console=QUIET)
    assert not torch.equal(
        load_file(root / "exported-ema" / "model.safetensors")["model.norm.weight"], model.model.norm.weight
    )


@pytest.mark.slow
def test_a_converted_folder_starts_the_same_run(root: Path, llama: Path, files: dict[str, str]) -> None:
    done = tiny.pipeline("convert", "from-hf", llama, root / "converted")
    assert done.returncode == 0, done.stderr
    part = yaml.safe_load((root / "converted" / "model.yaml").read_text())
    assert part["train"]["init_from"] == {"path": str(root / "converted")}
    keys = (FP32, "train.init_from.hf=null", f"train.init_from.path={root / 'converted'}")
    straight, converted = (
        train(root, name, *more, file=files["llama"]) for name, more in (("a", (FP32,)), ("b", keys))
    )
    assert column(straight, "loss") == column(converted, "loss")


@pytest.mark.parallel
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_reads_its_part(root: Path, files: dict[str, str], family: str, layout: str) -> None:
    overrides = [FP32, f"run.dir={root / f'{family}-{layout}'}", *(f"{key}={n}" for key, n in LAYOUTS[layout].items())]
    overrides += ["parallel.pipeline.schedule=gpipe"] if layout == "pp2" else []
    found: dict[str, Tensor] = {}
    for part in run_ranks(2, first_weights, root / files[family], overrides, connect=False):
        found |= part
    alone = first_weights(root / files[family], [FP32, f"run.dir={root / f'{family}-{layout}-alone'}"])
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        assert torch.equal(found[name], value), name
    original = LlamaForCausalLM if family == "llama" else GPT2LMHeadModel
    theirs = original.from_pretrained(root / family).get_input_embeddings().weight
    assert torch.equal(alone["embedding.weight"][:VOCAB], theirs)
    assert not alone["embedding.weight"][VOCAB:].any()


@pytest.mark.slow
def test_what_does_not_fit_is_refused(root: Path, llama: Path, files: dict[str, str]) -> None:
    code, out = start(root, "narrow", FP32, "model.dim=64", file=files["llama"])
    assert code == 2 and "embedding.weight is 384 x 32" in out and "--dry-run` prints its `model`" in out
    short = ("train.duration=1 steps", "train.schedule.warmup=0 steps")
    code, out = start(root, "theta", FP32, "model.rope_theta=500", *short, file=files["llama"])
    assert code == 0
    assert any("warning: model.rope_theta: 10000.0" in line and "500.0" in line for line in out.splitlines())
    code, out = start(root, "both", FP32, f"train.init_from.path={root}", file=files["llama"])
    assert code == 2 and "give exactly one of path and hf" in out


@pytest.mark.guard
def test_data_of_another_tokenizer_is_refused(root: Path, llama: Path, files: dict[str, str], tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path, {"tokenizer.train.vocab_size": 305})
    preprocess(load(file))
    values = yaml.safe_load(file.read_text())
    values["model"] = yaml.safe_load((root / files["llama"]).read_text())["model"]
    values["train"]["init_from"] = {"hf": str(llama)}
    storage.put(file, yaml.safe_dump(values).encode())
    code, out = start(tmp_path, "run")
    assert code == 2 and f"tokenizer.path to {llama}" in out and "resume.allow=[tokenizer]" in out


_MEMORY = """
import io, resource, sys
from pathlib import Path
from rich.console import Console
import torch
from pipeline.train.checkpoint import tensors
from pipeline.train.huggingface.convert import from_hf, to_hf
tensors._AT_ONCE_BYTES = 2**22
from_hf(Path(sys.argv[1]), Path(sys.argv[2]) / "warm", max_shard=2**24, console=Console(file=io.StringIO()))
to_hf(Path(sys.argv[2]) / "warm", Path(sys.argv[2]) / "warm-back", console=Console(file=io.StringIO()))
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
import threading
peak, stop = [0], threading.Event()
def watch():
    while not stop.wait(0.001):
        peak[0] = max(peak[0], anonymous())
before = anonymous()
thread = threading.Thread(target=watch); thread.start()
from_hf(Path(sys.argv[3]), Path(sys.argv[2]) / "ours", max_shard=2**24, console=Console(file=io.StringIO()))
to_hf(Path(sys.argv[2]) / "ours", Path(sys.argv[2]) / "back", max_shard=2**24, console=Console(file=io.StringIO()))
stop.set(); thread.join()
print(peak[0] - before)
"""


@pytest.mark.slow
def test_conversion_needs_the_memory_of_a_few_tensors(root: Path, llama: Path, tmp_path: Path) -> None:
    """A model of 200 MB in many files, with groups of 4 MB: the peak stays far below the model."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1536, num_hidden_layers=16, num_attention_heads=8,
        eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    folder = _saved(LlamaForCausalLM(config), tmp_path / "large", root)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(llama), str(tmp_path), str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 10
    assert size > 150e6 and int(done.stdout) < size / 6


@pytest.mark.slow
def test_conversion_needs_the_memory_of_a_few_experts(root: Path, llama: Path, tmp_path: Path) -> None:
    """A layer whose experts are three tensors of 67 MB here."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=512, moe_intermediate_size=512, num_experts=64, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=8, intermediate_size=64, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    folder = _saved(Qwen3MoeForCausalLM(config), tmp_path / "large", root)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(llama), str(tmp_path), str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) < len(list((tmp_path / "back").glob("*.safetensors")))
    assert size > 200e6 and int(done.stdout) < size / 6
