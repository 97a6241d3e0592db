"""New tokens a second of `pipeline.eval.generate` and of transformers on the same weights, a JSON line for each size.

    python benchmarks/generate_cache.py --rows 1 8 32

A Llama-like model of random weights in fp32 continues prompts of 20 to 200 tokens greedily, all at once, on one thread;
transformers has them padded on the left. The sides take turns, reading of the prompts included. `ratio` is that of the
medians of wall time, `cpu_ratio` that of CPU time, above 1 where ours is faster; `equal` says whether all texts are.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config.model import ModelConfig
from pipeline.eval.generate import generate
from pipeline.eval.sampling import Sampling
from pipeline.train.model.config import decoder_spec
from pipeline.train.model.decoder import Decoder

VOCABULARY, LAYERS, DIM, HEADS, KV_HEADS, FFN, NEW = 8192, 6, 256, 4, 2, 704, 64
NAMES = {
    "embedding.": "model.embed_tokens.",
    "mixer_norm.": "input_layernorm.",
    "mlp_norm.": "post_attention_layernorm.",
    "mixer.wq.": "self_attn.q_proj.",
    "mixer.wk.": "self_attn.k_proj.",
    "mixer.wv.": "self_attn.v_proj.",
    "mixer.wo.": "self_attn.o_proj.",
    "mlp.w1.": "mlp.gate_proj.",
    "mlp.w3.": "mlp.up_proj.",
    "mlp.w2.": "mlp.down_proj.",
    "head.": "lm_head.",
}


class Numbers:
    """A tokenizer whose texts are lists of numbers."""

    end_of_document = -1

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids."""
        return "".join(f"{token} " for token in ids)


def models() -> tuple[Decoder, LlamaForCausalLM]:
    """Ours and theirs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = LlamaForCausalLM(config).eval()
    shape = {"layers": LAYERS, "dim": DIM, "heads": HEADS, "kv_heads": KV_HEADS, "ffn_dim": FFN}
    ours = Decoder(decoder_spec(ModelConfig.model_validate(shape), VOCABULARY, 0)).eval()
    ours.load_state_dict({name: theirs.get_parameter(_theirs(name)).detach() for name in ours.state_dict()})
    return ours, theirs


def _theirs(name: str) -> str:
    if name == "norm.weight":
        return "model.norm.weight"
    for here, there in NAMES.items():
        name = name.replace(here, there)
    return f"model.{name}" if name.startswith("layers.") else name


def timed(continued: Callable[[], list[list[int]]]) -> tuple[float, float, list[list[int]]]:
    """Wall and CPU seconds, and what came out."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = continued()
    return time.perf_counter() - wall, time.process_time() - cpu, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours, theirs = models()
    for rows in args.rows:
        chance = random.Random(0)
        prompts = [[chance.randrange(1, VOCABULARY) for _ in range(chance.randint(20, 200))] for _ in range(rows)]
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(each)) + each for each in prompts])
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])

        def here(prompts: list[list[int]] = prompts, rows: int = rows) -> list[list[int]]:
            how = Sampling(temperature=0, max_tokens=NEW)
            found = generate(ours, Numbers(), prompts, how, slots=rows)
            return [[token.id for token in each.tokens] for each in found]

        def there(padded: Tensor = padded, mask: Tensor = mask, longest: int = longest) -> list[list[int]]:
            found = theirs.generate(padded, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
            return [row.tolist() for row in found[:, longest:]]

        sides = {"ours": here, "transformers": there}
        runs: dict[str, list[tuple[float, float, list[list[int]]]]] = {name: [] for name in sides}
        for number in range(args.rounds + 1):
            for name, side in sides.items():
                run = timed(side)
                if number:  # the first one warms up
                    runs[name].append(run)
        wall, cpu = ({name: statistics.median(run[n] for run in runs[name]) for name in sides} for n in (0, 1))
        result = {
            "rows": rows,
            "tokens_per_s": {name: round(rows * NEW / seconds, 1) for name, seconds in wall.items()},
            "ratio": round(wall["transformers"] / wall["ours"], 2),
            "cpu_ratio": round(cpu["transformers"] / cpu["ours"], 2),
            "equal": runs["ours"][0][2] == runs["transformers"][0][2],
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
