"""A model of Megatron Core in a process of its own, with whose parent it exchanges token ids and logits.

Megatron Core keeps its state in globals and asks for GPUs in a few places, which are answered for a CPU here. The
weights are read without its loader, which unpickles files of the checkpoint; their names and places are those that its
own model asks for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipeline.common.errors import UserError
from pipeline.common.imports import module_command
from pipeline.eval.comparison.head_part import only_positions
from pipeline.train.foreign.distributed import DistributedFiles
from pipeline.train.foreign.megatron import MegatronCheckpoint


class MegatronProcess:
    """A process with a model, for as long as it is open.

    Args:
        folder: of one checkpoint.

    Raises:
        UserError: the process ended, with its last words.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.vocab_size = 0

    def __enter__(self) -> MegatronProcess:
        self._stack = ExitStack()
        self._errors = self._stack.enter_context(tempfile.TemporaryFile())
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [*module_command(__name__), str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        try:
            self.vocab_size = int(self._line())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process.stdin is not None:
            process.stdin.close()  # which ends it
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._stack.close()

    def logits(self, ids_S: Tensor, first: int, last: int) -> Tensor:
        """See `ComputedModel`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([ids_S.tolist(), first, last]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._fail()
        size = int(self._line())
        data = self._process.stdout.read(size)
        if len(data) < size:
            self._fail()
        return torch.from_numpy(np.frombuffer(data, np.float32).copy()).view(last - first, self.vocab_size)

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._fail()
        return line

    def _fail(self) -> NoReturn:
        self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"megatron-core cannot compute {self._folder}: {last or 'its process ended'}")


class _OnCpu(TorchFunctionMode):
    """Tensors are made on the CPU, wherever they are asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), int) or str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _NoRandom:
    """Nothing is drawn: weights are read, and nothing is dropped."""

    def fork(self, *_: Any) -> Any:
        return nullcontext()

    def is_initialized(self) -> bool:
        return True


def _answer_for_a_cpu() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # a name that is missing without Transformer Engine
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    random._CUDA_RNG_STATE_TRACKER = _NoRandom()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def _build(arguments: dict[str, Any]) -> Any:
    """The model that the arguments of a run describe, which `MegatronCheckpoint` has checked."""
    from megatron.core.activations import squared_relu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    get = arguments.get
    heads, gated = arguments["num_attention_heads"], get("swiglu", False)
    experts = get("num_experts", get("num_moe_experts"))
    rectified, activation = get("squared_relu", False), torch.nn.functional.silu if gated else torch.nn.functional.gelu
    window, norm = get("window_size"), arguments["normalization"]
    of_experts = {
        "num_moe_experts": experts,
        "moe_router_topk": get("moe_router_topk", 2),
        "moe_ffn_hidden_size": get("moe_ffn_hidden_size"),
        "moe_router_pre_softmax": get("moe_router_pre_softmax", False),
        "moe_aux_loss_coeff": 0.0,
    }
    config = TransformerConfig(
        num_layers=arguments["num_layers"],
        hidden_size=arguments["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=get("num_query_groups", heads) if get("group_query_attention", False) else heads,
        ffn_hidden_size=get("ffn_hidden_size"),
        kv_channels=get("kv_channels"),
        normalization=norm,
        layernorm_epsilon=get("norm_epsilon", 1e-5),
        layernorm_zero_centered_gamma=get("apply_layernorm_1p", False),
        add_bias_linear=get("add_bias_linear", True),
        add_qkv_bias=get("add_qkv_bias", False),
        qk_layernorm=get("qk_layernorm", False),
        rotary_interleaved=get("rotary_interleaved", False),
        window_size=None if window is None else tuple(window),
        gated_linear_unit=gated,
        activation_func=squared_relu if rectified else activation,
        bias_activation_fusion=not gated and not rectified and get("bias_gelu_fusion", True),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        **(of_experts if experts else {}),
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=get("qk_layernorm", False), normalization=norm
    )
    return GPTModel(
        config,
        spec,
        vocab_size=arguments["padded_vocab_size"],
        max_sequence_length=get("max_position_embeddings") or get("seq_length") or 2048,
        parallel_output=False,
        share_embeddings_and_output_weights=not get("untie_embeddings_and_output_weights", False),
        position_embedding_type=get("position_embedding_type", "learned_absolute"),
        rotary_base=get("rotary_base", 10000),
        rotary_percent=get("rotary_percent", 1.0),
        rope_scaling=get("use_rope_scaling", False),
        rope_scaling_factor=get("rope_scaling_factor", 8.0),
    )


def _load(model: Any, files: DistributedFiles) -> None:
    """Fill a model with the tensors that it asks for by its own names."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def read(wanted: Any) -> Any:
        if isinstance(wanted, dict):
            return {key: read(each) for key, each in wanted.items()}
        if isinstance(wanted, list | tuple):
            return [read(each) for each in wanted]
        if wanted.key not in files.tensors:
            raise UserError(f"{files.folder} has no tensor {wanted.key}, which the model of megatron-core has")
        part = [slice(each, each + 1) if isinstance(each, int) else each for each in wanted.global_slice()]
        return files.read(wanted.key, part).view(wanted.local_shape)

    loaded = {}
    for name, wanted in model.sharded_state_dict().items():
        if isinstance(wanted, ShardedTensor):
            loaded[name] = read(wanted)
        elif isinstance(wanted, ShardedTensorFactory):
            loaded[name] = wanted.merge_fn(read(wanted.build()))
    if lost := sorted({name for name, _ in model.named_parameters()} - loaded.keys()):
        raise UserError(f"{files.folder}: megatron-core's model does not ask for {lost[0]}")
    model.load_state_dict(loaded, strict=False)


def _serve(folder: Path, requests: IO[bytes], answers: IO[bytes]) -> None:
    """In the child: the model's vocabulary, then logits for each request."""
    from megatron.core import parallel_state

    with tempfile.TemporaryDirectory() as meeting, _OnCpu(), torch.inference_mode():
        dist.init_process_group("gloo", init_method=f"file://{meeting}/meeting", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        _answer_for_a_cpu()
        arguments = MegatronCheckpoint(folder).arguments
        model = _build(arguments).eval()
        _load(model, DistributedFiles(folder))
        answers.write(b"%d\n" % arguments["padded_vocab_size"])
        answers.flush()
        for line in requests:
            ids, first, last = json.loads(line)
            count = len(ids)
            future = torch.triu(torch.ones(count, count, dtype=torch.bool), 1)[None, None]
            with only_positions(model.output_layer, first, last, dimension=0):
                found = model(torch.tensor([ids]), torch.arange(count)[None], future)[0]
            data = found.float().numpy().tobytes()
            answers.write(b"%d\n" % len(data) + data)
            answers.flush()
        dist.destroy_process_group()


def _main() -> None:
    # Whatever prints, the parent reads answers alone.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        try:
            _serve(Path(sys.argv[1]), sys.stdin.buffer, answers)
        except UserError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    _main()
