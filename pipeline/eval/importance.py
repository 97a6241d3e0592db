"""`pipeline eval --importance`: what each channel, head, mlp channel, expert and layer does on held-out text.

All are means over the tokens that count (Muralidharan et al. 2024, "Compact Language Models via Pruning and Knowledge
Distillation"): of the size of a number at the input of each part and of the head, of the norm of a head's output, of
the size of a number in the hidden layer of an mlp, of the weight that a router gives an expert. A layer's influence is
1 - the cosine similarity of its input and output (Men et al. 2024, "ShortGPT").

Shapes: B samples, S positions that this process has, D width, C columns of a matrix that this process has, T tokens
that count, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from pipeline.common.console import Console, print_table, say, warn
from pipeline.common.errors import UserError
from pipeline.common.problems import Problems
from pipeline.config import Config
from pipeline.data.loading.batch import Batch
from pipeline.data.loading.heldout import HeldOut, sample
from pipeline.eval.checks import IMPORTANCE_CHECKS, EvalScope, checked_engine
from pipeline.eval.engine import GenerationEngine, engine_loss, measuring, open_engine
from pipeline.eval.heldout_data import heldout_splits
from pipeline.eval.reports import benchmark_path, evaluated_by, identity
from pipeline.train.checkpoint.exported import ExportedWeights, WeightsOf, described
from pipeline.train.distributed.process_group import Processes, broadcast_from_rank0
from pipeline.train.model.block import Block
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.parameter_spec import DIM
from pipeline.train.start.importance_file import INFLUENCE, Importance
from pipeline.train.start.setup import ALONE, check_tokenizer

_TOKENS = "tokens"
_LEAST = 1e-30
"""Stands for a mean of 0, which nothing is divided by."""


def preview_importance(config: Config, which: WeightsOf, console: Console) -> None:
    """Print what `measure_importance` would do, and raise what would end it at its start. Writes nothing.

    Args:
        config: of the run.
        which: checkpoint or folder, by default the latest checkpoint.
        console: where to.

    Raises:
        UserError: there are problems; the message lists all of them.
    """
    found, step = Problems(), None if isinstance(which, Path) else which
    scope = EvalScope(config, config.eval.processes, step, finds_checkpoint=not isinstance(which, Path))
    found.look(IMPORTANCE_CHECKS, scope)
    if isinstance(which, Path):
        with found.collecting():
            ExportedWeights.open(which)
    say(console, f"run: {config.run.dir}")
    say(console, f"eval: importance on up to {config.eval.importance_samples:,} windows of split {config.eval.split}")
    found.raise_problems()
    say(console, "no problem was found; nothing was started and nothing was written (--dry-run)")


def measure_importance(
    config: Config,
    which: WeightsOf = None,
    console: Console | None = None,
    *,
    keep: bool = True,
    ranks: Processes = ALONE,
) -> Path | None:
    """Measure importance, print the layers and write the file. Every process of the evaluation calls this.

    Args:
        config: resolved config.
        which: checkpoint or folder, by default the latest checkpoint.
        console: where to print.
        keep: whether the result is written down.
        ranks: the place of this process among those of the evaluation.

    Returns:
        Path of the file, on rank 0; None if nothing was written.

    Raises:
        UserError: as `pipeline.eval.perplexity.evaluate`, or as `refuse_importance`.
    """
    console = console if console and ranks.rank == 0 else Console(quiet=ranks.rank > 0)
    load = partial(open_engine, config, which, ranks)
    with checked_engine(config, ranks, IMPORTANCE_CHECKS, load) as (engine, beat):
        found = importance(engine, console, beat)
    if ranks.rank:
        return None
    assert engine.source is not None
    of = described(engine.source, config.eval.weights)
    print_table(console, _table(found.values[INFLUENCE].tolist(), of))
    if not keep:
        warn(console, f"{config.run.dir} cannot be written to; the result is not kept")
        return None
    path = benchmark_path(config, evaluated_by(engine.source), "importance").with_suffix(".safetensors")
    found.save(path)
    say(console, f"written to {path}: name it as train.init_from.dims of a smaller model")
    return path


def importance(engine: GenerationEngine, console: Console, beat: Callable[[], None] = lambda: None) -> Importance:
    """Importance of all that can be pruned in an engine's model. Every rank calls this, and gets the same.

    Args:
        engine: with weights that are kept.
        console: for a progress bar.
        beat: called after each batch.

    Raises:
        UserError: nothing is held out, or it has another tokenizer.
    """
    config, source = engine.config, engine.source
    assert source is not None
    splits = heldout_splits(config)
    if not splits:
        raise UserError(f"--importance needs text: no source has the split {config.eval.split}; name one as eval.split")
    broadcast_from_rank0(
        lambda: check_tokenizer({name: each.dataset for name, each in splits.items()}, engine.tokenizer)
    )
    sums = _Sums(engine)
    try:
        tokens = _read(engine, splits, sums, console, beat)
    finally:
        sums.end()
    about = {
        **identity(config, source),
        "step": source.step,
        "split": config.eval.split,
        "data": {name: split.dataset.fingerprint for name, split in splits.items()},
        "samples": config.eval.importance_samples,
        "tokens": tokens,
    }
    return Importance(about, sums.values())


def _read(
    engine: GenerationEngine, splits: dict[str, HeldOut], sums: _Sums, console: Console, beat: Callable[[], None]
) -> int:
    """Read the windows; returns the tokens that count."""
    config, tokens = engine.config, 0
    for name, windows in sample(splits, config.eval.importance_samples).items():
        with measuring(engine, console, f"importance: {name}", len(windows), beat) as done:
            loss = engine_loss(engine, splits[name], windows, config.eval.batch_size, done, sums.begin)
        tokens += loss.targets
    return tokens


class _Sums:
    """Sums over the tokens that count, of what hooks see in the passes of a model without a pipeline.

    What all ranks of tp have alike is counted on one of them; of heads, mlp channels and tokens of a share each counts
    its own.
    """

    def __init__(self, engine: GenerationEngine) -> None:
        self._model, mesh = engine.model.whole, engine.setup.mesh
        self._tp, self._rank = mesh.size("tp"), mesh.rank("tp")
        self._stream_is_cut = self._model.stream_shards > 1
        self._counts = mesh.counts_losses
        self._counts_stream = self._counts or self._stream_is_cut
        self._device = engine.setup.device
        self._sums: dict[str, Tensor] = {}
        self._mask_BS = torch.empty(0)
        self._handles: list[Any] = []
        self._add(_TOKENS, 1)
        self._layers = [cast(Block, block) for block in self._model.layers.values()]
        for block in self._layers:
            self._watch(block)
        self._before(self._model.head, f"{DIM}.head", engine.setup.spec.dim, self._of_stream)

    def begin(self, batch: Batch) -> None:
        """Take note of the tokens that count in the pass that comes."""
        self._mask_BS = batch.weight > 0

    def end(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def values(self) -> dict[str, Tensor]:
        """Means over all ranks; of the stream the sum over places, each of which counts the same."""
        names = sorted(self._sums)
        flat = torch.cat([self._sums[name] for name in names])
        dist.all_reduce(flat)
        pieces = torch.split(flat.cpu(), [len(self._sums[name]) for name in names])
        whole = dict(zip(names, pieces, strict=True))
        tokens = whole.pop(_TOKENS).clamp(min=1)
        places = [whole.pop(name) for name in names if name.startswith(f"{DIM}.")]
        found = {name: value / tokens for name, value in whole.items() if not name.startswith(INFLUENCE)}
        found[DIM] = torch.stack([each / each.mean().clamp(min=_LEAST) for each in places]).sum(0)
        layers = [whole[f"{INFLUENCE}.{block.index}"] for block in self._layers]
        # Of a layer that changes nothing, rounding may leave less than 0.
        found[INFLUENCE] = (torch.cat(layers) / tokens).clamp(min=0)
        return found

    def _watch(self, block: Block) -> None:
        """Put hooks on a layer."""
        index = block.index
        self._add(f"{INFLUENCE}.{index}", 1)
        self._handles.append(block.register_forward_hook(self._of_layer))
        for place, part in block.spec.parts.items():
            self._before(block.get_submodule(place), f"{DIM}.{index}.{place}", part.dim, self._of_stream)
            if isinstance(part, AttentionSpec):
                wo = block.get_submodule(f"{place}.wo")
                self._before(wo, f"layers.{index}.heads", part.heads, self._of_heads)
            elif isinstance(part, MlpSpec):
                w2 = block.get_submodule(f"{place}.w2")
                self._before(w2, f"layers.{index}.ffn_dim", part.ffn_dim, self._of_hidden)
            elif isinstance(part, ExpertsSpec):
                self._watch_experts(block, place, part)

    def _watch_experts(self, block: Block, place: str, part: ExpertsSpec) -> None:
        name = f"layers.{block.index}.experts"
        self._add(f"{name}.count", part.router.count)

        def chosen(_module: nn.Module, _inputs: Any, choice: Any) -> None:
            gates_T = choice.gates_TK[self._of_share().flatten()].flatten().double()
            ids_T = choice.ids_TK[self._of_share().flatten()].flatten()
            self._sums[f"{name}.count"].index_add_(0, ids_T, gates_T)

        self._handles.append(block.get_submodule(f"{place}.router").register_forward_hook(chosen))
        if part.shared is not None:
            w2 = block.get_submodule(f"{place}.shared.w2")
            self._before(w2, f"{name}.shared_ffn_dim", part.shared.ffn_dim, self._of_hidden)

    def _add(self, name: str, size: int) -> None:
        self._sums[name] = torch.zeros(size, dtype=torch.float64, device=self._device)

    def _before(self, module: nn.Module, name: str, size: int, add: Callable[[str, Tensor], None]) -> None:
        """A hook on the input of a module, before those that make a DTensor of it."""
        self._add(name, size)

        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            add(name, inputs[0])

        self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def _of_share(self) -> Tensor:
        """The mask of the positions that this rank of tp has, where each has its own."""
        return self._mask_BS if self._tp == 1 else self._mask_BS.chunk(self._tp, dim=1)[self._rank]

    def _of_stream(self, name: str, x_BSD: Tensor) -> None:
        """Sizes of the stream's numbers at the input of a part."""
        if self._counts_stream:
            mask_BS = self._of_share() if self._stream_is_cut else self._mask_BS
            self._sums[name] += x_BSD[mask_BS].abs().sum(0, dtype=torch.float64)

    def _of_heads(self, name: str, x_BSC: Tensor) -> None:
        """Norms of the outputs of this rank's heads."""
        own = self._own(name)
        x_TC = x_BSC[self._mask_BS]
        x_THE = x_TC.view(len(x_TC), len(own), x_TC.shape[1] // len(own))
        own += torch.linalg.vector_norm(x_THE, dim=-1, dtype=torch.float32).sum(0, dtype=torch.float64)

    def _of_hidden(self, name: str, x_BSC: Tensor) -> None:
        """Sizes of the numbers of this rank's channels."""
        own = self._own(name)
        own += x_BSC[self._mask_BS].abs().sum(0, dtype=torch.float64)

    def _own(self, name: str) -> Tensor:
        """The sums of this rank of tp, a view."""
        return self._sums[name].chunk(self._tp)[self._rank]

    def _of_layer(self, block: nn.Module, inputs: tuple[Any, ...], out_BSD: Tensor) -> None:
        """Influence of a layer, and the number of tokens."""
        assert isinstance(block, Block)
        if not self._counts_stream:
            return
        mask_BS = self._of_share() if self._stream_is_cut else self._mask_BS
        similarity_T = F.cosine_similarity(inputs[0][mask_BS].float(), out_BSD[mask_BS].float(), dim=-1)
        self._sums[f"{INFLUENCE}.{block.index}"] += (1 - similarity_T.double()).sum()
        if block is self._layers[0]:
            self._sums[_TOKENS] += mask_BS.sum()


def _table(influence: list[float], of: str) -> Table:
    """Layers by their influence, the least first."""
    order = sorted(range(len(influence)), key=lambda layer: influence[layer])
    table = Table("layer", "influence", "removed as", title=f"influence of the layers{of}, least first")
    for number, layer in enumerate(order, 1):
        table.add_row(str(layer), f"{influence[layer]:.4f}", f"number {number}")
    return table
