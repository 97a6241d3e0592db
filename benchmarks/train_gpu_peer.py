"""What `train_gpu.py` compares with: transformers' model of the same shape in a bare loop, on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_gpu_steps import Build, Place, Step, draw

from pipeline.common.errors import UserError
from pipeline.data.loading.batch import Batch
from pipeline.train.host.host_copy import HostCopy
from pipeline.train.huggingface.configs import to_hf_config
from pipeline.train.huggingface.family import Family
from pipeline.train.huggingface.tensors import map_tensors
from pipeline.train.parallel.compile import check_compiler, compiles


def peer(kind: str) -> Build:
    """A loop with the same weights, batches, optimizer and number formats as ours.

    Args:
        kind: `autocast`: fp32 weights under torch.autocast, attention by torch. Otherwise what transformers calls
            attention's kernel: the model has bf16 weights, beside which the loop keeps fp32 ones and adds gradients up
            in fp32. With `train.precision.compute: fp32`, fp32 alone.
    """

    def build(place: Place, steps: list[list[Batch]]) -> tuple[Step, dict[str, Any]]:
        from transformers import AutoConfig, AutoModelForCausalLM

        config, train, device = place.config, place.config.train, place.setup.device
        if place.setup.mesh.layout.world_size > 1:
            raise UserError("the peer runs on one device; measure it with --processes 1")
        if compiles(config, device):
            check_compiler(device)
        family, values = to_hf_config(config.model, place.setup.spec.vocab_size, train.sequence_length)
        if family.model_type == "gpt2":
            raise UserError("the peer is made for models like Llama; measure without it: --peer and nothing behind it")
        attention = "sdpa" if kind == "autocast" else kind
        in_bf16 = train.precision.compute == "bf16"
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**values), attn_implementation=attention, dtype=torch.float32
            )
        draw_all(model, family, place)
        parameters: list[Tensor] = list(model.parameters())
        copies = in_bf16 and kind != "autocast"
        masters = _with_masters(model) if copies else parameters
        optimizer = torch.optim.AdamW(
            [
                {"params": [m for m in masters if m.ndim > 1], "weight_decay": train.optimizer.weight_decay},
                {"params": [m for m in masters if m.ndim == 1], "weight_decay": 0.0},
            ],
            lr=train.optimizer.lr,
            betas=train.optimizer.betas,
            eps=train.optimizer.eps,
            fused=True,
        )
        targets = place.shape.batch_size * place.shape.sequence_length

        def head(hidden: Tensor, wanted: Tensor) -> Tensor:
            logits = model.lm_head(hidden).float()
            return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / targets

        if compiles(config, device):
            # One by one: compiled as a whole, up to torch 2.13 the model makes a mask of all pairs of tokens, which
            # keeps torch from its fastest kernel of attention.
            for module in (*model.model.layers, model.model.norm):
                module.compile(dynamic=False)
            head = torch.compile(head, dynamic=False)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=in_bf16 and not copies)

        def step(number: int) -> Callable[[], float]:
            total = torch.zeros((), device=device)
            for batch in steps[number]:
                there = batch.to(device, non_blocking=True)
                with autocast:
                    hidden = model.model(input_ids=there.tokens, use_cache=False).last_hidden_state
                    loss = head(hidden, there.targets)
                loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(masters, train.optimizer.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if copies:
                with torch.no_grad():
                    for parameter, master in zip(parameters, masters, strict=True):
                        parameter.copy_(master)
            copy = HostCopy([total])

            def loss_of_step() -> float:
                return copy.wait()[0].item()

            return loss_of_step

        return step, {}

    return build


@torch.no_grad()
def draw_all(model: nn.Module, family: Family, place: Place) -> None:
    """The weights that ours has."""
    mapping = map_tensors(family, place.setup.spec)
    for name, parameter in model.named_parameters():
        names = mapping.theirs[name].ours
        sources = {ours: torch.empty(mapping.our_shapes[ours], device=place.setup.device) for ours in names}
        for ours, tensor in sources.items():
            draw(tensor, ours, place.setup.spec, place.config.model.init)
        parameter.copy_(mapping.to_theirs(name, sources))


def _with_masters(model: nn.Module) -> list[Tensor]:
    """Make the parameters bf16; fp32 copies of them, to which their gradients go as soon as they are there."""
    masters = []
    for parameter in model.parameters():
        masters.append(parameter.detach().clone())
        # Not model.to(), which would round the rotary frequencies too.
        parameter.data = parameter.data.bfloat16()
        parameter.register_post_accumulate_grad_hook(partial(_hand_over, masters[-1]))
    return masters


def _hand_over(master: Tensor, parameter: Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad.add_(gradient)
    parameter.grad = None
