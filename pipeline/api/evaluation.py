"""Evaluation of runs and models, with the figures of `pipeline eval`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipeline.api.model import Model, as_the_command
from pipeline.api.run import Run, WhichStep, changed_config, checkpoint_step
from pipeline.api.settings import Settings
from pipeline.api.sharded import processes
from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.common.paths import StrPath
from pipeline.eval.engine import GenerationEngine, open_engine
from pipeline.eval.perplexity import EvalReport, Figures, evaluate_everything
from pipeline.train.checkpoint.exported import ExportedWeights
from pipeline.train.checkpoint.exported_loading import local_shards, named_weights
from pipeline.train.checkpoint.fingerprint import computing_differences, shown
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.start.setup import ALONE, in_memory


@dataclass(frozen=True)
class EvaluationResult:
    """Figures of an evaluation."""

    heldout: EvalReport
    """Held-out loss: `blended` of all sources of `eval.split` together, `sources` by source, `sets` by set of
    `heldout_sets`; a score has `loss` (nats per token), `perplexity`, `bits_per_byte`, `targets` and `documents`."""
    tasks: dict[str, dict[str, Any]]
    """Figures of each task of `eval.tasks`, by its name."""
    harness: dict[str, Any] | None
    """What lm-evaluation-harness says of `eval.harness`; None where that is not set."""

    @property
    def loss(self) -> float:
        """Held-out loss of all sources together, in nats per token."""
        return self.heldout.blended.loss

    @property
    def perplexity(self) -> float:
        """Exp of the loss."""
        return self.heldout.blended.perplexity


def evaluate(
    what: Model | Run | StrPath,
    step: WhichStep = None,
    *,
    run: Run | StrPath | None = None,
    settings: Settings | None = None,
    keep: bool = False,
) -> EvaluationResult:
    """Held-out loss and benchmarks, the figures of `pipeline eval`.

    In a process of an initialized `torch.distributed` group all of them call this with a run, whose model is laid out
    over them by `eval.parallel` or `parallel`.

    Args:
        what: A run, by its folder or run file; or a model, with the weights that it has in memory now.
        step: Of a run: steps of the checkpoint, `"best"` (the lowest validation loss), or `"latest"` (the default).
        run: Of a model: the run whose data and `eval:` are used; by default its own.
        settings: Values by key that take the place of those in the run file: `{"eval.samples": 100}`.
        keep: Also write the reports to `eval/` in the run folder as `pipeline eval` does; of a run alone.

    Raises:
        UserError: No such checkpoint, nothing held out, a layout that is not possible, or a model that is not that of
            the run.
    """
    if isinstance(what, Model):
        if keep:
            raise UserError("keep: weights in memory have no report in a run folder; leave it out, or evaluate a run")
        if step is not None:
            raise UserError(f"step={step!r} is for runs; a model is evaluated with the weights that it has")
        return _of_model(what, run, settings)
    if run is not None:
        raise UserError("run: the first argument is a run already; leave it out, or give a Model first")
    chosen = what if isinstance(what, Run) else Run(what)
    config = changed_config(chosen, settings)
    number, ranks = checkpoint_step(chosen, step), processes()
    if ranks.world_size > 1:  # the caller has placed its processes
        config = config.model_copy(update={"launch": config.launch.model_copy(update={"bind": "none"})})
    with as_the_command():
        figures = evaluate_everything(
            config, lambda: open_engine(config, number, ranks), Console(quiet=True), keep=keep, ranks=ranks
        )
    return _result(figures)


def _result(figures: Figures) -> EvaluationResult:
    return EvaluationResult(figures.heldout, figures.benchmarks.tasks, figures.benchmarks.harness)


def _of_model(model: Model, run: Run | StrPath | None, settings: Settings | None) -> EvaluationResult:
    """Figures of weights in memory."""
    if processes().world_size > 1:
        raise UserError("a model in memory is evaluated in one process; evaluate a run over several")
    given = model.origin.run if run is None else run
    if given is None:
        raise UserError(f"run: the weights of {model.origin.path} are of no run; name one whose data is to be used")
    config = changed_config(given if isinstance(given, Run) else Run(given), settings)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UserError(f"{model.origin.path} has no tokenizer, so it is not known what the data means to the model")
    saved, now = model.config.model_dump(mode="json"), config.model.model_dump(mode="json")
    if lines := computing_differences(saved, now, model.decoder.spec):
        words = "\n  ".join(f"{name}: {shown(old)} -> {shown(new)}" for name, old, new in lines)
        raise UserError(f"the model is another one than that of the run (model -> run):\n  {words}\nname its own run")
    weights = {name: each.detach() for name, each in model.decoder.state_dict().items()}
    about: dict[str, Any] = {
        "kind": "memory",
        "run": str(model.origin.path),
        "checkpoints": [],
        "weights": "model",
        "tokens": None,
    }
    source = ExportedWeights(model.origin.path, about | {"fingerprints": {}}, _fingerprint(weights))

    @torch.no_grad()
    def fill(parallel: ParallelModel) -> None:
        for name, rows, others, local in local_shards(named_weights(parallel)):
            local.copy_(weights[name][(rows, *others)])

    def load() -> GenerationEngine:
        found = in_memory(config, source, tokenizer, fill)
        return GenerationEngine(config, found.setup, found.model, found.runner, tokenizer, source)

    with as_the_command():
        return _result(evaluate_everything(config, load, Console(quiet=True), keep=False, ranks=ALONE))


def _fingerprint(weights: dict[str, torch.Tensor]) -> str:
    """Hash of weights: results that are kept are of others."""
    import xxhash

    found = xxhash.xxh3_64()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return f"memory-{found.hexdigest()}"
