"""A program that loads exported models, in the Python that has it: called by `handover.py`, imports nothing of ours.

    PYTHON benchmarks/eval/handover_tools.py TOOL JOBS.json OUT.jsonl [FOLDER OF THE CONVERTER, TYPE OF WEIGHTS]

Each job is a folder, prompts as ids, and texts. A line of OUT has what the program made of a job: greedy tokens, and
the ids that it splits the texts into. All is computed in fp32; only the weights of a GGUF may have another type.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Job = dict[str, Any]
PRE_TOKENIZER = "smaug-bpe"
"""llama.cpp's name for the split of this suite's own tokenizers, which is Llama 3's, without other rules for merges."""


VLLM_NEEDS = {
    name: ("custom_ops without rotary_embedding", {"compilation_config": {"custom_ops": ["-rotary_embedding"]}})
    for name in ("deepseek_v2", "deepseek_v3")
}
"""By `model_type`, what vLLM must be told on CPUs: its own kernel does not turn pairs of neighbours as others do."""
CONVERTER_NEEDS = {"qwen3_next": "--no-mtp", "qwen3_5_text": "--no-mtp"}
"""By `model_type`, what llama.cpp's converter must be told: an export has no layers that predict further tokens."""


class Transformers:
    """Greedy generation of transformers."""

    def __init__(self) -> None:
        import transformers

        self.version = transformers.__version__

    def run(self, job: Job) -> dict[str, Any]:
        """Tokens of a job."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model, report = AutoModelForCausalLM.from_pretrained(job["folder"], output_loading_info=True)
        if any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            raise ValueError(f"other tensors than it expects: {report}")
        tokenizer = AutoTokenizer.from_pretrained(job["folder"])
        tokens = []
        for prompt in job["prompts"]:
            ids = torch.tensor([prompt])
            done = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["new"], do_sample=False)
            tokens.append(_before_end(done[0, len(prompt) :].tolist(), model.generation_config.eos_token_id))
        return {"tokens": tokens, "ids": [tokenizer.encode(text, split_special_tokens=True) for text in job["texts"]]}


class Vllm:
    """Offline generation of vLLM on CPUs."""

    def __init__(self) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        import vllm

        self.version = vllm.__version__

    def run(self, job: Job) -> dict[str, Any]:
        """Tokens of a job."""
        import gc

        from vllm import LLM, SamplingParams

        needs, told = VLLM_NEEDS.get(job["exported_as"], (None, {}))
        model = LLM(model=job["folder"], dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4, **told)
        settings = SamplingParams(temperature=0, max_tokens=job["new"])
        done = model.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], settings, use_tqdm=False)
        tokens = [_before_end(each.outputs[0].token_ids, _end(job)) for each in done]
        tokenizer = model.get_tokenizer()
        ids = [tokenizer.encode(text, split_special_tokens=True) for text in job["texts"]]
        del model
        gc.collect()
        return {"tokens": tokens, "ids": ids, "needs": needs}


class LlamaCpp:
    """llama.cpp behind its server, after its own converter to GGUF, with the rest in fp32."""

    def __init__(self, converter: str, weights: str) -> None:
        import xllamacpp

        self.version = xllamacpp.__version__
        self._weights = weights
        self._unknown = False
        sys.path.insert(0, converter)
        from conversion import TextModel

        known = TextModel.get_vocab_base_pre

        def pre_tokenizer(model: Any, tokenizer: Any) -> str:
            try:
                return str(known(model, tokenizer))
            except NotImplementedError:
                self._unknown = True
                return PRE_TOKENIZER

        TextModel.get_vocab_base_pre = pre_tokenizer

    def run(self, job: Job) -> dict[str, Any]:
        """Tokens of a job."""
        import convert_hf_to_gguf
        import xllamacpp

        self._unknown = False
        file = f"{job['folder']}.gguf"
        sys.argv = ["convert_hf_to_gguf.py", job["folder"], "--outfile", file, "--outtype", self._weights]
        told = CONVERTER_NEEDS.get(job["exported_as"])
        sys.argv += [told] if told else []
        convert_hf_to_gguf.main()
        settings = xllamacpp.CommonParams()
        settings.model.path = file
        settings.n_ctx, settings.n_parallel, settings.n_gpu_layers, settings.warmup = 256, 1, 0, False
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.cpuparams.n_threads, settings.cpuparams.poll = 1, 0
        settings.port = 0
        server = xllamacpp.Server(settings)
        address = server.listening_address
        tokens = []
        for prompt in job["prompts"]:
            body = {"prompt": prompt, "n_predict": job["new"], "temperature": 0, "return_tokens": True}
            tokens.append(_posted(f"{address}/completion", body | {"cache_prompt": False})["tokens"])
        ids = [
            _posted(f"{address}/tokenize", {"content": text, "add_special": True, "parse_special": False})["tokens"]
            for text in job["texts"]
        ]
        needs = [f"tokenizer.ggml.pre given as {PRE_TOKENIZER}"] if self._unknown else []
        needs += [told] if told else []
        del server
        done = [_before_end(each, _end(job)) for each in tokens]
        return {"tokens": done, "ids": ids, "needs": ", ".join(needs) or None}


def _posted(address: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def _end(job: Job) -> int:
    """Id of the end of a document."""
    return int(json.loads((Path(job["folder"]) / "generation_config.json").read_text())["eos_token_id"])


def _before_end(tokens: Sequence[int], end: int) -> list[int]:
    """Tokens up to the end of the document, which is none of them."""
    return list(tokens[: tokens.index(end)] if end in tokens else tokens)


def _answers(tool: str, jobs: Sequence[Job], more: Sequence[str]) -> Iterator[dict[str, Any]]:
    program: Any = {"transformers": Transformers, "vLLM": Vllm, "llama.cpp": LlamaCpp}[tool](*more)
    for job in jobs:
        line = {"family": job["family"], "version": program.version}
        try:
            yield {**line, "loads": True, **program.run(job)}
        except (Exception, SystemExit) as error:
            why = " ".join(str(error).split()) or f"in {traceback.extract_tb(error.__traceback__)[-1].line}"
            yield {**line, "loads": False, "why": f"{type(error).__name__}: {why}"[:300]}


def main() -> None:
    """Work through the jobs; each answer is written before the next job begins."""
    tool, jobs, out, *more = sys.argv[1:]
    with open(out, "a", encoding="utf-8") as file:
        for line in _answers(tool, json.loads(Path(jobs).read_text()), more):
            print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
