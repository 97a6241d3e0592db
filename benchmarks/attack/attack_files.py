"""Attack the package with crafted files: checkpoints, runs, exports, datasets, Hugging Face folders, documents.

    python benchmarks/attack/attack_files.py --seed 1

Makes a tiny dataset, run, checkpoint, export and Hugging Face folder with the package's own commands, in a temporary
folder. Each attack gets a copy of them, changes it as a stranger could, and runs commands on it, each in a process of
its own with limits on address space and processor time. An attack has broken something if its marker was made (code
ran), the canary outside changed, a secret of the environment or of the canary was printed or written, a control
character was printed, or memory or time ran out. It is ugly if a command ended with a traceback or another exit code
than 0, 1 and 2. One line per attack; exit code 1 if anything broke or is ugly.

Commands run in forks of a process that has imported the package, since imports take longer than most attacks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import yaml
from attack_files_data import attacks

SECRET = "hunter2-8c1f0e"
NAME = "SECRET_CANARY_TOKEN"
HEAVY = (
    *("pipeline.train.loop.trainer", "pipeline.train.start.fork", "pipeline.train.start.warm_start"),
    *("pipeline.train.export.commands", "pipeline.train.checkpoint.export", "pipeline.train.huggingface.convert"),
    *("pipeline.eval.perplexity", "pipeline.api.model", "pipeline.eval.generation.generate"),
    *("pipeline.eval.report.gather", "pipeline.eval.report.page"),
    *("pipeline.data.preprocess.stage", "pipeline.data.preprocess.status", "pipeline.data.datasets.adopt"),
    *("pipeline.data.provenance.inspect", "pipeline.data.provenance.run", "pipeline.data.provenance.step_to_documents"),
)
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u202a-\u202e]")
WORDS = ("the", "a", "sea", "boat", "wind", "sails", "north", "light", "old", "night", "storm", "keeper", "rope")


@dataclass
class Ended:
    """How a command ended."""

    command: str
    code: int | None
    """Exit code, negative for a signal; None if it was stopped because time ran out."""
    said: str
    megabytes: int
    seconds: float


class Range:
    """The folders of all attacks, and how commands are run in them."""

    def __init__(self, work: Path, seconds: int, gigabytes: float) -> None:
        self.work, self.seconds, self.gigabytes = work, seconds, gigabytes
        self.base, self.canary, self.home = work / "base", work / "canary", work / "home"
        self.marker = self.canary / "code-ran"
        for folder in (self.base, self.canary, self.home):
            folder.mkdir(parents=True)
        (self.canary / "keep.txt").write_text(f"{SECRET}\n")
        os.environ.update({NAME: SECRET, "HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / "cache")})
        os.environ.update(COLUMNS="200", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

    def build(self) -> None:
        """Everything that is attacked, as the package writes it."""
        chance = random.Random(0)
        for number in range(60):
            path = self.base / "text" / f"{number:02d}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(". ".join(" ".join(chance.choices(WORDS, k=8)) for _ in range(9)))
        values = {
            "run": {"dir": str(self.base / "run")},
            "launch": {"threads": 1},
            "data": {
                "dir": str(self.base / "data"),
                "sources": [{"name": "text", "paths": [str(self.base / "text" / "*.txt")]}],
                "splits": {"heldout": 0.2},
                "preprocess": {"workers": 1, "engine": "tokenizers"},
            },
            "tokenizer": {"train": {"vocab_size": 300}},
            "model": {"layers": 1, "dim": 16, "heads": 2, "vocab_multiple": 16},
            "train": {
                **{"duration": "2 steps", "sequence_length": 32, "batch_size": 2, "micro_batch_size": 2},
                "validation": {"samples": 2},
                "metrics": {"log_every_steps": 1, "tensorboard": False},
            },
            "generate": {"prompt": "the ", "max_tokens": 4},
        }
        (self.base / "run.yaml").write_text(yaml.safe_dump(values))
        for command in (
            *("run {b}/run.yaml", "checkpoint export {b}/run --to {b}/export", "convert to-hf {b}/run {b}/hf"),
        ):
            ended = self.command(command, self.base)
            if ended.code != 0:
                raise SystemExit(f"{command}: {ended.code}\n{ended.said}")

    def command(self, command: str, case: Path) -> Ended:
        """Run a `pipeline` command in a fork; {c} is the folder of the attack, {b} that of what was built."""
        words = [word.format(c=case, b=self.base) for word in shlex.split(command)]
        log = self.work / "said"
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            self._run(words, case, log)
        while (done := os.wait4(child, os.WNOHANG))[0] == 0 and time.monotonic() < start + 4 * self.seconds:
            time.sleep(0.01)
        code: int | None = os.waitstatus_to_exitcode(done[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its own workers too, should it have left any
        if done[0] == 0:
            done, code = os.wait4(child, 0), None
        said = log.read_text(errors="surrogateescape")
        return Ended(command, code, said, done[2].ru_maxrss >> 10, time.monotonic() - start)

    def _run(self, words: list[str], case: Path, log: Path) -> None:
        code = 70
        try:
            os.setsid()
            os.chdir(case)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            space = used + int(self.gigabytes * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (space, space))
            resource.setrlimit(resource.RLIMIT_CPU, (self.seconds, self.seconds))
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if words[0] == "load_model":
                code = load_model(words[1])
            else:
                sys.argv = ["pipeline", *words]
                importlib.import_module("pipeline.cli.main").main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def verdict(self, case: Path, ended: list[Ended], baseline: int) -> tuple[str, str]:
        """`held`, `broken` or `ugly`, and a short fact."""
        if self.marker.exists():
            return "broken", "code ran"
        if [path.name for path in self.canary.iterdir()] != ["keep.txt"]:
            return "broken", "a file was written outside"
        if (self.canary / "keep.txt").read_text() != f"{SECRET}\n":
            return "broken", "the canary was changed"
        for path in (each for folder in (case, self.home) for each in folder.rglob("*")):
            if path.is_symlink() or not path.is_file() or path.stat().st_size > 2**30:
                continue  # sparse
            if SECRET.encode() in path.read_bytes():
                return "broken", f"the secret was written to {path.relative_to(self.work)}"
        for each in ended:
            if SECRET in each.said:
                return "broken", f"the secret was printed by `{each.command}`"
            if found := UNSAFE.search(each.said):
                return "broken", f"{found[0]!a} was printed by `{each.command}`"
            if each.code is None or each.code in (-signal.SIGXCPU, -signal.SIGKILL):
                return "broken", f"no end within {self.seconds} s of `{each.command}`"
            if each.megabytes > baseline + 1024 * self.gigabytes / 2:
                return "broken", f"{each.megabytes - baseline:,} MB in `{each.command}`"
        for each in ended:
            if "Traceback (most recent call last)" in each.said or "bug in the program" in each.said:
                last = [line for line in each.said.splitlines() if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
                return "ugly", f"traceback of `{each.command}`: {(last or ['?'])[-1][:160]}"
            if each.code not in (0, 1, 2):
                return "ugly", f"exit code {each.code} of `{each.command}`: {each.said[-160:]!a}"
        codes = " ".join(str(each.code) for each in ended)
        said = next((each.said for each in ended if each.code), "").strip().replace(str(case), "")
        return "held", f"exit {codes}; {' '.join(said.split())[:110]!a}"


def load_model(path: str) -> int:
    """What `pipeline.api.load_model` does with a folder, as the code and the output of a command."""
    from pipeline.api import MachineError, UserError, load_model

    try:
        model = load_model(path, device="cpu")
    except (UserError, MachineError) as error:
        print(f"error: {str(error)!a}")
        return 2
    text = model.generate(["the a sea"], max_tokens=4)[0].text if model.tokenizer is not None else ""
    print(f"loaded, {len(text)} characters")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder that is made; by default a temporary one")
    parser.add_argument("--seed", type=int, default=0, help="of the files that are changed at random")
    parser.add_argument("--random", type=int, default=100, help="files changed at random: bits, lengths, JSON values")
    parser.add_argument("--only", default="", help="a regular expression for the names of attacks")
    parser.add_argument("--seconds", type=int, default=20, help="processor time of a command; four times that in all")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="address space of a command beyond the imports")
    parser.add_argument("--keep", action="store_true", help="keep the folders of what did not hold")
    parser.add_argument("--list", action="store_true", help="only show the names of the attacks")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="attack-files-"))).resolve()
    field = Range(work, arguments.seconds, arguments.gigabytes)
    for name in HEAVY:
        importlib.import_module(name)
    chosen = [
        attack
        for attack in attacks(field.canary, field.marker, NAME, arguments.seed, arguments.random)
        if re.search(arguments.only, attack.name)
    ]
    if arguments.list:
        print(*(attack.name for attack in chosen), sep="\n")
        shutil.rmtree(work)
        return
    field.build()
    baseline = field.command("--version", field.base).megabytes
    counts = {"held": 0, "broken": 0, "ugly": 0}
    for number, attack in enumerate(chosen):
        case = work / "cases" / f"{number:04d}"
        for name in attack.needs:
            shutil.copytree(field.base / name, case / name)
        case.mkdir(parents=True, exist_ok=True)
        attack.make(case)
        ended = [field.command(command, case) for command in attack.commands]
        result, fact = field.verdict(case, ended, baseline)
        counts[result] += 1
        most = f"{max(each.seconds for each in ended):.1f} s, {max(each.megabytes for each in ended) - baseline:+} MB"
        print(f"{result:6} {attack.name}: {len(ended)} commands, at most {most}; {fact}", flush=True)
        if result == "broken":  # the next attack finds everything as it was
            shutil.rmtree(field.canary)
            field.canary.mkdir()
            (field.canary / "keep.txt").write_text(f"{SECRET}\n")
        if result == "held" or not arguments.keep:
            shutil.rmtree(case)
    if not arguments.keep:
        shutil.rmtree(work)
    print(f"{sum(counts.values())} attacks: " + ", ".join(f"{count} {result}" for result, count in counts.items()))
    sys.exit(1 if counts["broken"] + counts["ugly"] else 0)


if __name__ == "__main__":
    main()
