"""The recipes that ship: they load, their plans fit the clusters that they name, and tiny forms of them run."""

from __future__ import annotations

import io
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from pipeline.config.load import load, packaged_configs
from pipeline.config.root import Config
from pipeline.data.tokenization.chat_prompts import chat_prompts
from pipeline.eval.generation.generate import generate
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.inference import load_decoder
from pipeline.train.checkpoint.export import average
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.host.devices import DEVICES
from pipeline.train.huggingface.convert import to_hf
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import num_parameters
from pipeline.train.planning.plan import plan
from pipeline.train.rules.layout import check_layout, layout_warnings
from pipeline.train.run.folder import read_metrics
from pipeline.train.start.fork import fork
from slurm.local.stages import run
from tests import tiny

QUIET = Console(file=io.StringIO())
FILES = sorted(packaged_configs().glob("recipes/*.yaml"))
MODEL = {"layers": 2, "dim": 32, "heads": 2, "kv_heads": None, "ffn_dim": 64, "vocab_size": None, "max_positions": None}


def test_there_are_recipes() -> None:
    assert {file.stem for file in FILES} == {
        "annealing",
        "continued-pretraining",
        "gpt2-124m-fineweb10b",
        "long-context",
        "olmo2-1b-stage2",
        "smollm2-135m",
        "smoltalk",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_says_where_it_is_from_and_what_counts_as_reproduced(path: Path) -> None:
    text = path.read_text()
    head = text[: re.search(r"^\w", text, re.MULTILINE).start()]  # type: ignore[union-attr]
    assert all(f"\n# {word}" in head for word in ("Cluster: ", "Published", "Reproduced: "))
    config = load(path)
    if counted := re.search(r"([\d,]+) parameters", head):
        spec = decoder_spec(config.model, 1, config.max_positions)
        assert f"{num_parameters(spec):,}" == counted[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_layout(path: Path) -> None:
    config = load(path)
    assert config.slurm.processes_per_node is not None
    layout = check_layout(config, config.slurm.nodes * config.slurm.processes_per_node)
    assert not layout_warnings(config, layout)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_fits_its_cluster(path: Path) -> None:
    config = load(path)
    device = DEVICES["a100" if "--device a100" in path.read_text() else "h100"]
    assert config.slurm.processes_per_node is not None
    assert plan(config, device, config.slurm.nodes * config.slurm.processes_per_node).fits


def tiny_form(root: Path, recipe: str, name: str | None = None, **changes: Any) -> Config:
    """A recipe with a tiny model, tiny sources of its own, and few steps; all else is the recipe's."""
    whole = load(packaged_configs() / f"{recipe}.yaml")
    sources = [source.model_dump(exclude_unset=True) for source in whole.data.sources]
    for source in sources:
        source.pop("max_epochs", None)
        if "chat" in source:
            source |= {"type": "jsonl", "paths": [str(write_talks(root))]}
            source["chat"] |= {"template": str(root / "chatml.jinja"), "max_tokens": 64}
        else:
            source |= {"type": "text", "paths": [f"{tiny.write_corpus(root / source['name'])}/*.txt"]}
    name = name or Path(recipe).name
    values: dict[str, Any] = {
        "include": f"{recipe}.yaml",
        "run": {"dir": str(root / name), "seed": whole.run.seed},
        "launch": {"threads": 1},
        "data": {
            "dir": str(root / "data"),
            "sources": sources,
            "splits": {"heldout": 0.2},
            "preprocess": {"workers": 1, "engine": "tokenizers"},
        },
        "tokenizer": {"path": None, "train": {"vocab_size": 300}},
        "model": MODEL,
        "parallel": {"cp": 1},
        "train": {
            "sequence_length": 32,
            "batch_size": 4,
            "micro_batch_size": 2,
            "duration": "8 steps",
            "schedule": {"warmup": "2 steps"},
            "validation": {"every_steps": 4, "samples": 4},
            "checkpoint": {"every_steps": 2, "keep": 10, "keep_every": None, "every_minutes": None},
            "metrics": {"tensorboard": False},
        },
    }
    for section, keys in changes.items():
        values[section] = values.get(section, {}) | keys
    if values["tokenizer"]["path"]:
        del values["tokenizer"]["train"]
    file = root / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values))
    return load(file)


PLACES = {"boat": "under the old tower", "keeper": "north of the harbour", "light": "before the storm"}


def write_talks(root: Path) -> Path:
    """Conversations with a few answers, and the template of docs/after-pretraining.md."""
    page = (Path(__file__).parents[2] / "docs" / "after-pretraining.md").read_text()
    template = re.search(r"```jinja\n(.*?)```", page, re.DOTALL)
    assert template is not None
    (root / "chatml.jinja").write_text(template[1])
    chance = random.Random(3)
    lines = []
    for number in range(200):
        name = chance.choice(list(PLACES))
        opening = " ".join(chance.choices(("now", "then", "sea", "wind"), k=3))
        question = {"role": "user", "content": f"{opening} where is the {name}"}
        lines.append({"id": number, "messages": [question, {"role": "assistant", "content": PLACES[name]}]})
    (root / "talks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return root / "talks.jsonl"


def rates(config: Config) -> list[float]:
    """The learning rate of each step."""
    return [row["lr"] for row in read_metrics(config.run.dir) if "lr" in row]


@pytest.mark.slow
def test_gpt2_ends_with_a_learning_rate_of_zero(tmp_path: Path) -> None:
    config = tiny_form(tmp_path, "recipes/gpt2-124m-fineweb10b")
    run(config)
    assert rates(config)[1] == 6e-4 and rates(config)[-1] < 1e-4


@pytest.mark.slow
def test_three_second_stages_of_one_model_are_averaged(tmp_path: Path) -> None:
    first = tiny_form(tmp_path, "models/olmo2-1b")
    run(first)
    seconds = []
    for seed in (42, 666):
        start = {"init_from": {"path": str(first.run.dir)}}
        tokenizer = {"path": str(first.data_dir / "tokenizer")}
        run_file: dict[str, Any] = {"run": {"dir": str(tmp_path / str(seed)), "seed": seed}, "train": start}
        seconds.append(tiny_form(tmp_path, "recipes/olmo2-1b-stage2", str(seed), **run_file, tokenizer=tokenizer))
        run(seconds[-1])
    one, other = (Checkpoints.of_run(each.run.dir) for each in seconds)
    average(one, tmp_path / "soup", others=[other], steps=None, last=1, weights="model", max_shard=None, console=QUIET)
    assert rates(seconds[0])[0] == pytest.approx(7.4487e-5 / 2)


@pytest.mark.slow
def test_branches_of_an_annealing_study_share_their_past(tmp_path: Path) -> None:
    parent = tiny_form(tmp_path, "recipes/smollm2-135m", train={"schedule": {"warmup": "2 steps", "decay": "2 steps"}})
    run(parent)
    losses = []
    for source in ("code", "math"):
        name = f"anneal-{source}"
        phases = [{"until": "4 steps"}, {"weights": {"edu": 0.35, "dclm": 0.35, source: 0.3}}]
        schedule = {"duration": "8 steps", "schedule": {"warmup": "2 steps", "decay": "4 steps"}}
        config = tiny_form(tmp_path, "recipes/annealing", name, blend={"phases": phases}, train=schedule)
        fork(parent.run.dir, 4, config, QUIET)
        run(config)
        assert rates(config)[-1] < rates(config)[0]
        losses.append([row["loss"] for row in read_metrics(config.run.dir) if "loss" in row])
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_a_published_model_is_trained_on(tmp_path: Path) -> None:
    first = tiny_form(tmp_path, "models/llama3-8b")
    run(first)
    to_hf(first.run.dir, tmp_path / "hf", console=QUIET)
    start: dict[str, Any] = {
        "train": {"init_from": {"hf": str(tmp_path / "hf")}},
        "tokenizer": {"path": str(tmp_path / "hf")},
    }
    config = tiny_form(tmp_path, "recipes/continued-pretraining", **start)
    run(config)
    losses = [[row["loss"] for row in read_metrics(each.run.dir) if "loss" in row] for each in (first, config)]
    assert losses[1][0] < losses[0][0]


@pytest.mark.slow
def test_windows_grow_in_phases(tmp_path: Path) -> None:
    first = tiny_form(tmp_path, "models/llama3-8b")
    run(first)
    phases = [
        {"until": "4 steps", "slices": {"books": [0, 0.6]}},
        {"sequence_length": 128, "batch_size": 1, "micro_batch_size": 1, "slices": {"books": [0.6, 1]}},
    ]
    start: dict[str, Any] = {"train": {"init_from": {"path": str(first.run.dir)}}, "blend": {"phases": phases}}
    config = tiny_form(tmp_path, "recipes/long-context", tokenizer={"path": str(first.data_dir / "tokenizer")}, **start)
    run(config)
    assert len(rates(config)) == 8


@pytest.mark.slow
def test_a_base_model_learns_to_answer(tmp_path: Path) -> None:
    marks = ["<|im_start|>", "<|im_end|>"]
    first = tiny_form(tmp_path, "recipes/smollm2-135m", train={"schedule": {"warmup": "2 steps", "decay": "2 steps"}})
    run(first)
    to_hf(first.run.dir, tmp_path / "hf", console=QUIET)
    config = tiny_form(
        tmp_path,
        "recipes/smoltalk",
        tokenizer={"path": str(tmp_path / "hf"), "special_tokens": [], "add_tokens": marks},
        model={**MODEL, "document_attention": True},
        train={
            "init_from": {"hf": str(tmp_path / "hf")},
            "sequence_length": 64,
            "duration": "4 epochs",
            "optimizer": {"lr": 1e-2},
        },
        data={"dir": str(tmp_path / "chats")},
    )
    run(config)

    def answers(of: Config, **options: Any) -> list[str]:
        loaded = load_decoder(of, None)
        chat = chat_prompts(loaded.source.path, loaded.tokenizer, **options)
        assert chat is not None
        asked = [chat.encode([{"role": "user", "content": f"now sea wind where is the {name}"}]) for name in PLACES]
        sampling = Sampling(max_tokens=24, temperature=0, end_tokens=chat.end_tokens)
        return [each.text for each in generate(loaded.model, loaded.tokenizer, asked, sampling)]

    assert answers(config) == list(PLACES.values())
    assert not set(answers(first, file=tmp_path / "chatml.jinja")) & set(PLACES.values())
