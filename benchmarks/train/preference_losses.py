"""Losses of training on pairs beside those of TRL's DPOTrainer: the same weights, pairs, masks and steps.

Writes the weights of `train.init_from` (a run of this package) as a folder of transformers. It trains from there twice:
with `pipeline train` on packs, and with `DPOTrainer` on the pairs of the same packs, each step one batch. Both in fp32
with AdamW without weight decay, clipping or warm-up; its eps is 1e-4, since gradients of both answers cancel for many
weights, and a smaller one makes whole steps of the rounding that is left. A JSON line for each step:

    ours, trl          loss per pair
    difference         absolute

and one with the largest difference. The run file needs a dataset of pairs that is preprocessed, packs, and a
`train.init_from.path`. `trl` is in no extra: install it in an environment of its own, `pip install trl`.

Run it as `python benchmarks/train/preference_losses.py RUN.yaml --scratch DIR --steps 20`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pipeline import api
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.datasets.open import open_datasets
from pipeline.train.huggingface import convert
from pipeline.train.loop import trainer
from pipeline.train.run.folder import read_metrics

_SAME = (
    "train.precision={compute: fp32}",
    "train.schedule={type: constant, warmup: 0 steps}",
    "train.validation.samples=0",
    "train.loss={}",
)
_ADAMW = "train.optimizer={lr: LR, betas: [0.9, 0.95], eps: 1e-4, weight_decay: 0, clip_norm: null}"


def rows_of(config: Config, run: Path, steps: int) -> list[list[dict[str, list[int]]]]:
    """The pairs of each step: ids of the prompt, and of both answers."""
    datasets, found = open_datasets(config, "train"), []
    opened = api.Run(run)
    for step in range(1, steps + 1):
        batch, rows = opened.batch(step), []
        for source, spans in zip(batch.sources, batch.documents, strict=True):
            dataset = datasets[source]
            for span in spans:
                start = dataset.document_start(span.document)
                ids = dataset.read(start, dataset.document_start(span.document + 1) - start).astype(np.int64)
                mask = dataset.mask(span.document)
                border = int(np.flatnonzero(mask == 2)[0])
                sides = []
                for own, its in zip(np.split(ids, [border]), np.split(mask, [border]), strict=True):
                    trained = np.flatnonzero(its == 1)
                    sides.append((own[: trained[0]].tolist(), own[trained[0] : trained[-1] + 1].tolist()))
                (prompt, chosen), (_, rejected) = sides
                rows.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
        found.append(rows)
    return found


def trl_losses(folder: Path, steps: list[list[dict[str, Any]]], lr: float, beta: float, scratch: Path) -> list[float]:
    """Loss of each step by DPOTrainer."""
    import datasets
    import torch
    import transformers
    import trl

    settings = trl.DPOConfig(
        output_dir=str(scratch),
        per_device_train_batch_size=1,
        max_steps=len(steps),
        learning_rate=lr,
        beta=beta,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-4,
        max_grad_norm=0.0,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        for _ in range(2)
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    class Trainer(trl.DPOTrainer):  # type: ignore[name-defined,misc]
        """DPOTrainer on pairs that are token ids already, with steps of different sizes."""

        def _prepare_dataset(self, dataset: Any, *arguments: Any, **keys: Any) -> Any:
            return dataset

        def get_train_dataloader(self) -> Any:
            ends = np.cumsum([len(rows) for rows in steps])
            batches = [list(range(end - len(rows), end)) for rows, end in zip(steps, ends.tolist(), strict=True)]
            return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

    rows = datasets.Dataset.from_list([row for step in steps for row in step])
    training = Trainer(models[0], ref_model=models[1], args=settings, train_dataset=rows, processing_class=tokenizer)
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
    ours, folder = (given.scratch / name for name in ("ours", "hf"))
    keys = [f"run.dir={ours}", f"data.dir={load(given.run).data_dir}", f"train.duration={given.steps} steps"]
    keys += [f"train.preference.reference_dir={given.scratch / 'reference'}"]
    config = load(given.run, [*keys, *_SAME, _ADAMW.replace("LR", str(given.lr))])
    assert config.train.init_from is not None and config.train.init_from.path is not None
    assert config.train.preference is not None
    convert.to_hf(config.train.init_from.path, folder, console=Console(quiet=True))
    trainer.train(config, Console(quiet=True))
    mine = [row["preference_loss"] for row in read_metrics(ours) if "preference_loss" in row]
    rows = rows_of(config, ours, given.steps)
    theirs = trl_losses(folder, rows, given.lr, config.train.preference.beta, given.scratch / "trl")
    differences = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    for number, row in enumerate(zip(mine, theirs, differences, strict=True), 1):
        print(json.dumps({"step": number, **dict(zip(("ours", "trl", "difference"), row, strict=True))}))
    print(json.dumps({"steps": given.steps, "largest_difference": max(differences)}))


if __name__ == "__main__":
    main()
