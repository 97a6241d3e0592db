"""Attack the reader of fastText models with changed files.

    python benchmarks/attack/attack_models.py [--model lid.176.ftz] [--count 166] [--only after]

Changes numbers of the header and of the dictionary, random bytes and lengths of small models that it writes (n-grams;
a tree of labels), or of a model that you name. `before` is what the library alone does with each: load it and predict
some lines, in a process of its own with limits. `after` is what `Predictor` does with all of them in one process, and
a crash of that would end this program. Prints how many ended how; exit code 1 if the second crashed or hung once.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
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


def main() -> None:
    """Run the attacks that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--count", type=int, default=166)
    parser.add_argument("--only", choices=["before", "after"])
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
    raise SystemExit(1 if slow else 0)


if __name__ == "__main__":
    main()
