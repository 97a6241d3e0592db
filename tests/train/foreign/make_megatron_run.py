"""Runs of Megatron Core on this machine: a checkpoint with its optimizer in the middle, and the losses behind it.

    python -m tests.train.foreign.make_megatron_run OUT '{"kind": "llama", "tp": 2, "sharding": "fully_reshardable"}'

It trains on random tokens up to the checkpoint, and behind it on those of `OUT/tokens.pt`, int64 [steps, samples,
length + 1]. In OUT are then the checkpoint, as `--save` leaves it, and `losses.pt`: loss and norm of the gradient of
each step behind it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.train.foreign.make_megatron import (
    ARGUMENTS,
    ITERATION,
    KINDS,
    OnCpu,
    answer_for_a_cpu,
    make_model,
)

TRAINING: dict[str, Any] = {
    "lr": 1e-2,
    "min_lr": 1e-3,
    "lr_decay_style": "cosine",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "lr_warmup_iters": 4,
    "train_iters": 14,
    "optimizer": "adam",
    "use_distributed_optimizer": True,
    "transformer_impl": "local",
}


class _Stream:
    def wait_stream(self, other: object) -> None:
        pass


def _answer_for_an_optimizer() -> None:
    """What asks for GPUs in training, besides the model."""
    kinds = torch.Tensor.type

    def kind(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kinds(self, *args, **kwargs)
        return f"torch.cuda.{found.rpartition('.')[2]}" if isinstance(found, str) else found

    torch.Tensor.type = kind  # type: ignore[method-assign,assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    torch.cuda.Stream = lambda *args, **kwargs: _Stream()  # type: ignore[assignment,misc]
    torch.cuda.default_stream = lambda *args: _Stream()  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None


def work(rank: int, world: int, out: str, case: dict[str, Any]) -> None:
    """Train, save, and train on."""
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting-run", rank=rank, world_size=world)
    torch.set_num_threads(1)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    tp, pp, dp = (case.get(axis, 1) for axis in ("tp", "pp", "dp"))
    arguments = {**ARGUMENTS, **TRAINING, **KINDS[case["kind"]], **case.get("arguments", {})}
    bf16 = case.get("bf16", False)
    later = torch.load(Path(out) / "tokens.pt")
    _, samples, width = later.shape
    arguments |= {"global_batch_size": samples, "seq_length": width - 1, "bf16": bf16}
    arguments["consumed_train_samples"] = samples * ITERATION
    with OnCpu():
        parallel_state.initialize_model_parallel(tp, pp)
        answer_for_a_cpu()
        _answer_for_an_optimizer()
        init_num_microbatches_calculator(rank, None, samples, 1, dp)
        torch.manual_seed(1)
        model = make_model(arguments, tp, pp, 1, trains=True)
        if bf16:
            model = Float16Module(model.config, model.bfloat16())
        distributed = arguments["use_distributed_optimizer"]
        data_parallel = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=distributed,
            bucket_size=case.get("bucket_size"),
        )
        model = DistributedDataParallel(model.config, data_parallel, model)
        model.config.finalize_model_grads_func = finalize_model_grads
        model.config.grad_scale_func = None
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                bf16=bf16,
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
                use_distributed_optimizer=distributed,
                **{key: arguments[key] for key in ("lr", "min_lr", "weight_decay", "clip_grad")},
                **{key: arguments[key] for key in ("adam_beta1", "adam_beta2", "adam_eps")},
            ),
            [model],
        )
        scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=arguments["lr"],
            min_lr=arguments["min_lr"],
            lr_warmup_steps=arguments["lr_warmup_iters"] * samples,
            lr_decay_steps=arguments["train_iters"] * samples,
            lr_decay_style=arguments["lr_decay_style"],
            start_wd=arguments["weight_decay"],
            end_wd=arguments["weight_decay"],
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        future = torch.triu(torch.ones(width - 1, width - 1, dtype=torch.bool), 1)[None, None]
        mine = parallel_state.get_data_parallel_rank()

        def forward(batches: Any, model: Any) -> Any:
            ids = next(batches)[None]
            losses = model(ids[:, :-1], torch.arange(width - 1)[None], future, labels=ids[:, 1:])
            return losses, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

        def step(tokens: torch.Tensor) -> tuple[float, float]:
            model.zero_grad_buffer()
            optimizer.zero_grad()
            own = tokens[mine::dp]
            found = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(own),
                model=model,
                num_microbatches=len(own),
                seq_length=width - 1,
                micro_batch_size=1,
                forward_only=False,
            )
            _, norm, _ = optimizer.step()
            scheduler.step(samples)
            total = torch.stack([each["loss"] for each in found]).sum() if found else torch.zeros(())
            if tp > 1:
                total = total / tp  # each of its ranks has it
            dist.all_reduce(total)
            return float(total) / samples, float(norm)

        drawn = torch.Generator().manual_seed(7)
        for _ in range(ITERATION):
            step(torch.randint(0, arguments["padded_vocab_size"], (samples, width), generator=drawn))
        metadata = {"distrib_optim_sharding_type": case["sharding"]} if distributed else {}
        sharded = (model.module.module if bf16 else model.module).sharded_state_dict(metadata=metadata)
        state = {
            "model": sharded,
            "args": Namespace(**arguments),
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            "optimizer": optimizer.sharded_state_dict(sharded, metadata=metadata),
            "opt_param_scheduler": scheduler.state_dict(),
        }
        folder = Path(out) / f"iter_{ITERATION:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(state, str(folder), content_metadata=metadata)
        dist.barrier()
        torch.save([step(tokens) for tokens in later], Path(out) / f"losses-{rank}.pt")
    if rank == 0:
        (Path(out) / "losses-0.pt").rename(Path(out) / "losses.pt")
        (Path(out) / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    dist.barrier()
    dist.destroy_process_group()


def main(out: str, case: dict[str, Any]) -> None:
    """Make one run."""
    world = case.get("tp", 1) * case.get("pp", 1) * case.get("dp", 1)
    mp.spawn(partial(work), (world, out, case), nprocs=world)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
