"""Names of torch that are not public, of a stage of a pipeline; see `core.py`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward

from pipeline.train.host.trace_spans import span

_HOLDS_BUFFERS = torch.__version__ < "2.15"  # which torch compares as versions
"""True if torch keeps a buffer for each micro-batch, for the whole run; 2.15 makes one when something is received."""


class MicroBatchStage(PipelineStage):
    """A pipeline stage that computes by the number of the micro-batch, and holds buffers only while they are used.

    torch's own keeps a buffer for every micro-batch's input and gradient, for the whole run, until 2.15. What is
    overridden is the same in 2.11, 2.13 and 2.15, except where a version is named.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        index: int,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        example_input: torch.Tensor,
        example_output: torch.Tensor,
        reduction: str,
        tokens: Callable[[int], torch.Tensor],
        compute: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> None:
        """A stage with known shapes.

        Args:
            module: Whose parameters the stage trains, sharded by `fully_shard`.
            index: Of the stage, in the pipeline.
            stages: Of the pipeline.
            device: Where received tensors are put.
            group: Of the pipeline's ranks.
            example_input: Shape and dtype, on the meta device, of what comes in.
            example_output: The same of what goes out.
            reduction: When gradients are added up over shards: `each`, `last`, or `after` as torch does; see `overlap`.
            tokens: Micro-batch -> input of the first stage.
            compute: Micro-batch and input -> output; the loss in the last stage.
        """
        super().__init__(
            module, index, stages, device, input_args=(example_input,), output_args=(example_output,), group=group
        )
        self._reduction = reduction
        self._tokens = tokens
        self._compute = compute
        self._micro_batch = -1

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> torch.Tensor:
        self._micro_batch = fwd_chunk_id
        inputs = (self._tokens(fwd_chunk_id),) if self.is_first else ()
        if not self.is_first and _HOLDS_BUFFERS:
            self._inputs(fwd_chunk_id).buffer.requires_grad_(True)  # 2.11 did so with the buffer that it allocated
        try:
            with span("forward"):
                return cast(torch.Tensor, super().forward_one_chunk(fwd_chunk_id, inputs, {}, False))
        except RuntimeError as error:
            # Wrapped by torch in an error that lists tensors; what went wrong may be a user's to read.
            raise error.__cause__ or error from None
        finally:
            if not self.is_first:
                self._release(self._inputs(fwd_chunk_id))

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self._compute(self._micro_batch, *args)
        # A backward pass of two halves detaches it in place, which a view refuses: that of a norm over tp at the end.
        return output if self.is_last or not output._is_view() else output.clone()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        module = self.submod
        adds_up = self._reduction == "each" or (self._reduction == "last" and last_backward)
        if not adds_up or not isinstance(module, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full", "a schedule whose backward passes have two halves"
        module.set_is_last_backward(False)  # what is under way is waited for when the stage's step is over
        module.set_reshard_after_backward(False)  # until `perform_reduce_grad`, which follows the last pass (2.13)
        module.set_requires_gradient_sync(True)
        module.set_requires_all_reduce(last_backward)
        keys = ("stage_output", "output_grads", "input_values")
        return stage_backward(*(bwd_kwargs[key] for key in keys)), None

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with span("backward"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self._release(self._gradients(bwd_chunk_id))

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with span("backward of weights"):
            super().backward_weight_one_chunk(*args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self._allocate(self._inputs(fwd_chunk_id))
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_last:
            self._allocate(self._gradients(bwd_chunk_id))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Nothing: 2.11 would compare strides, and tokens may be a view."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was inferred; 2.13 would drop the gradients of earlier micro-batches here."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """None: 2.11 would send to its own rank in V-shaped schedules, which gloo never receives."""
        return []

    @contextmanager
    def _on_meta(self) -> Generator[None, None, None]:
        """Buffers that are made inside have no memory."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _inputs(self, micro_batch: int) -> Any:
        (info,) = self.args_recv_info[micro_batch]
        return info

    def _gradients(self, micro_batch: int) -> Any:
        (info,) = self.grad_recv_info[micro_batch]
        return info

    def _allocate(self, info: Any) -> None:
        if _HOLDS_BUFFERS:
            info.buffer = torch.empty_like(info.buffer, device=self.device, requires_grad=False)

    def _release(self, info: Any) -> None:
        if _HOLDS_BUFFERS:
            info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)
