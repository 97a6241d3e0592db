"""Training steps on one GPU or those of a node, beside transformers' model of the same shape in a bare loop.

Layers are those of Llama 3 8B, or of another run file; as many of them as fit by plan. One thing is changed at a time
from a base, which has the first value of each option: by default windows of 8,192 tokens, bf16, compiled layers. Each
variant runs in a process of its own (with several GPUs, one a GPU by torchrun), steps as training makes them, on random
tokens, with a large matrix product measured before and after. JSON lines: tokens/s a GPU as the median step has it,
with quartiles; the share of the stated dense peak of bf16 (`mfu`: attention counted whole, `mfu_causal`: half) and of
the matrix product; the peak of memory; the losses of the first steps, which have to be equal where the data are. What
cannot run, or runs out of memory, is a line with the reason. The last line has the goals. Progress goes to stderr.

    python benchmarks/train_gpu.py --minutes 9 --to lines.jsonl --table
    python benchmarks/train_gpu.py --dry-run --on h200
    python benchmarks/train_gpu.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from train_gpu_table import Line, compare_losses, summary, table
from train_gpu_variants import (
    BACKENDS,
    DOCUMENTS,
    PEERS,
    PRECISIONS,
    RECOMPUTE,
    SHARED,
    START_S,
    TINY,
    Sizes,
    Variant,
    most_layers,
    planned_bytes,
    planned_seconds,
    variants,
)

from pipeline.common.errors import UserError
from pipeline.train.host.devices import Device, device_of_driver, find_device
from pipeline.train.rules.layout import check_layout

_LLAMA = Path(__file__).parent.parent / "configs" / "models" / "llama3-8b.yaml"
_REASON = 400
"""Characters of an error that its line has."""


@dataclass(frozen=True)
class Machine:
    """What there is to run on."""

    kind: str
    """cuda or cpu."""
    name: str
    memory_bytes: int | None
    """Of a GPU."""
    known: Device | None
    processes: int


@dataclass
class Clock:
    """What is left of the time, and how long processes take besides their timed steps."""

    minutes: float
    begun: float = field(default_factory=time.monotonic)
    start_s: dict[tuple[bool, bool], float] = field(default_factory=dict)
    """By whether layers are compiled, and whether it is the peer: as it was seen last."""

    @property
    def left(self) -> float:
        """Seconds."""
        return self.minutes * 60 - (time.monotonic() - self.begun)

    def start(self, variant: Variant) -> float:
        """Seconds, guessed or seen."""
        return self.start_s.get((variant.compiled, variant.peer is not None), START_S[variant.compiled])


def find_machine(device: str, processes: int | None, on: str | None) -> Machine:
    """The GPUs that torch sees, or a device that is planned for; nothing of CUDA is started in this process."""
    if on is not None:
        known = find_device(on)
        return Machine("cuda", known.name, known.memory_bytes, known, processes or 1)
    if device == "cpu":
        return Machine("cpu", "CPU", None, None, processes or 1)
    ask = (
        "import json, torch; n = torch.cuda.device_count(); p = torch.cuda.get_device_properties(0) if n else None; "
        "print(json.dumps([n, *((p.name, p.total_memory) if n else ())]))"
    )
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    count, *rest = json.loads(answer.splitlines()[-1])
    if not count:
        raise UserError("torch sees no CUDA device; try it with --device cpu --tiny, or --dry-run --on h200")
    name, memory_bytes = rest
    return Machine("cuda", name, memory_bytes, device_of_driver(name), processes or count)


def run(
    variant: Variant, overrides: Sequence[str], given: argparse.Namespace, machine: Machine, seconds: float
) -> Line:
    """Measure a variant in processes of its own, which are ended after so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        to, log = Path(folder, "line.json"), Path(folder, "log")
        job = {"run_file": str(given.run_file), "overrides": list(overrides), "peer": variant.peer, "to": str(to)}
        job |= {"steps": given.steps, "warmup": given.warmup}
        launcher = [sys.executable]
        if machine.processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={machine.processes}"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*launcher, __file__, "--one", json.dumps(job)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(max(1.0, seconds))
            except subprocess.TimeoutExpired:
                return {"error": f"ended after {seconds:.0f} s, when the time was over: raise --minutes"}
            finally:
                _end(process)
        if to.exists():
            return json.loads(to.read_text())  # type: ignore[no-any-return]
        last = " ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        return {"error": f"the process ended with {process.returncode}: {last}"[:_REASON]}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that is still there, and those that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_one(job: dict[str, Any]) -> None:
    """In a process of a variant: measure it, and leave the line where it is looked for."""
    from train_gpu_peer import peer
    from train_gpu_steps import measure, ours

    from pipeline.config.load import load
    from pipeline.train.distributed import process_group as processes

    code = 0
    try:
        config = load(Path(job["run_file"]), job["overrides"])
        line = measure(config, ours if job["peer"] is None else peer(job["peer"]), job["steps"], job["warmup"])
    except Exception as error:
        import traceback

        traceback.print_exc()
        line, code = {"error": _reason(error)}, 1
    if line is not None:
        unfinished = Path(f"{job['to']}.{os.getpid()}")
        unfinished.write_text(json.dumps(line))
        unfinished.rename(job["to"])
    processes.leave(code)


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    if "out of memory" in words or "DefaultCPUAllocator" in words:
        return f"out of memory: {words}"[:_REASON]
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{kind}{words}"[:_REASON]


def measured(
    todo: Sequence[Variant], sizes: Sizes, layers: int, given: argparse.Namespace, machine: Machine
) -> Iterator[Line]:
    """The lines of all variants, round after round."""
    clock, rounds = Clock(given.minutes), list(todo) * given.rounds
    command = shlex.join(["python", *sys.argv])
    for number, variant in enumerate(rounds):
        line = variant.about(layers) | {"round": number // len(todo) + 1}
        overrides = [*sizes.overrides(variant, layers), f"launch.device={machine.kind}"]
        begun = time.monotonic()
        try:
            stepping = _stepping(variant, sizes, layers, given, machine)
            if stepping + clock.start(variant) > clock.left:
                found: Line = {"error": f"not begun: {clock.left:.0f} s were left; raise --minutes"}
            else:
                found = run(variant, overrides, given, machine, clock.left)
        except Exception as error:  # what the rules refuse, most of all; the others are measured still
            found = {"error": _reason(error)}
        took = time.monotonic() - begun
        if "step_s" in found:
            own = found["step_s"] * given.steps
            clock.start_s[variant.compiled, variant.peer is not None] = took - own
        said = found.get("error") or f"{found['tokens_per_second']:,.0f} tokens/s a process"
        print(f"[{number + 1}/{len(rounds)}] {variant.name}: {said} ({took:.0f} s)", file=sys.stderr, flush=True)
        yield line | found | {"overrides": overrides, "command": command}


def _stepping(variant: Variant, sizes: Sizes, layers: int, given: argparse.Namespace, machine: Machine) -> float:
    """Seconds of all steps of a variant by plan, or 0 where nothing is known of the device.

    Raises:
        UserError: The rules refuse it, before a process is started for nothing.
    """
    config = sizes.config(variant, layers)
    check_layout(config, machine.processes)
    if machine.known is None:
        return 0.0
    return planned_seconds(config, machine.processes, machine.known) * (given.steps + given.warmup)


def dry_run(
    todo: Sequence[Variant], sizes: Sizes, layers: int, given: argparse.Namespace, machine: Machine
) -> Iterator[Line]:
    """What would be measured: memory by plan, and a guess of the time, most of which processes take to start."""
    clock, total = Clock(given.minutes), 0.0
    for variant in list(todo) * given.rounds:
        line = variant.about(layers)
        try:
            config = sizes.config(variant, layers)
            needed = planned_bytes(config, machine.processes, variant.peer, machine.kind)
            stepping = _stepping(variant, sizes, layers, given, machine)
        except Exception as error:  # as where it is measured
            yield line | {"error": _reason(error)}
            continue
        total += stepping + clock.start(variant)
        line |= {"planned_gb": round(needed / 1e9, 1), "steps_s": round(stepping, 1), "start_s": clock.start(variant)}
        yield line | {"until_s": round(total), "in_time": total <= given.minutes * 60}


def main() -> None:
    given = _parse()
    if given.one is not None:
        run_one(json.loads(given.one))
        return
    # So that a time limit from outside ends the processes of a variant, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        lines = _lines(given)
        if given.table and not given.dry_run:
            print(table(lines))
            print(json.dumps(summary(lines)), file=sys.stderr)
    except UserError as error:
        sys.exit(f"error: {error}")


def _lines(given: argparse.Namespace) -> list[Line]:
    """Printed as they come, unless a table is wanted, and written to `--to`."""
    if given.from_ is not None:
        rows = [json.loads(row) for row in given.from_.read_text().splitlines()]
        return [row for row in rows if "variant" in row]
    machine = find_machine(given.device, given.processes, given.on)
    common = (*SHARED, *(TINY if given.tiny else ()), *given.overrides)
    sizes = Sizes(given.run_file, common, given.tokens, given.micro_batches, machine.processes)
    todo = variants(
        given.sequence,
        given.precision,
        [each == "on" for each in given.compile],
        given.attention,
        given.documents,
        given.recompute,
        given.peer,
        cross=given.cross,
    )
    todo = [variant for variant in todo if all(word in variant.name.split() for word in given.only)]
    if not todo:
        raise UserError(f"--only {' '.join(given.only)}: no variant has these words in its name; see --dry-run")
    layers = given.layers or _layers(todo, sizes, machine)
    print(f"{machine.name}, processes {machine.processes}, layers {layers}, variants {len(todo)}", file=sys.stderr)
    lines: list[Line] = []
    work = dry_run if given.dry_run else measured
    for line in work(todo, sizes, layers, given, machine):
        lines.append(compare_losses(line, lines))
        _put(given, lines[-1])
    if not given.dry_run:
        _put(given, summary(lines))
    return lines


def _put(given: argparse.Namespace, line: Line) -> None:
    if given.to is not None:
        with given.to.open("a") as file:
            file.write(json.dumps(line) + "\n")
    if given.dry_run or not given.table:
        print(json.dumps(line), flush=True)


def _layers(todo: Sequence[Variant], sizes: Sizes, machine: Machine) -> int:
    """As many as fit with the first variant and the peers; on a CPU those of the run file."""
    if machine.memory_bytes is None:
        return sizes.config(todo[0]).model.layers
    # The peers all need about the same.
    of = [todo[0], *[variant for variant in todo if variant.peer][:1]]
    return most_layers(sizes, of, machine.memory_bytes)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key.path=value", help="of the run file, for all variants but the peer's loop")
    add("--sequence", type=int, nargs="+", help="tokens of a window (8192 4096)")
    add("--precision", nargs="+", choices=list(PRECISIONS), help="(bf16 fp8 fp8-rowwise fp8-te)")
    add("--compile", nargs="+", choices=["on", "off"], help="(on off)")
    add("--attention", nargs="+", choices=BACKENDS, help="(all)")
    add("--documents", nargs="+", choices=DOCUMENTS, help="one a window, or many, between which nothing is seen (both)")
    add("--recompute", nargs="+", choices=list(RECOMPUTE), help="attention: only its results are kept (all)")
    add("--peer", nargs="*", choices=PEERS, help="transformers with these kernels, or under autocast (all)")
    add("--cross", action="store_true", help="all combinations instead of one change at a time")
    add("--only", nargs="+", default=[], metavar="WORD", help="variants whose names have all of these words")
    add("--run-file", type=Path, default=_LLAMA, help="shape of the model, optimizer, loss (Llama 3 8B)")
    add("--layers", type=int, help="instead of as many as fit by plan")
    add("--tokens", type=int, help="of a micro-batch on a process (16384)")
    add("--micro-batches", type=int, default=2, help="of a step on a process (2)")
    add("--steps", type=int, help="that are timed (10)")
    add("--warmup", type=int, default=3, help="steps before them (3)")
    add("--rounds", type=int, default=1, help="so many times all variants, in turn (1)")
    add("--minutes", type=float, default=60, help="no variant is begun that would not end within them (60)")
    add("--processes", type=int, help="GPUs, one process each (all of this machine); on a CPU 1")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--tiny", action="store_true", help="a model of some thousand parameters, and only what a CPU can run")
    add("--dry-run", action="store_true", help="list the variants with memory by plan and a guess of the time")
    add("--on", metavar="DEVICE", help="with --dry-run: a device that is not here, like h200")
    add("--table", action="store_true", help="print Markdown instead of the lines")
    add("--to", type=Path, metavar="FILE", help="append the lines to it, too")
    add("--from", dest="from_", type=Path, metavar="FILE", help="measure nothing: the table of these lines")
    add("--one", help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    if given.on and not given.dry_run:
        parser.error("--on goes with --dry-run")
    if given.warmup < 1:
        parser.error("--warmup: the first step compiles, so it cannot be timed")
    defaults: dict[str, Any] = {
        "sequence": [8192, 4096],
        "precision": ["bf16", "fp8", "fp8-rowwise", "fp8-te"],
        "compile": ["on", "off"],
        "attention": list(BACKENDS),
        "documents": list(DOCUMENTS),
        "recompute": list(RECOMPUTE),
        "peer": list(PEERS),
        "tokens": 16384,
        "steps": 10,
    }
    if given.tiny:
        defaults |= {"sequence": [128], "precision": ["fp32", "bf16", "fp8-emulated"], "compile": ["off", "on"]}
        defaults |= {"attention": ["auto", "sdpa"], "recompute": ["none", "selective", "full"], "peer": ["sdpa"]}
        defaults |= {"tokens": 256, "steps": 4}
    for key, value in defaults.items():
        if getattr(given, key) is None:
            setattr(given, key, value)
    return given


if __name__ == "__main__":
    main()
