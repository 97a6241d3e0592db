"""Those that `train_cpu.py` compares with, each in a process of its own that makes a step when it is told to.

Nothing of this package is imported, so that a Python with litgpt or transformers alone can run it. All start from the
same weights (in the names of transformers' Llama) and train on the same batches with the same optimizer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

LR, BETAS, EPS, DECAY, CLIP = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
"""Of AdamW; matrices decay and norms do not; the rate is constant."""


class Gate:
    """Lets a step begin when the driver says so, and tells it how long the step took."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._out = sys.stdout
        sys.stdout = sys.stderr  # whatever else is printed

    def step_ended(self, loss: float | None = None) -> None:
        """Tell of the step that has ended, if one has, and wait for the next; the process ends when there is none."""
        said = {"ready": True} if self._start is None else {"seconds": time.perf_counter() - self._start, "loss": loss}
        print(json.dumps(said), file=self._out, flush=True)
        if not sys.stdin.readline():
            sys.exit(0)
        self._start = time.perf_counter()


# --- a bare loop ---


class Layer(nn.Module):
    """Attention and SwiGLU under the names of transformers."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        dim, ffn, self.heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
        self.input_layernorm = nn.RMSNorm(dim, shape["rms_norm_eps"])
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(dim, dim, bias=False) for name in "qkvo"})
        self.post_attention_layernorm = nn.RMSNorm(dim, shape["rms_norm_eps"])
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(dim, ffn, bias=False),
                "up_proj": nn.Linear(dim, ffn, bias=False),
                "down_proj": nn.Linear(ffn, dim, bias=False),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.input_layernorm(x)
        q, k, v = (self.self_attn[f"{name}_proj"](h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in "qkv")
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.self_attn["o_proj"](out.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, computed in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Llama(nn.Module):
    """The model, in as few lines as it takes."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        dim = shape["hidden_size"]
        self.embed_tokens = nn.Embedding(shape["vocab_size"], dim)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape["num_hidden_layers"]))
        self.norm = nn.RMSNorm(dim, shape["rms_norm_eps"])
        self.lm_head = nn.Linear(dim, shape["vocab_size"], bias=False)
        half = dim // shape["num_attention_heads"] // 2
        frequency = shape["rope_theta"] ** -(torch.arange(half) / half)
        angle = torch.arange(shape["max_position_embeddings"])[:, None] * frequency
        self.rope = angle.cos(), angle.sin()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, *self.rope)
        logits: Tensor = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train_bare(options: argparse.Namespace, shape: dict[str, Any], weights: dict[str, Tensor], gate: Gate) -> None:
    """fp32 master weights; forward and backward in fp32 or with a bf16 copy of them."""
    model = Llama(shape)
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    if options.fsdp:
        shard(model, options.dtype)
        masters = list(model.parameters())
    else:
        masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        if options.dtype == "bf16":
            model.bfloat16()
    if options.compile:
        for layer in model.layers:
            layer.compile(fullgraph=True)
    copies = [p.detach() for p in model.parameters()]
    optimizer = torch.optim.AdamW(groups(masters), lr=LR, betas=BETAS, eps=EPS, fused=True)
    gate.step_ended()
    for batch in read_batches(options):
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        if not options.fsdp:
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        if not options.fsdp:
            with torch.no_grad():
                torch._foreach_copy_(copies, masters)
        gate.step_ended(loss.item())


def shard(model: Llama, dtype: str) -> None:
    """`fully_shard` over one process: what it costs where nothing is sharded."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, reduce_dtype=torch.float32
    )
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices decay."""
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


# --- transformers ---


def train_transformers(options: argparse.Namespace, shape: dict[str, Any], folder: Path, gate: Gate) -> None:
    """`Trainer` with `LlamaForCausalLM`; what it would log, save and evaluate is left out."""
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batches = list(read_batches(options))
    windows = [
        {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]} for batch in batches for row in batch
    ]

    class Steps(TrainerCallback):  # type: ignore[misc]
        loss: float | None = None

        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate.step_ended(self.loss)

    steps = Steps()

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(windows)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            steps.loss = loss.item()
            return loss

    arguments = TrainingArguments(
        output_dir=str(options.work / "transformers"),
        per_device_train_batch_size=options.batch,
        max_steps=len(batches),
        learning_rate=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=options.dtype == "bf16",
        use_cpu=True,
        torch_compile=options.compile,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=windows, callbacks=[steps])
    gate.step_ended()
    trainer.train()


# --- litgpt ---


def train_litgpt(options: argparse.Namespace, shape: dict[str, Any], weights: dict[str, Tensor], gate: Gate) -> None:
    """`litgpt.pretrain`'s own loop over Lightning Fabric, which always compiles."""
    import lightning
    import litgpt.pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        name="llama",
        block_size=shape["max_position_embeddings"],
        vocab_size=shape["vocab_size"],
        padded_vocab_size=shape["vocab_size"],
        n_layer=shape["num_hidden_layers"],
        n_embd=shape["hidden_size"],
        n_head=shape["num_attention_heads"],
        n_query_groups=shape["num_attention_heads"],
        rotary_percentage=1.0,
        rope_base=int(shape["rope_theta"]),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=shape["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
        intermediate_size=shape["intermediate_size"],
    )
    fabric = lightning.Fabric(
        accelerator="cpu", devices=1, precision="bf16-mixed" if options.dtype == "bf16" else "32-true"
    )
    model = GPT(config)
    model.load_state_dict(dict(litgpt_names(weights, config.n_layer)))
    model.max_seq_length = options.length
    prepared = fabric.setup(torch.compile(model) if options.compile else model)
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(groups(list(model.parameters())), lr=LR, betas=BETAS, eps=EPS, fused=True)
    )
    losses: list[float] = []
    original = litgpt.pretrain.chunked_cross_entropy

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = original(*args, **kwargs)
        losses.append(loss.item() if loss.device.type == "cpu" else 0.0)
        return loss

    litgpt.pretrain.chunked_cross_entropy = noted
    litgpt.pretrain.validate = lambda *_, **__: torch.zeros(())

    class Windows(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            for batch in read_batches(options):
                gate.step_ended(losses[-1] if losses else None)
                yield batch

    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(Windows(), batch_size=None))
    steps = 10**6
    train = TrainArgs(
        global_batch_size=options.batch,
        micro_batch_size=options.batch,
        lr_warmup_steps=0,
        max_tokens=steps * options.batch * options.length,
        max_norm=CLIP,
        min_lr=LR,
        save_interval=None,
    )
    state = {"model": prepared, "optimizer": optimizer, "iter_num": 0, "step_count": 0}
    folder = options.work / "litgpt"
    litgpt.pretrain.fit(
        fabric, 1, state, loader, None, folder, None, train, EvalArgs(interval=10**9, final_validation=False)
    )


def litgpt_names(weights: dict[str, Tensor], layers: int) -> Iterator[tuple[str, Tensor]]:
    """The weights under litgpt's names, with queries, keys and values as one matrix."""
    yield "lm_head.weight", weights["lm_head.weight"]
    yield "transformer.wte.weight", weights["model.embed_tokens.weight"]
    yield "transformer.ln_f.weight", weights["model.norm.weight"]
    for index in range(layers):
        ours, theirs = f"model.layers.{index}", f"transformer.h.{index}"
        yield f"{theirs}.norm_1.weight", weights[f"{ours}.input_layernorm.weight"]
        yield f"{theirs}.norm_2.weight", weights[f"{ours}.post_attention_layernorm.weight"]
        parts = [weights[f"{ours}.self_attn.{name}_proj.weight"] for name in "qkv"]
        yield f"{theirs}.attn.qkv.weight", torch.cat(parts)
        yield f"{theirs}.attn.proj.weight", weights[f"{ours}.self_attn.o_proj.weight"]
        for name, of in (("fc_1", "gate"), ("fc_2", "up"), ("proj", "down")):
            yield f"{theirs}.mlp.{name}.weight", weights[f"{ours}.mlp.{of}_proj.weight"]


def read_batches(options: argparse.Namespace) -> Iterator[Tensor]:
    """int64 [B, S + 1] for each step, from the beginning."""
    yield from torch.load(options.work / "batches.pt", weights_only=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("who", choices=["bare", "transformers", "litgpt"])
    parser.add_argument("--work", type=Path, required=True, help="folder with batches.pt and model")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--medium", action="store_true", help="set_float32_matmul_precision")
    parser.add_argument("--fsdp", action="store_true", help="bare: fully_shard over one process")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.medium:
        torch.set_float32_matmul_precision("medium")
    folder = options.work / "model"
    shape = json.loads((folder / "config.json").read_text())
    shape["rope_theta"] = shape.get("rope_theta") or shape["rope_parameters"]["rope_theta"]
    gate = Gate()
    if options.who == "transformers":
        train_transformers(options, shape, folder, gate)
        return
    weights = load_file(folder / "model.safetensors")
    train = train_bare if options.who == "bare" else train_litgpt
    train(options, shape, weights, gate)


if __name__ == "__main__":
    main()
