"""Programs that come after pretraining, on an exported folder: do they take it, and is what they write taken back?

    python benchmarks/eval/after_pretraining.py EXPORTED --work DIR [--python PYTHON] [--vllm PYTHON] [--to lines.jsonl]

EXPORTED is a folder of `pipeline convert to-hf` with a chat template. In PYTHON, whose environment has trl and peft,
each step runs as a process: TRL's GRPO with a made-up reward, LoRA by TRL and PEFT whose weights are merged, and
torchao's int8 weights. `pipeline convert from-hf` takes what the first two write, and `pipeline convert check` compares
its logits with those of transformers; it refuses the quantized folder. With `--vllm` vLLM answers a question by the
template, greedily, and its tokens are compared with those of transformers. A line of JSON says what each step gave,
with versions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS = 2
_HEAD = """
import json, sys
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, out = sys.argv[1:]
QUESTIONS = ["How far is it?", "Who keeps the light?", "Where is the boat?", "Is there wind?"]
"""
_GRPO = (
    _HEAD
    + f"""
import trl
from trl import GRPOConfig, GRPOTrainer
prompts = Dataset.from_list([{{"prompt": [{{"role": "user", "content": each}}]}} for each in QUESTIONS * 2])
def reward(completions, **_):
    return [-abs(20 - len(each[0]["content"])) / 20 for each in completions]
settings = GRPOConfig(
    out, max_steps={STEPS}, per_device_train_batch_size=4, num_generations=4, max_completion_length=16, bf16=False,
    use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, learning_rate=1e-3, seed=1,
)
trainer = GRPOTrainer(folder, reward_funcs=reward, args=settings, train_dataset=prompts)
before = {{name: value.clone() for name, value in trainer.model.named_parameters()}}
trainer.train()
changed = sum(not torch.equal(before[name], value) for name, value in trainer.model.named_parameters())
trainer.save_model(out)
print(json.dumps({{"version": trl.__version__, "steps": trainer.state.global_step, "changed_tensors": changed,
                  "rewards": [row["reward"] for row in trainer.state.log_history if "reward" in row]}}))
"""
)
_LORA = (
    _HEAD
    + f"""
import peft
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
answer = [{{"role": "assistant", "content": "Two miles."}}]
talks = [{{"prompt": [{{"role": "user", "content": each}}], "completion": answer}} for each in QUESTIONS * 2]
talks = Dataset.from_list(talks)
settings = SFTConfig(
    out, max_steps={STEPS}, per_device_train_batch_size=2, bf16=False, use_cpu=True, report_to=[], save_strategy="no",
    logging_steps=1, learning_rate=1e-2, seed=1,
)
adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = SFTTrainer(folder, args=settings, train_dataset=talks, peft_config=adapter)
trainer.train()
trainer.model.merge_and_unload().save_pretrained(out)
AutoTokenizer.from_pretrained(folder).save_pretrained(out)
print(json.dumps({{"version": peft.__version__, "steps": trainer.state.global_step,
                  "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row]}}))
"""
)
_INT8 = (
    _HEAD
    + """
import torchao
from torchao.quantization import Int8WeightOnlyConfig
from transformers import TorchAoConfig
plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
small = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.bfloat16, quantization_config=TorchAoConfig(Int8WeightOnlyConfig())
)
small.save_pretrained(out)
again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.save_pretrained(out)
ids = tokenizer.apply_chat_template([{"role": "user", "content": QUESTIONS[0]}], add_generation_prompt=True,
                                    return_tensors="pt", return_dict=False)
with torch.no_grad():
    logits = [model(ids).logits.float() for model in (plain, small, again)]
print(json.dumps({"version": torchao.__version__, "from_plain": (logits[0] - logits[1]).abs().max().item(),
                  "saved_and_loaded_equal": torch.equal(logits[1], logits[2])}))
"""
)
_ANSWER = """
import json, sys
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
asked = tokenizer.apply_chat_template([{"role": "user", "content": "Where is the boat?"}], add_generation_prompt=True,
                                      return_tensors="pt", return_dict=True)
new = model.generate(**asked, max_new_tokens=24, do_sample=False)[0, asked["input_ids"].shape[1]:]
print(json.dumps({"version": transformers.__version__, "prompt": asked["input_ids"][0].tolist(), "new": new.tolist()}))
"""
_VLLM = """
import json, sys
import vllm
if __name__ == "__main__":
    model = vllm.LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64)
    settings = vllm.SamplingParams(temperature=0, max_tokens=24)
    (found,) = model.chat([{"role": "user", "content": "Where is the boat?"}], settings)
    new = list(found.outputs[0].token_ids)
    print(json.dumps({"version": vllm.__version__, "prompt": list(found.prompt_token_ids), "new": new}))
"""
STEPS_BY_NAME = {"grpo": _GRPO, "lora": _LORA, "int8": _INT8}


def pipeline(*arguments: object) -> tuple[int, str]:
    """Run a command of this suite; its exit code, and its output or error."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return done.returncode, (done.stderr if done.returncode else done.stdout).strip()


def tried(name: str, folder: Path, work: Path, python: str) -> dict[str, Any]:
    """Result of a step, and of the way back.

    Args:
        name: Of the step.
        folder: The export.
        work: Gets a folder for each step; it must not have them.
        python: Of the environment of the other programs.
    """
    out = work / name
    done = subprocess.run(
        [python, "-c", STEPS_BY_NAME[name], str(folder), str(out)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"step": name, "error": done.stderr.strip().splitlines()[-1][:300]}
    result = {"step": name, **json.loads(done.stdout.strip().splitlines()[-1])}
    code, output = pipeline("convert", "from-hf", out, work / f"{name}-back")
    result["from_hf"] = code
    if code:
        return {**result, "refused": output.splitlines()[-1][:300]}
    texts = work / "texts.txt"
    texts.write_text("How far is it? Two miles.\nThe keeper sees a boat under the old light.\n")
    code, output = pipeline("convert", "check", out, work / f"{name}-back", "--text", texts)
    return {**result, "check": code, "said": output.splitlines()[-1][:300]}


def answers(folder: Path, work: Path, python: str) -> dict[str, Any]:
    """Answer of vLLM beside that of transformers.

    Args:
        folder: The export.
        work: Gets the programs, as vLLM starts its file again in other processes.
        python: Of vLLM's environment.
    """
    found = []
    for name, text, program in (("transformers", _ANSWER, sys.executable), ("vllm", _VLLM, python)):
        (work / f"{name}_answer.py").write_text(text)
        command = [program, str(work / f"{name}_answer.py"), str(folder)]
        # On a CPU vLLM takes half of the memory by default.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            return {"step": "vllm", "error": f"{name}: {done.stderr.strip()[-300:]}"}
        found.append(json.loads(lines[-1]))
    equal = all(found[0][key] == found[1][key] for key in ("prompt", "new"))
    return {"step": "vllm", "version": found[1]["version"], "equal": equal, "new": found[1]["new"]}


def main() -> None:
    """Run the steps, one after another."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of `pipeline convert to-hf --chat-template FILE`")
    parser.add_argument("--work", type=Path, required=True, help="folder for what the steps write")
    parser.add_argument("--python", default=sys.executable, help="Python with trl and peft; default: this one")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python of an environment with vLLM")
    parser.add_argument("--to", type=Path, help="file that gets a line for each step")
    parser.add_argument("--steps", nargs="*", choices=STEPS_BY_NAME, default=list(STEPS_BY_NAME))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    found = [tried(name, options.folder, options.work, options.python) for name in options.steps]
    if options.vllm:
        found.append(answers(options.folder, options.work, options.vllm))
    lines = list(map(json.dumps, found))
    print("\n".join(lines))
    if options.to:
        options.to.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
