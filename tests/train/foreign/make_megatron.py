"""Checkpoints of Megatron Core, made by itself over some processes on this machine, and the logits that it computes.

    python -m tests.train.foreign.make_megatron OUT '{"kind": "llama", "tp": 2, "pp": 2}'

Megatron Core asks for GPUs in a few places; these are answered for a CPU. What is computed and what is written is its
own. In OUT are `iter_0000010`, as `--save` leaves it, and `logits.pt`: token ids and the logits of one process that
loaded the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.overrides import TorchFunctionMode

VOCAB, LENGTH, ITERATION = 256, 64, 10
SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "kv_channels": 8}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-interleaved": {"rotary_interleaved": True},
    "llama-scaled": {"use_rope_scaling": True, "rope_scaling_factor": 4.0, "rotary_base": 500000},
    "llama-window": {"window_size": (4, 0)},
    "llama-1p": {"apply_layernorm_1p": True},
    "qwen2": {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
    "qwen3": {"qk_layernorm": True, "kv_channels": 16},
    "mixtral": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 40},
    "pre-softmax": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 40, "moe_router_pre_softmax": True},
    "gpt": {
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "num_query_groups": 4,
        "group_query_attention": False,
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": False,
        "bias_gelu_fusion": True,
    },
    "neox": {
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "num_query_groups": 4,
        "rotary_percent": 0.5,
        "bias_gelu_fusion": False,
    },
    "squared-relu": {"swiglu": False, "squared_relu": True},
}
ARGUMENTS: dict[str, Any] = {
    **SHAPE,
    "num_query_groups": 2,
    "group_query_attention": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "apply_layernorm_1p": False,
    "swiglu": True,
    "squared_relu": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "bias_gelu_fusion": False,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "window_size": None,
    "untie_embeddings_and_output_weights": True,
    "max_position_embeddings": LENGTH,
    "seq_length": LENGTH,
    "padded_vocab_size": VOCAB,
    "num_experts": None,
    "moe_router_topk": 2,
    "moe_router_pre_softmax": False,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "multi_latent_attention": False,
    "add_position_embedding": True,
    "lr": 1e-4,
    "consumed_train_samples": 100,
    "iteration": ITERATION,
    "params_dtype": torch.float32,
}


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("device"), int) or str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _NoRandom:
    def fork(self, *args: Any) -> Any:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


def answer_for_a_cpu() -> None:
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    moe_utils.te_general_gemm = None  # a name that is missing without Transformer Engine
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    random._CUDA_RNG_STATE_TRACKER = _NoRandom()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def make_model(arguments: dict[str, Any], tp: int, pp: int, ep: int, *, trains: bool = False) -> Any:
    from megatron.core import parallel_state
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl  # noqa: F401, the approximation by tanh
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    get = arguments.__getitem__
    activation = torch.nn.functional.silu if get("swiglu") else torch.nn.functional.gelu
    experts = get("num_experts")
    of_experts = {
        "num_moe_experts": experts,
        "moe_router_topk": get("moe_router_topk"),
        "moe_ffn_hidden_size": get("moe_ffn_hidden_size"),
        "moe_router_pre_softmax": get("moe_router_pre_softmax"),
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": ep,
    }
    config = TransformerConfig(
        **{key: get(key) for key in SHAPE},
        **{key: get(key) for key in ("normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm")},
        **{key: get(key) for key in ("rotary_interleaved", "window_size", "num_query_groups")},
        **(of_experts if experts else {}),
        layernorm_zero_centered_gamma=get("apply_layernorm_1p"),
        layernorm_epsilon=get("norm_epsilon"),
        gated_linear_unit=get("swiglu"),
        activation_func=squared_relu if get("squared_relu") else activation,
        bias_activation_fusion=get("bias_gelu_fusion"),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.bfloat16 if arguments.get("bf16") else torch.float32,
        bf16=arguments.get("bf16", False),
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=get("qk_layernorm"),
        normalization=get("normalization"),
    )
    return GPTModel(
        config,
        spec,
        vocab_size=get("padded_vocab_size"),
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=trains,
        share_embeddings_and_output_weights=not get("untie_embeddings_and_output_weights"),
        position_embedding_type=get("position_embedding_type"),
        rotary_base=get("rotary_base"),
        rotary_percent=get("rotary_percent"),
        rope_scaling=get("use_rope_scaling"),
        rope_scaling_factor=get("rope_scaling_factor"),
    )


def work(rank: int, world: int, out: str, case: dict[str, Any], compute: bool) -> None:
    """Save a model that is drawn, or load it in one process and compute logits."""
    meeting = f"file://{out}/meeting-{'logits' if compute else 'save'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    from megatron.core import dist_checkpointing, parallel_state

    tp, pp, ep = (1, 1, 1) if compute else (case.get(axis, 1) for axis in ("tp", "pp", "ep"))
    arguments = {**ARGUMENTS, **KINDS[case["kind"]], **case.get("arguments", {})}
    folder = Path(out) / f"iter_{ITERATION:07d}"
    with OnCpu():
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        answer_for_a_cpu()
        torch.manual_seed(1)
        model = make_model(arguments, tp, pp, ep)
        if compute:
            loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
            model.load_state_dict(loaded["model"], strict=False)
            ids = torch.randint(0, 199, (2, 16), generator=torch.Generator().manual_seed(3))
            future = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
            logits = model(ids, torch.arange(16)[None].expand(2, 16), future)
            torch.save((ids, logits.detach()), Path(out) / "logits.pt")
        else:
            generator = torch.Generator().manual_seed(1000 + rank)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            state = {"model": model.sharded_state_dict(), "args": Namespace(**arguments), "checkpoint_version": 3.0}
            folder.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            dist_checkpointing.save(state, str(folder))
    dist.barrier()
    dist.destroy_process_group()


def main(out: str, case: dict[str, Any]) -> None:
    """Make one checkpoint, and its logits."""
    world = case.get("tp", 1) * case.get("pp", 1) * case.get("ep", 1)
    Path(out).mkdir(parents=True, exist_ok=True)
    mp.spawn(work, (world, out, case, False), nprocs=world)
    mp.spawn(work, (1, out, case, True), nprocs=1)
    (Path(out) / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
