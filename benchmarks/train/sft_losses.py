"""Losses of fine-tuning beside those of TRL's SFTTrainer: the same weights, conversations, masks and steps.

Trains a step for weights to start from, writes them as a folder of transformers, and trains from there twice: with
`pipeline train` on packs, and with `SFTTrainer` (`padding_free`) on the conversations of the same packs, each step one
row. Both in fp32 with AdamW without weight decay, clipping or warm-up. A JSON line for each step:

    ours, trl          loss, nats per trained target
    difference         absolute

and one with the largest difference. The run file needs datasets of conversations that are preprocessed, and packs.
`trl` is in no extra: install it in an environment of its own, `pip install trl`.

Run it as `python benchmarks/train/sft_losses.py RUN.yaml --scratch DIR --steps 20`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.datasets.open import open_datasets
from pipeline.data.loading.loader import open_loader
from pipeline.train.huggingface import convert
from pipeline.train.loop import trainer
from pipeline.train.run.folder import read_metrics

_SAME = (
    "train.precision={compute: fp32}",
    "train.schedule={type: constant, warmup: 0 steps}",
    "train.validation.samples=0",
    "train.loss={}",
    "model.mtp=null",
)
_ADAMW = "train.optimizer={lr: LR, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0, clip_norm: null}"


def rows_of(config: Config, steps: int) -> list[dict[str, Any]]:
    """The conversations of each step, one after the other: ids, labels, and their lengths."""
    datasets = open_datasets(config, "train")
    loader, rows = open_loader(config, datasets), []
    for step in range(steps):
        row: dict[str, list[int]] = {"input_ids": [], "labels": [], "seq_lengths": []}
        for sample in loader.describe(step):
            dataset = datasets[sample["source"]]
            for span in sample["spans"]:
                ids = dataset.read(dataset.document_start(span["document"]), span["length"]).astype(np.int64)
                mask = dataset.mask(span["document"])
                row["input_ids"] += ids.tolist()
                row["labels"] += np.where(mask == 1, ids, -100).tolist()
                row["seq_lengths"].append(span["length"])
        rows.append(row)
    return rows


def trl_losses(folder: Path, rows: list[dict[str, Any]], lr: float, scratch: Path) -> list[float]:
    """Loss of each step by SFTTrainer."""
    import datasets
    import torch
    import transformers
    import trl

    settings = trl.SFTConfig(
        output_dir=str(scratch),
        per_device_train_batch_size=1,
        max_steps=len(rows),
        learning_rate=lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        padding_free=True,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    training = trl.SFTTrainer(
        model, args=settings, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    losses: list[float] = []
    step = training.compute_loss

    def compute_loss(*arguments: Any, **keys: Any) -> Any:  # logs round to four digits
        found = step(*arguments, **keys)
        losses.append((found[0] if isinstance(found, tuple) else found).item())
        return found

    training.compute_loss = compute_loss
    training.train()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    given = parser.parse_args()
    shutil.rmtree(given.scratch, ignore_errors=True)
    quiet, adamw = Console(quiet=True), _ADAMW.replace("LR", str(given.lr))
    seed, ours, folder = (given.scratch / name for name in ("seed", "ours", "hf"))
    data = f"data.dir={load(given.run).data_dir}"

    def config_of(run: Path, steps: int, *more: str) -> Config:
        return load(given.run, [f"run.dir={run}", data, f"train.duration={steps} steps", *_SAME, adamw, *more])

    trainer.train(config_of(seed, 1), quiet)
    convert.to_hf(seed, folder, console=quiet)
    config = config_of(ours, given.steps, f"train.init_from={{path: {seed}}}")
    trainer.train(config, quiet)
    mine = [row["loss"] for row in read_metrics(ours)]
    theirs = trl_losses(folder, rows_of(config, given.steps), given.lr, given.scratch / "trl")
    differences = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    for number, row in enumerate(zip(mine, theirs, differences, strict=True), 1):
        print(json.dumps({"step": number, **dict(zip(("ours", "trl", "difference"), row, strict=True))}))
    print(json.dumps({"steps": given.steps, "largest_difference": max(differences)}))


if __name__ == "__main__":
    main()
