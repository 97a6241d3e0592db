"""Losses of fine-tuning beside those of TRL: the same weights, conversations or pairs, masks and steps.

A run file with `train.preference` is compared with `DPOTrainer`, whose loss is per pair, and any other one with
`SFTTrainer` (`padding_free`), whose loss is per trained target. Writes the weights of `train.init_from.path`, a run of
this package, as a folder of transformers; without that key, those that one step from scratch leaves. It trains from
there twice: with `pipeline train` on packs, and with TRL on what the same packs have, each step one batch. Both in fp32
with AdamW without weight decay, clipping or warm-up. The eps of pairs is 1e-4: gradients of both answers cancel for
many weights, and a smaller one makes whole steps of the rounding that is left. A JSON line for each step:

    ours, trl          loss
    difference         absolute

and one with the largest difference. The run file needs datasets that are preprocessed, and packs. `trl` is in no extra:
install it in an environment of its own, `pip install trl`.

Run it as `python benchmarks/train/trl_losses.py RUN.yaml --scratch DIR --steps 20`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from pipeline import api
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.datasets.open import open_datasets
from pipeline.data.tokenization.chat_encoding import SECOND, TRAINED
from pipeline.train.huggingface import convert
from pipeline.train.loop import trainer
from pipeline.train.run.folder import read_metrics

Row = dict[str, list[int]]
_QUIET = Console(quiet=True)
_SAME = (
    "train.precision={compute: fp32}",
    "train.schedule={type: constant, warmup: 0 steps}",
    "train.validation.samples=0",
    "train.loss={}",
    "model.mtp=null",
)


def documents_of(config: Config, run: Path, step: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]:
    """Ids and mask of each document of a step that was trained, pack after pack."""
    datasets, batch = open_datasets(config, "train"), api.Run(run).batch(step)
    for source, spans in zip(batch.sources, batch.documents, strict=True):
        dataset = datasets[source]
        for span in spans:
            start = dataset.document_start(span.document)
            ids = dataset.read(start, dataset.document_start(span.document + 1) - start)
            yield ids.astype(np.int64), dataset.mask(span.document)


def conversations(config: Config, run: Path, steps: int) -> list[list[Row]]:
    """The conversations of each step as one row: ids, labels, and their lengths."""
    found = []
    for step in range(1, steps + 1):
        row: Row = {"input_ids": [], "labels": [], "seq_lengths": []}
        for ids, mask in documents_of(config, run, step):
            row["input_ids"] += ids.tolist()
            row["labels"] += np.where(mask == TRAINED, ids, -100).tolist()
            row["seq_lengths"].append(len(ids))
        found.append([row])
    return found


def pairs(config: Config, run: Path, steps: int) -> list[list[Row]]:
    """The pairs of each step, a row for each: ids of the prompt, and of both answers."""
    found = []
    for step in range(1, steps + 1):
        rows = []
        for ids, mask in documents_of(config, run, step):
            border, sides = int(np.flatnonzero(mask == SECOND)[0]), []
            for own, its in zip(np.split(ids, [border]), np.split(mask, [border]), strict=True):
                trained = np.flatnonzero(its == TRAINED)
                sides.append((own[: trained[0]].tolist(), own[trained[0] : trained[-1] + 1].tolist()))
            (prompt, chosen), (_, rejected) = sides
            rows.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
        found.append(rows)
    return found


def trl_losses(config: Config, folder: Path, steps: list[list[Row]], scratch: Path) -> list[float]:
    """Loss of each step by TRL."""
    import datasets
    import torch
    import transformers
    import trl

    preference, optimizer = config.train.preference, config.train.optimizer
    common: dict[str, Any] = {
        **{"output_dir": str(scratch), "per_device_train_batch_size": 1, "max_steps": len(steps)},
        **{"learning_rate": optimizer.lr, "lr_scheduler_type": "constant", "weight_decay": 0.0},
        **{"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": optimizer.eps, "max_grad_norm": 0.0},
        **{"max_length": None, "gradient_checkpointing": False, "bf16": False, "use_cpu": True},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True},
    }

    def model() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = datasets.Dataset.from_list([row for step in steps for row in step])

    class OnSteps:
        """A trainer on rows that are token ids already, with steps of different sizes."""

        def _prepare_dataset(self, dataset: Any, *arguments: Any, **keys: Any) -> Any:
            return dataset

        def get_train_dataloader(self) -> Any:
            ends = np.cumsum([len(rows) for rows in steps])
            batches = [list(range(end - len(rows), end)) for rows, end in zip(steps, ends.tolist(), strict=True)]
            collate = self.data_collator  # type: ignore[attr-defined]
            return torch.utils.data.DataLoader(rows, batch_sampler=batches, collate_fn=collate)

    given: dict[str, Any] = {"train_dataset": rows, "processing_class": tokenizer}
    training: Any
    if preference is None:
        settings = trl.SFTConfig(padding_free=True, dataset_kwargs={"skip_prepare_dataset": True}, **common)
        training = type("Trainer", (OnSteps, trl.SFTTrainer), {})(model(), args=settings, **given)
    else:
        settings = trl.DPOConfig(beta=preference.beta, **common)
        training = type("Trainer", (OnSteps, trl.DPOTrainer), {})(model(), ref_model=model(), args=settings, **given)
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
    own = load(given.run).train
    eps = 1e-8 if own.preference is None else 1e-4
    adamw = f"{{lr: {given.lr}, betas: [0.9, 0.95], eps: {eps}, weight_decay: 0, clip_norm: null}}"

    def config_of(run: Path, steps: int, *more: str) -> Config:
        keys = [f"run.dir={run}", f"data.dir={load(given.run).data_dir}", f"train.duration={steps} steps", *_SAME]
        return load(given.run, [*keys, f"train.optimizer={adamw}", *more])

    start = None if own.init_from is None else own.init_from.path
    if start is None:
        start = given.scratch / "seed"
        trainer.train(config_of(start, 1), _QUIET)
    convert.to_hf(start, folder, console=_QUIET)
    more = [] if own.preference is None else [f"train.preference.reference_dir={given.scratch / 'reference'}"]
    config = config_of(ours, given.steps, f"train.init_from={{path: {start}}}", *more)
    trainer.train(config, _QUIET)
    name, rows = ("loss", conversations) if own.preference is None else ("preference_loss", pairs)
    mine = [row[name] for row in read_metrics(ours) if name in row]
    theirs = trl_losses(config, folder, rows(config, ours, given.steps), given.scratch / "trl")
    differences = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    for number, row in enumerate(zip(mine, theirs, differences, strict=True), 1):
        print(json.dumps({"step": number, **dict(zip(("ours", "trl", "difference"), row, strict=True))}))
    print(json.dumps({"steps": given.steps, "largest_difference": max(differences)}))


if __name__ == "__main__":
    main()
