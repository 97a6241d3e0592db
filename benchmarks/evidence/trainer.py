"""`Trainer` of transformers on the shape of a run file, as users start it: bf16 by autocast, fused AdamW."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_gpu_peer import draw_all
from train_gpu_steps import forget_peak, micro_batches, peak_memory, place_of, product_rate, speeds

from pipeline.config import Config
from pipeline.train.huggingface.configs import to_hf_config
from pipeline.train.parallel.parallelize import COMPUTE_DTYPE


def trainer_steps(config: Config, work: Path, steps: int, warmup: int) -> dict[str, Any]:
    """Time `Trainer.train`; the same keys as `train_gpu_steps.measure`.

    Its micro-batches have one window, as all logits of a micro-batch are in memory at once; a step has as many tokens.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    place = place_of(config)
    train, device = config.train, place.setup.device
    product = [product_rate(device, COMPUTE_DTYPE[train.precision.compute])]
    family, values = to_hf_config(config.model, place.setup.spec.vocab_size, train.sequence_length)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**values), attn_implementation="sdpa", dtype=torch.float32
        )
    draw_all(model, family, place)
    windows = [
        {"input_ids": tokens, "labels": tokens, "shift_labels": targets}
        for number in range(warmup + steps)
        for batch in micro_batches(place, number)
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True)
    ]
    ends: list[float] = []
    losses: list[Tensor] = []

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            if len(ends) == warmup:
                forget_peak(device)

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(windows)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.detach())
            return loss

    optimizer = train.optimizer
    arguments = TrainingArguments(
        output_dir=str(work / "trainer"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=place.shape.batch_size,
        max_steps=warmup + steps,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_norm,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=train.precision.compute == "bf16",
        use_cpu=device.type == "cpu",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    begin = time.perf_counter()
    InOrder(model=model, args=arguments, train_dataset=windows, callbacks=[Steps()]).train()
    peak, reserved = peak_memory(device)
    del model
    product.append(product_rate(device, COMPUTE_DTYPE[train.precision.compute]))
    seconds = [after - before for before, after in zip(ends[warmup - 1 :], ends[warmup:], strict=False)]
    return {
        **speeds(place, seconds, product),
        "micro_batch_tokens": train.sequence_length,
        "first_step_s": round(ends[0] - begin, 2),
        "product_tflops": [round(rate / 1e12, 3) for rate in product],
        "peak_gb": peak,
        "reserved_gb": reserved,
        "losses": _by_step(losses, place.shape.batch_size),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    }


def _by_step(losses: list[Tensor], per_step: int) -> list[float]:
    """Loss of each step: `training_step` returns what each micro-batch adds to it."""
    values = torch.stack(losses).float().cpu().view(-1, per_step)
    return [round(value, 6) for value in values.sum(dim=1).tolist()]
