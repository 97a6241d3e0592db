"""Continue a prompt with a checkpoint."""

from __future__ import annotations

from rich.console import Console

from pipeline.config import Config
from pipeline.console import say
from pipeline.eval.generate import generate
from pipeline.train.setup import load_for_inference


def continue_prompt(config: Config, step: int | None = None, console: Console | None = None) -> str:
    """Print `generate.prompt` and its continuation as it is generated; returns the continuation."""
    console = console or Console()
    setup, model, _, checkpoint = load_for_inference(config, step)
    of = ", moving average" if config.eval.weights == "ema" else ""
    say(console, f"{checkpoint.path.name}{of}:")
    console.print(config.generate.prompt, end="", style="bold", markup=False, highlight=False, soft_wrap=True)
    pieces = []
    for piece in generate(model.whole, setup.tokenizer, config.generate.prompt, config.generate):
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        pieces.append(piece)
    console.print()
    return "".join(pieces)
