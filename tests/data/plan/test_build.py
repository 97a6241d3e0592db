"""`pipeline data plan` against real runs, and against sums that need no sampler."""

import io
import json
import re
import shutil
import struct
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import xxhash
from rich.console import Console

from pipeline.cli.main import main
from pipeline.common import console as console_module
from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.data.datasets.open import open_datasets
from pipeline.data.loading.loader import open_loader
from pipeline.data.plan import build
from pipeline.data.plan.show import print_data_plan
from slurm.local import stages
from tests import tiny

SLICES = {"name": "end", "sequence_length": 16, "slices": {"sea": [0.5, 1]}, "batch_size": 6}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run file of which eight steps have been trained, with a checkpoint after each third and the last."""
    file = tiny.write_run(tmp_path_factory.mktemp("paper"))
    config = load(file)
    stages.preprocess(config)
    stages.train(config, quiet())
    lines = (config.run.dir / "metrics.jsonl").read_text().splitlines()
    return SimpleNamespace(file=file, metrics=[row for line in lines if "loss" in (row := json.loads(line))])


def quiet():
    return Console(file=io.StringIO())


def planned(run, *overrides, **options):
    return build.make_data_plan(load(run.file, overrides), **options)


def printed(run, *overrides, **options):
    console = quiet()
    print_data_plan(load(run.file, overrides), console, **options)
    return console.file.getvalue()


def test_the_order_hash_is_that_of_the_steps_that_were_trained(run):
    plan = planned(run)
    assert (plan.steps, plan.steps_so_far, plan.hashed_steps) == (8, 8, 8)
    digest = xxhash.xxh3_64()
    for row in run.metrics:
        digest.update(struct.pack("<Q", int(row["order_hash"], 16)))
    assert plan.order_hash == digest.hexdigest()
    assert planned(run, hashed_steps=5).order_hash != plan.order_hash
    assert plan.journal == planned(run, "train.duration=20 steps").journal
    assert plan.journal != planned(run, "run.dir=/none", f"data.dir={run.file.parent}/data", "run.seed=5").journal


def test_the_accounts_are_what_training_counted(run):
    plan, last = planned(run, "train.duration=20 steps"), run.metrics[-1]
    assert {row.source: row.so_far.drawn for row in plan.sources} == last["tokens_by_source"]
    assert {row.source: row.so_far.epochs for row in plan.sources} == last["epochs_by_source"]
    assert sum(row.end.drawn for row in plan.sources) == plan.tokens == 20 * 4 * 32
    assert {row.source: row.weights for row in plan.sources} == {"sea": {"1": 0.75}, "land": {"1": 0.25}}


def test_a_phase_may_follow_what_was_trained(run):
    phases = f"blend.phases={json.dumps([{'until': '8 steps'}, SLICES])}"
    plan = planned(run, "train.duration=20 steps", phases)
    assert plan.steps_so_far == 8
    assert [(r.phase, r.first_step, r.last_step, r.batch_size, r.sequence_length) for r in plan.segments] == [
        ("1", 1, 8, 4, 32),
        ("2 end", 9, 20, 6, 16),
    ]
    assert plan.tokens == 8 * 4 * 32 + 12 * 6 * 16 == sum(row.tokens for row in plan.segments)
    sea = [row for row in plan.sources if row.source == "sea"]
    assert [row.weights for row in sea] == [{"1": 0.75}, {"2 end": 0.75}]
    assert sea[0].so_far is not None and sea[1].so_far is None
    assert any("both read" in line for line in plan.warnings)


@pytest.mark.parametrize(
    "changes",
    [
        [f"blend.phases={json.dumps([{'until': '7 steps'}, SLICES])}"],
        ["data.sources.0.weight=5"],
        ["run.seed=5"],
    ],
)
def test_what_was_trained_cannot_change(run, changes):
    with pytest.raises(UserError, match="of the 8 that are done"):
        planned(run, "train.duration=20 steps", *changes)


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("micro", ["null", "1", "2", "5"])
def test_micro_batches_and_padding_are_the_loader_s(run, ranks, micro):
    phases = f"blend.phases={json.dumps([{'until': '8 steps'}, SLICES])}"
    config = load(run.file, [phases, f"train.micro_batch_size={micro}", "train.duration=20 steps"])
    plan = build.make_data_plan(config, ranks=ranks)
    datasets = open_datasets(config, "train")
    loaders = [open_loader(config, datasets, dp_rank=rank, dp_size=ranks) for rank in range(ranks)]
    for row in plan.segments:
        batches = [loader.batches(row.first_step - 1).micro_batches for loader in loaders]
        assert {len(mine) for mine in batches} == {row.micro_batches}
        sizes = [len(batch.sources) for mine in batches for batch in mine]
        assert set(sizes) == {row.micro_batch_size}
        assert sum(int((batch.sources < 0).sum()) for mine in batches for batch in mine) == row.padding


def test_the_step_at_which_a_source_is_exhausted(run):
    new = ("run.dir=/none", f"data.dir={run.file.parent}/data", "train.duration=600 steps")
    changes = (*new, "data.sources.1.max_epochs=1.5")
    land = next(row for row in planned(run, *changes).sources if row.source == "land")
    config = load(run.file, changes)
    loader = open_loader(config, open_datasets(config, "train"))
    left = loader.tokens_by_source(600)["land"]
    step = next(step for step in range(1, 601) if loader.tokens_by_source(step)["land"] == left)
    assert land.exhausted_step == step < 600 and land.end.remaining == 0
    assert 1.5 - 32 / land.end.tokens < land.end.epochs <= 1.5
    stopped = planned(run, *changes, "data.sources.1.on_exhausted=stop")
    assert stopped.steps in (step - 1, step) and "land" in stopped.ends


def test_what_is_really_given_is_shown_beside_the_weight(run):
    """Sums over the steps by the loader; land drops out in the first of two phases."""
    new = ("run.dir=/none", f"data.dir={run.file.parent}/data", "train.duration=600 steps")
    changes = (*new, "data.sources.1.max_epochs=1.5", "blend.phases=[{until: 550 steps}, {name: end, batch_size: 2}]")
    plan, config = planned(run, *changes), load(run.file, changes)
    loader = open_loader(config, open_datasets(config, "train"))
    middle, end = loader.tokens_by_source(550), loader.tokens_by_source(600)
    for row in plan.sources:
        assert (
            row.weights
            == {"sea": dict.fromkeys(("1", "2 end"), 0.75), "land": dict.fromkeys(("1", "2 end"), 0.25)}[row.source]
        )
        assert row.shares["1"] == pytest.approx(middle[row.source] / plan.segments[0].tokens)
        assert row.shares["2 end"] == pytest.approx((end[row.source] - middle[row.source]) / plan.segments[1].tokens)
        assert row.share == pytest.approx(end[row.source] / plan.tokens)
    assert {row.source: row.shares["2 end"] for row in plan.sources} == {"sea": 1, "land": 0}
    text = printed(run, *changes)
    assert re.search(r"^sea +all +75 % +75 % *\n +[\d.]+ % given +100 % given *$", text, re.MULTILINE)
    assert "warning: source 'land' reaches max_epochs 1.5 at step " in text


def test_weights_are_those_of_the_run_file(run):
    plan = planned(
        run, "run.dir=/none", f"data.dir={run.file.parent}/data", "blend.phases=[{weights: {sea: 7, land: 3}}]"
    )
    assert [list(row.weights.values()) for row in plan.sources] == [[0.7], [0.3]]


def test_padding_is_warned_of(run):
    phases = f"blend.phases={json.dumps([{'until': '8 steps'}, SLICES])}"
    changes = ("train.duration=20 steps", phases)
    assert not any("padding" in line for line in planned(run, *changes).warnings)
    told = [line for line in planned(run, *changes, ranks=4).warnings if "padding" in line]
    (line,) = told  # 4 on 4 ranks fit; 6 are 8 with padding
    assert "phase 2 end from step 9 on: 25.0 % of the samples of a step are padding" in line
    assert (
        "make the batch size of 6 a multiple of 8 (data-parallel ranks x micro-batch size: 4 x 2), or set a smaller"
        in line
    )
    told = [line for line in planned(run, *changes, ranks=1000).warnings if "padding" in line]
    assert "phase 1 from step 1 on: 99.6 % of" in told[0] and "or use fewer ranks" in told[0]


def test_preview_shows_the_text_of_windows(run):
    plan = planned(run, preview=6)
    assert [row.sample for row in plan.preview] == list(range(6))
    assert [row.step for row in plan.preview] == [1, 1, 1, 1, 2, 2]
    texts = {name: [f.read_text() for f in (run.file.parent / name).glob("*.txt")] for name in ("sea", "land")}
    for row in plan.preview:
        assert sum(length for _, _, length in row.documents) == 33
        first = row.text.split("<|endoftext|>")[0].lstrip("\ufffd ")
        assert first and any(first.rstrip("…\ufffd") in text for text in texts[row.source])
    assert len(planned(run, preview=100).preview) == 32


def test_printed_for_people(run):
    text = printed(run, "train.duration=20 steps", preview=1, ranks=3)
    for line in (
        "length: 20 steps, 80 samples, 2,560 tokens (train.duration: 20 steps)",
        "so far: 8 steps, by the newest checkpoint",
        "segments, on 3 data-parallel ranks",
        "after 8 steps",
        "at the end, after 20 steps",
        "order hash of steps 1 to 20: " + planned(run, "train.duration=20 steps").order_hash,
        "sample 0 (step 1): ",
    ):
        assert line in text
    assert "…" not in text.split("order hash")[0]
    skips = "blend.skip=[{steps: 10-12}, {source: sea, documents: [3, 5-7]}, {samples: 70-79}]"
    text = printed(run, "train.duration=20 steps", skips)
    assert "skip: steps 10 to 12 are skipped (from step 9 on)" in text
    assert "skip: source 'sea' is not trained on: documents 3, 5 to 7 (from step 9 on)" in text
    assert "skip: samples 70 to 79 are not trained on (from step 9 on)" in text


def test_printed_as_json(run):
    value = json.loads(printed(run, preview=2, as_json=True))
    plan = planned(run, preview=2)
    assert value["order_hash"] == plan.order_hash and value["steps"] == 8
    assert value["sources"][0]["end"]["epochs"] == plan.sources[0].end.epochs
    assert [row["text"] for row in value["preview"]] == [row.text for row in plan.preview]


def test_without_datasets(run, tmp_path):
    """10**13 tokens on 16,384 ranks, in closed form."""
    changes = [
        f"run.dir={tmp_path}",
        f"data.dir={tmp_path}",
        "train.duration=10T tokens",
        "train.batch_size=1024",
        "train.sequence_length=4096",
        "train.micro_batch_size=null",
        "data.sources.1.slice=[0.5, 1]",
    ]
    with pytest.raises(UserError, match=r"'sea' has no dataset yet .*preprocess.*--assume sea=1T --assume land=1T$"):
        planned(run, *changes)
    plan = planned(run, *changes, assume=["sea=2T", "land=1.5B"], ranks=16384, hashed_steps=3, preview=1)
    steps = -(-(10**13) // (1024 * 4096))
    assert (plan.steps, plan.tokens) == (steps, steps * 1024 * 4096)
    sea, land = plan.sources
    assert (sea.end.tokens, land.end.tokens) == (2 * 10**12, 750 * 10**6)
    assert sea.end.epochs == pytest.approx(0.75 * 5, rel=1e-6)
    assert land.document_count == 750_000 and land.assumed
    assert any("'land'" in line and "warn_epochs" in line for line in plan.warnings)
    (segment,) = plan.segments
    assert (segment.micro_batch_size, segment.micro_batches, segment.padding) == (1, 1, 16384 - 1024)
    assert plan.preview[0].text is None
    assert "(assumed: no text)" in printed(run, *changes, assume=["sea=2T", "land=1.5B"], hashed_steps=3, preview=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("assume", ["sea", "sea=", "sea=much", "sea=0", "sky=1T", "sea=-5"])
def test_what_cannot_be_assumed(run, assume):
    with pytest.raises(UserError, match=f"--assume {assume}: must be SOURCE=TOKENS, like sea=1T"):
        planned(run, assume=[assume])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.schedule.warmup=9 steps", "train.schedule: warmup 9 steps lasts"),
        ("train.objective.type=fim", "train.objective.sentinels.0: '<|fim_prefix|>' is not a special token"),
        ("train.duration=0 steps", "the run has no step"),
    ],
)
def test_what_training_refuses_is_refused_here(run, tmp_path, capsys, change, message):
    """By the command, with what training says."""
    new = [f"run.dir={tmp_path}/run", f"data.dir={run.file.parent}/data", change]
    assert message in refused("train", run.file, *new, capsys=capsys)
    assert refused("train", run.file, *new, capsys=capsys) == refused("data", "plan", run.file, *new, capsys=capsys)


def refused(*words, capsys):
    """What the command line says when it refuses."""
    with mock.patch.object(sys, "argv", ["pipeline", *map(str, words)]), pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    return capsys.readouterr().err


def test_files_that_are_not_as_they_were_are_refused(run, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(run.file.parent / "data", data)
    new = ("run.dir=/none", f"data.dir={data}")
    planned(run, *new)
    for split, validation in (("heldout", True), ("train", False)):
        file = next((data / "sea" / split / "parts").rglob("*.bin"))
        file.write_bytes(file.read_bytes()[:-1])
        assert validation is False or planned(run, *new, "train.validation.samples=0")
        with pytest.raises(UserError, match="datasets are missing files, or have damaged ones"):
            planned(run, *new)


def test_a_run_folder_may_be_named(run, capsys):
    for name in (run.file, run.file.parent / "run"):
        words = ["pipeline", "data", "plan", str(name), "--json", "--steps", "0"]
        with mock.patch.object(sys, "argv", words), pytest.raises(SystemExit) as left:
            main()
        value = json.loads(capsys.readouterr().out)
        assert not left.value.code
        assert (value["steps_so_far"], value["hashed_steps"], value["order_hash"]) == (8, 0, None)


def test_the_command(run):
    """In a process of its own, which imports no torch."""
    code = (
        "import runpy, sys\n"
        "try: runpy.run_module('pipeline', run_name='__main__')\n"
        "finally: assert 'torch' not in sys.modules"
    )
    words = ["data", "plan", run.file, "--steps", "2", "--ranks", "2", "train.duration=9 steps", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert (value["steps"], value["hashed_steps"], value["ranks"], value["steps_so_far"]) == (9, 2, 2, 8)


ASSUMED = ("sea=8123456789012", "land=400B")
MANY = [
    *({"name": f"p{k} [red]", "until": f"{k + 1}00B tokens", "slices": {"land": [0, 0.95]}} for k in range(6)),
    {"name": "end", "weights": {"land": 1}, "slices": {"land": [0.95, 1]}},
]


def shown(run, tmp_path, width, *overrides):
    """What a terminal of so many columns shows of a large run, and lines of text in a file."""
    changes = (f"run.dir={tmp_path}", "train.duration=1T tokens", "train.sequence_length=4096", "train.batch_size=2048")
    console = Console(file=io.StringIO(), force_terminal=width is not None, no_color=True, width=width)
    config = load(run.file, (*changes, f"blend.phases={json.dumps(MANY)}", *overrides))
    print_data_plan(config, console, hashed_steps=0, assume=ASSUMED)
    return re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())


@pytest.mark.parametrize("width", [80, 120, None])
def test_nothing_is_cut_off_at_any_width(run, tmp_path, width, monkeypatch):
    monkeypatch.setattr(console_module, "is_screen", lambda _: width is not None)
    text = shown(run, tmp_path, width)
    tables = text[: text.index("warning:")]
    assert "…" not in tables and (width is None or max(map(len, tables.split("sources")[1].splitlines())) <= width)
    for figure in ("8.123T", "380B", "20B", "380,000,000", "399,999,999", "p0 [red]", "p5 [red]", "7 end", "75 %"):
        assert figure in tables, figure
    assert text.count("\nweights") == 2
    assert "order hash" not in text
    if width is None:
        assert re.search(r"^land +380,000,000 to 399,999,999 .*100 % *$", text, re.MULTILINE)


def test_long_ramps_are_shortened(run, tmp_path):
    text = shown(run, tmp_path, 120, "train.batch_ramp={start: 1948, increment: 1, tokens: 50B}")
    assert len(text.splitlines()) < 150 and re.search(r"^\(67 more\)", text, re.MULTILINE)
