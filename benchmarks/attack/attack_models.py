"""Attack the reader of fastText models with changed files.

    python benchmarks/attack/attack_models.py [--model lid.176.ftz] [--count 166] [--only after]

Changes numbers of the header and of the dictionary, random bytes and lengths of small models that it writes (n-grams;
a tree of labels), or of a model that you name. `before` is what the library alone does with each: load it and predict
some lines, in a process of its own with limits. `after` is what `Predictor` does with all of them in one process, and
a crash of that would end this program. `curate` is the command with such files, and with some that are no models, as
its quality model. Prints how many ended how; exit code 1 if the second or third crashed or hung once.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeline.common.errors import UserError
from pipeline.data.curate.models.fasttext_file import read_model_file
from pipeline.data.curate.models.predict import HARD_TEXTS, Predictor
from tests.data.curate.models.fasttext_writer import mutations, write_model

LIMIT_S = 40
ALONE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({limit}, {limit}))
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import fasttext
model = fasttext.load_model(sys.argv[1]).f
for text in {texts!r}:
    model.predict(text, 1000, 0.0, "strict")
"""
WORDS = {"good": [2.0, 0.0], "bad": [0.0, 1.5], "plain": [0.5, 0.5], "漢字": [0.1, 0.2]}
LABELS = {"__label__hq": [1.0, -1.0], "__label__lq": [-1.0, 1.0], "__label__other": [0.0, 0.5]}


def before(path: Path) -> str:
    """How the library alone ends."""
    code = ALONE.format(limit=LIMIT_S, texts=HARD_TEXTS)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, timeout=10 * LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return "hung" if name in ("SIGKILL", "SIGXCPU") else name
    return "predicted" if done.returncode == 0 else done.stderr.decode().strip().rpartition("\n")[2].partition(":")[0]


def after(path: Path) -> str:
    """How the package ends."""
    try:
        model = read_model_file(path, "key")
    except UserError:
        return "refused by its numbers"
    try:
        predictor = Predictor(model, "key", None)
        for text in ("good bad", "other words 漢字"):
            predictor.best(text)
    except UserError as error:
        return "refused in the child" if "fastText cannot use" in str(error) else "refused when it predicted"
    return "predicted"


def curate(root: Path) -> bool:
    """True if `pipeline curate` ended badly with a hostile file as its quality model, from the run file on."""
    write_model(root / "good", WORDS, LABELS, ngrams=(2, 50, 2, 4))
    good, private = (root / "good").read_bytes(), root / "private"
    private.write_text("a secret of the user")
    changed = dict(mutations(good, 6, 1))
    huge = [name for name in changed if name.endswith((f"= {2**31 - 1}", f"= {2**62}"))]
    chosen = [*huge[2::3], *(name for name in changed if " = " not in name)]
    cases: dict[str, Callable[[Path], object]] = {
        "as it is": lambda path: path.write_bytes(good),
        **{name: lambda path, name=name: path.write_bytes(changed[name]) for name in chosen},
        **{f"cut at {size}": lambda path, size=size: path.write_bytes(good[:size]) for size in (0, 7, 60, 91, 300)},
        "a pickle": lambda path: path.write_bytes(pickle.dumps(_Touches(root / "marker"))),
        "a tokenizer.json": lambda path: path.write_text(json.dumps({"model": {"type": "BPE", "vocab": {}}})),
        "a pipe": os.mkfifo,
        "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "a link to a private file": lambda path: path.symlink_to(private),
        "1 TiB that is sparse": lambda path: (path.write_bytes(good), os.truncate(path, 2**40)),
        "a folder": lambda path: path.mkdir(),
    }
    bad = False
    for number, (name, make) in enumerate(cases.items()):
        case = root / f"case-{number}"
        case.mkdir()
        (case / "text.jsonl").write_text('{"text": "good words and other words"}\n' * 50)
        make(case / "model.bin")
        (case / "run.yaml").write_text(RUN.format(case=case))
        begin = time.monotonic()
        words = [sys.executable, "-m", "pipeline", "curate", str(case / "run.yaml")]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=10 * LIMIT_S, check=False)
            code, said = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            code, said = None, "did not end"
        problem = code not in (0, 2) or (code != 0 and number == 0)
        problem |= "Traceback" in said or "a secret" in said or (root / "marker").exists()
        bad |= problem
        last = next((line for line in said.splitlines() if "error" in line), "").replace(str(case), "")
        seconds = time.monotonic() - begin
        print(
            f"{'broken' if problem else 'held'}: curate, {name}: code {code}, {seconds:.0f} s, {last[:150]}", flush=True
        )
    return bad


class _Touches:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._marker}",)


RUN = """\
run: {{dir: {case}/run}}
data:
  sources: [{{name: text, type: jsonl, paths: [{case}/text.jsonl]}}]
  preprocess: {{workers: 1}}
  curate: {{classifiers: [{{name: quality, model: {case}/model.bin, label: __label__hq, min_score: 0.1}}]}}
tokenizer: {{train: {{vocab_size: 300}}}}
model: {{layers: 1, dim: 32, heads: 4}}
train: {{duration: 1 steps}}
"""


def main() -> None:
    """Run the attacks that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--count", type=int, default=166)
    parser.add_argument("--only", choices=["before", "after", "curate"])
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    if options.model is None:
        write_model(folder / "ngrams", WORDS, LABELS, ngrams=(2, 50, 2, 4))
        write_model(folder / "tree", WORDS, LABELS, loss=1, ngrams=(1, 20, 3, 3))
    models = [options.model] if options.model else [folder / "ngrams", folder / "tree"]
    cases = [(f"{model.name}: {name}", data) for model in models for name, data in mutations(model.read_bytes(), 150)]
    cases = random.Random(0).sample(cases, min(options.count, len(cases)))
    slow = 0
    for side, run in (("before", before), ("after", after)):
        if options.only not in (None, side):
            continue
        ends: Counter[str] = Counter()
        for name, data in cases:
            path = folder / "changed"
            path.write_bytes(data)
            begin = time.process_time()
            end = run(path)
            slow += side == "after" and time.process_time() - begin > LIMIT_S
            ends[end] += 1
            if end.startswith(("SIG", "hung", "refused in", "refused when")):
                print(f"{side}: {name}: {end}", flush=True)
        print(
            f"{side}: {len(cases)} changed files: " + ", ".join(f"{n} {end}" for end, n in ends.most_common()),
            flush=True,
        )
    bad = options.only in (None, "curate") and curate(folder)
    raise SystemExit(1 if slow or bad else 0)


if __name__ == "__main__":
    main()
