"""Triton kernels of a layer for an H200, made without a GPU.

    python -m tests.train.model.gpu_kernels varlen|flex [terms]

A layer's forward and backward pass is traced on tensors without data; inductor lowers it for a device that it is told
of, and Triton compiles what comes out for compute capability 9.0, to machine code that nothing here can run. It is a
process of its own, as nothing in it may ask the driver. With terms the layer has sinks, and soft caps where the kernel
has them. Prints how many kernels there are of which kind, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.utils._triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor.codecache import PyCodeCache
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn.attention import flex_attention
from torch.nn.utils import stateless
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from pipeline.config.model import ModelConfig
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.kernels.attention_mask import Terms
from pipeline.train.model.kernels.flex import Flex
from pipeline.train.model.kernels.packed import Varlen

LENGTH = 512
KERNELS: dict[str, Callable[[], Any]] = {"varlen": Varlen, "flex": Flex}
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    total_memory=143_771 * 2**20,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)


def layer(kernel: str, terms: bool = False) -> tuple[Callable[..., Sequence[Tensor]], list[Tensor]]:
    """The gradients of a layer in bf16, with documents and shared heads, and what they are of; on the meta device."""
    flex_attention._validate_device = lambda *_: None  # type: ignore[attr-defined]  # it knows GPUs by name
    shape = {"layers": 1, "dim": 256, "heads": 4, "kv_heads": 2, "vocab_multiple": 8}
    with torch.device("meta"):
        model = Decoder(decoder_spec(ModelConfig.model_validate(shape), 61, LENGTH)).bfloat16()
    model.kernel = KERNELS[kernel]()
    block: Any = model.layers["0"]
    if terms:
        block.mixer.terms = Terms(block.mixer.terms.scale, 50.0 if kernel == "flex" else None)
        block.mixer.sinks = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16, device="meta"))
    inputs: list[Any] = []

    def seen(x: Tensor, context: Context) -> Any:
        inputs.extend((x.detach(), context))
        return block.compute(x, context)

    block.compiled = seen
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64, device="meta")
    model(tokens, Context(bounds_BS=tokens, starts=torch.tensor([0, 20, 300], dtype=torch.int32)))
    x, context = inputs
    names, parameters = zip(*block.named_parameters(), strict=True)

    def gradients(x: Tensor, *given: Tensor) -> Sequence[Tensor]:
        x.requires_grad_()
        with stateless._reparametrize_module(block, dict(zip(names, given, strict=True))):
            out, _ = block.compute(x, context)
        return torch.autograd.grad(out.float().sum(), (x, *given))

    return gradients, [x, *parameters]


def triton_kernels(function: Callable[..., Any], inputs: list[Tensor]) -> list[str]:
    """Names of the kernels of a traced function, each compiled in its first configuration."""
    graph = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
    inputs = [*_constants_as_inputs(graph), *inputs]
    device = torch.device("cuda", 0)
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    names = []
    with _told_of_a_gpu(), torch.no_grad():
        with mode:
            fakes = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in inputs]
        FakeTensorProp(graph, mode).propagate(*fakes)
        lowering = GraphLowering(graph, fakes)
        context = tracing(TracingContext(mode))
        with V.set_debug_handler(DebugContext()), V.set_graph_handler(lowering), V.set_fake_mode(mode), context:
            lowering.run(*fakes)
            code: Any = lowering.codegen()[0]
        for text in re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", code.value, re.DOTALL):
            found = re.search(r"def (triton_\w+)\(", text)
            assert found
            kernel = getattr(PyCodeCache.load(text), found[1])
            kernel._precompile_config(kernel.configs[0])
            names.append(found[1])
    return names


def _constants_as_inputs(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Tensors that a trace has taken in become its first inputs, so that they can be on another device."""
    first, made = next(iter(graph.graph.nodes)), {}
    tensors = []
    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and isinstance(value := getattr(graph, node.target), Tensor):
            if node.target not in made:
                with graph.graph.inserting_before(first):
                    made[node.target] = graph.graph.placeholder(node.target)
                tensors.append(value)
            node.replace_all_uses_with(made[node.target])
            graph.graph.erase_node(node)
    return tensors


@contextlib.contextmanager
def _told_of_a_gpu() -> Iterator[None]:
    """Whoever asks for a GPU hears of an H200."""
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    driver.set_active(target)
    answers: dict[str, Any] = {
        "get_device_properties": lambda device=None: H200,
        "get_device_capability": lambda device=None: (H200.major, H200.minor),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: None,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            for asked in (CudaInterface, CudaInterface.Worker):
                if hasattr(asked, name):
                    stack.enter_context(mock.patch.object(asked, name, staticmethod(answer)))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        for module in [torch.utils._triton, *sys.modules.values()]:
            if module.__name__.startswith("torch.") and "has_triton" in vars(module):
                stack.enter_context(mock.patch.object(module, "has_triton", lambda: True))
        yield


if __name__ == "__main__":
    kinds = Counter(name.split("_")[1] for name in triton_kernels(*layer(sys.argv[1], terms="terms" in sys.argv)))
    print(json.dumps(kinds))
