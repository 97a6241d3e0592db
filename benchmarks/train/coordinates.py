"""The coordinate check of muP (Yang et al. 2022, appendix D.1): how much each part's output changes in a few steps.

    python benchmarks/train/coordinates.py [--widths 64,128,256,512,1024] [--steps 4] [--kinds mla,experts]

Heads and hidden sizes of mlps grow with the width. Ranks and hidden sizes of experts grow too in one row, and are the
base's in two others, with `init.mup_fixed` and without. A slope is that of log2 of a change over log2 of the width; muP
promises 0.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.init import init_weights, lr_scale
from pipeline.train.model.mlps.dense.spec import DenseKind

VOCAB = 64
BASE = 64
FIXED = {"mla": ["mla.q_rank", "mla.kv_rank"], "experts": ["experts.ffn_dim", "experts.shared_ffn_dim"]}
"""By kind, sizes that need not grow."""
KINDS = ("attention", "mla", *get_args(DenseKind), "experts")


def model(kind: str, width: int, *, fixed: bool = False, init: dict[str, Any] | None = None) -> ModelConfig:
    """Two layers, of which one part is of a kind.

    Args:
        kind: Of a mixer or an mlp.
        width: A multiple of `BASE`.
        fixed: Ranks and hidden sizes of experts are those of the base.
        init: The section.
    """
    rank, heads = 32 if fixed else width // 2, width // 16
    keys: dict[str, Any] = {"mixer": "attention", "mlp": "swiglu", "heads": heads, "ffn_dim": 2 * width}
    if kind == "mla":
        keys["mla"] = {"q_rank": rank, "kv_rank": rank, "nope_dim": 8, "rope_dim": 8, "value_dim": 16}
    if kind == "experts":
        del keys["ffn_dim"]
        keys["experts"] = {"count": 8, "top_k": 2, "ffn_dim": 2 * rank, "shared_ffn_dim": 2 * rank}
    keys["mlp" if kind == "experts" or kind in get_args(DenseKind) else "mixer"] = kind
    return ModelConfig(dim=width, layers=2, vocab_multiple=64, init=init or {}, **keys)


def changes(config: ModelConfig, steps: int, lr: float = 0.01) -> dict[str, float]:
    """Root mean square of how much the output of each product and part changes in some steps of Adam."""
    spec = decoder_spec(config, VOCAB, 0)
    net = Decoder(spec)
    init_weights(net, spec, config.init, seed=1)
    rates = {name: lr * lr_scale(name, spec, config.init) for name, _ in net.named_parameters()}
    optimizer = torch.optim.Adam([{"params": [each], "lr": rates[name]} for name, each in net.named_parameters()])
    tokens = torch.randint(VOCAB, (8, 33), generator=torch.Generator().manual_seed(2))
    before = _outputs(net, tokens)
    for _ in range(steps):
        loss = F.cross_entropy(net(tokens[:, :-1], Context()).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = _outputs(net, tokens)
    return {name: (after[name] - before[name]).square().mean().sqrt().item() for name in before}


@torch.no_grad()
def _outputs(net: Decoder, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _module, _inputs, out: found.setdefault(name, out.detach().clone())

    parts = [(name, each) for name, each in net.named_modules() if name.startswith("layers.") and _written(name, each)]
    hooks = [each.register_forward_hook(keep(name)) for name, each in parts]
    found["logits"] = net(tokens[:, :-1], Context())
    for hook in hooks:
        hook.remove()
    return found


def _written(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or name.endswith((".mixer", ".mlp"))


def slopes(kind: str, widths: Sequence[int], steps: int, **how: Any) -> dict[str, float]:
    """By name of an output in the first layer, or the logits, the slope of its change over the widths."""
    rows = [changes(model(kind, width, **how), steps) for width in widths]
    names = [name for name in rows[0] if not name.startswith("layers.1")]
    across = math.log2(widths[-1] / widths[0])
    return {name: math.log2(rows[-1][name] / rows[0][name]) / across for name in names}


def cases(kinds: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Kind, words and the arguments of `model`."""
    mup: dict[str, Any] = {"scheme": "mup", "mup_base_dim": BASE, "std": 0.1}
    for kind in kinds:
        yield kind, "depth_scaled", {"init": {"std": 0.1}}
        yield kind, "mup", {"init": {**mup, "mup_fixed": [] if kind in FIXED else None}}
        if kind in FIXED:
            yield kind, "mup, sizes fixed, mup_fixed: []", {"fixed": True, "init": {**mup, "mup_fixed": []}}
            yield kind, "mup, sizes fixed, mup_fixed", {"fixed": True, "init": {**mup, "mup_fixed": FIXED[kind]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="64,128,256,512,1024")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    widths = [int(each) for each in args.widths.split(",")]
    for kind, words, how in cases(args.kinds.split(",")):
        found = slopes(kind, widths, args.steps, **how)
        row = ", ".join(f"{name.removeprefix('layers.0.')} {slope:+.2f}" for name, slope in found.items())
        print(f"{kind} ({words}): {row}", flush=True)


if __name__ == "__main__":
    main()
