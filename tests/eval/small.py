"""A small trained model, the same one as transformers has it, and files of benchmarks made of its kind of text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.engine import GenerationEngine, open_engine
from pipeline.eval.scoring import Prompt, continue_greedily
from pipeline.eval.tasks.wikitext import read_pages
from pipeline.train.distributed.rank import of_environment
from pipeline.train.huggingface.convert import to_hf
from pipeline.train.loop.trainer import train
from pipeline.train.start.setup import ALONE
from tests import tiny

LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "fsdp2": {"dp_shard": 2}}
"""Of two processes."""
MODEL = {
    "model.qk_norm": False,
    "model.dim": 32,
    "model.heads": 4,
    "model.kv_heads": 2,
    "train.precision": {"compute": "fp32"},
    "train.duration": "12 steps",
    "tokenizer": {"train": {"vocab_size": 280}},  # few: most words are several tokens
}
_WORDS = "the a sea boat wind sails north harbour of under and light old night before storm keeper tower rope".split()


def trained(root: Path, **changes: Any) -> Path:
    """A run file whose run has been trained."""
    file = tiny.write_run(root, MODEL | changes)
    config = load(file)
    preprocess(config)
    train(config)
    return file


def exported(config: Config, to: Path) -> Path:
    """The newest checkpoint as transformers reads it."""
    to_hf(config.run.dir, to, console=Console(quiet=True))
    return to


def engine_alone(file: Path, overrides: Sequence[str] = ()) -> GenerationEngine:
    """The model in this process."""
    return open_engine(load(file, overrides), None, ALONE)


def engine_of_rank(file: Path, layout: str, overrides: Sequence[str] = ()) -> GenerationEngine:
    """The model on one of several processes, which call this together."""
    ranks = of_environment()
    values = [f"eval.processes={ranks.world_size}", f"eval.parallel={json.dumps(LAYOUTS[layout])}", *overrides]
    return open_engine(load(file, values), None, ranks)


def text(chance: random.Random, words: int) -> str:
    """Words as the corpus has them."""
    return " ".join(chance.choices(_WORDS, k=words))


def write_lambada(file: Path, passages: int = 40, engine: GenerationEngine | None = None) -> Path:
    """Passages, some longer than the model reads at once; a third of them ends as the model of `engine` ends it."""
    chance = random.Random(5)
    texts = [text(chance, chance.choice([2, 5, 9, 40])) for _ in range(passages)]
    if engine is not None:
        prompts = [Prompt(engine.tokenizer.encode(each)[-20:], 6) for each in texts[::3]]
        more = continue_greedily(engine, prompts, batch_size=8)
        for place, new in zip(range(0, passages, 3), more, strict=True):
            # Up to the end of the last word that is whole.
            continued = (texts[place] + engine.tokenizer.decode(new)).rpartition(" ")[0].rstrip(" .\n")
            texts[place] = continued if " " in continued else texts[place]
    file.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    return file


def write_wikitext(file: Path) -> Path:
    """Articles with what the corpus' tokenization leaves behind, from a line to several windows long."""
    chance = random.Random(6)
    lines = [" ", f" = {text(chance, 2)} = ", " ", f" {text(chance, 60)} , {text(chance, 9)} @-@ {text(chance, 3)} . "]
    lines += [
        " = = Under = = ",
        f' The " {text(chance, 2)} " ( {text(chance, 2)} ) had 1 @,@ 200 @.@ 5 of it ; N ropes ',
    ]
    lines += [" ", f" = {text(chance, 1)} = ", f" Keeper 's {text(chance, 4)} ! ", " ", f" = {text(chance, 3)} = "]
    file.write_text("\n".join([*lines, f" {text(chance, 150)} . ", ""]))
    return file


def harness_figures(hf: Path, root: Path, folder: Path, names: list[str], *, chat: bool = False) -> dict[str, Any]:
    """What lm-evaluation-harness itself says of an exported model, by task."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    write_tasks(folder / "tasks", root)
    found = simple_evaluate(
        model=HFLM(pretrained=str(hf), device="cpu", batch_size=1, dtype="float32"),
        tasks=names,
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        bootstrap_iters=10,
        log_samples=False,
        apply_chat_template=chat,
    )
    results: dict[str, Any] = found["results"]
    return results


def write_tasks(folder: Path, root: Path) -> Path:
    """The harness's own tasks `lambada_openai` and `wikitext`, reading `root`, one with choices, one that generates."""
    import lm_eval.tasks

    theirs = Path(lm_eval.tasks.__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    lambada, pages = root / "lambada.jsonl", folder / "pages.jsonl"
    if (root / "wiki.txt").exists():
        articles = read_pages(root / "wiki.txt", documents=True)
        pages.write_text("".join(json.dumps({"page": page}) + "\n" for page in articles))
    for name, original, file in (
        ("local_lambada", "lambada/lambada_openai.yaml", lambada),
        ("local_wikitext", "wikitext/wikitext.yaml", pages),
    ):
        data = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": {"test": str(file)}}}
        local = {"include": str(theirs / original), "task": name, "tag": None, "validation_split": None, **data}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(local | {"training_split": None}))
    questions = {
        "task": "local_generate",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(lambada)}},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "sea",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "local_generate.yaml").write_text(yaml.safe_dump(questions))
    choices = {
        "task": "local_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(lambada), "train": str(lambada)}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "fewshot_split": "train",
        "doc_to_text": "{{text}}",
        "doc_to_target": 0,
        "doc_to_choice": ["sea", "a", "harbour", "b"],
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "local_choice.yaml").write_text(yaml.safe_dump(choices))
    return folder
