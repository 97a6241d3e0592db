"""What differs from the checkpoint that a run goes on from: shown, refused, or of no meaning; and who wins."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

import pipeline
from pipeline.common.versions import versions
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.config.parsing.schema import keys
from pipeline.train.distributed.layout import Layout
from pipeline.train.start import resume
from pipeline.train.start.resume import WINNERS, config_differences, table
from tests import tiny
from tests.train.runs import column, exact, start, train


@pytest.fixture(scope="module")
def half(root: Path) -> Path:
    """A run of four steps, which others begin with copies of."""
    return train(root, "half", "train.duration=4 steps", "train.schedule.type=constant")


@pytest.fixture
def begin(root: Path, half: Path, tmp_path: Path) -> Callable[..., tuple[int, str, Path]]:
    """Go on from a copy of that run: exit code, what was printed, and its folder."""

    def go_on(*overrides: str) -> tuple[int, str, Path]:
        run = tmp_path / "copy"
        shutil.copytree(half, run)
        settings = ("train.schedule.type=constant", f"data.dir={root / 'data'}", *overrides)
        return *start(root, str(run), *settings), run

    return go_on


def shown(out: str) -> list[str]:
    """The lines under the heading that says what is other than in the checkpoint."""
    lines = out.splitlines()
    number = next((n for n, line in enumerate(lines) if line.startswith("train: changed since ")), None)
    if number is None:
        return []
    block = lines[number + 1 :]
    return [line.strip() for line in block[: next(n for n, line in enumerate(block) if not line.startswith("  "))]]


def winner(key: str) -> str:
    above = key
    while above not in WINNERS:
        above = above.rpartition(".")[0]
        assert above, f"{key} has no winner"
    return WINNERS[above][0]


def test_every_key_has_a_winner_and_every_winner_is_a_key() -> None:
    known = {re.sub(r"\.N\b", "", key.path) for key in keys(Config)}
    assert known >= WINNERS.keys()
    single = {key for key in known if not any(other.startswith(f"{key}.") for other in known)}
    assert {winner(key) for key in single} == set(resume.MEANING)
    # A section of its own for each that `train:` has, so that a new one is thought of.
    assert {key for key in known if key.count(".") == 1 and key.startswith("train.")} <= WINNERS.keys()
    assert {key for key in known if "." not in key} - {"run", "train"} <= WINNERS.keys()
    assert all(f"| `{key}` |" in table() for key in WINNERS)


def test_the_same_run_file_says_nothing(root: Path) -> None:
    settings = ("train.duration=4 steps", "train.schedule.type=constant")
    run = train(root, "same", *settings)
    # As if it had been stopped in the last step, so that there is something to do.
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    (run / "checkpoints" / "latest").write_text("step-00000003\n")
    code, out = start(root, "same", *settings)
    assert code == 0 and "train: resuming from step-00000003\n" in out
    assert not shown(out) and not tiny.warnings_of(out)


def test_keys_that_differ_are_shown_one_line_each_and_win(
    begin: Callable[..., tuple[int, str, Path]], half: Path
) -> None:
    code, out, run = begin(
        "train.optimizer.lr=5e-3",
        "train.checkpoint.keep=7",
        "train.ema.decay=0.5",
        "launch.threads=2",
        "resume.verify_on_load=size",
    )
    assert code == 0, out
    assert shown(out) == [
        "train.duration: 4 steps -> 8 steps",
        "train.optimizer.lr: 0.01 -> 0.005",
        "train.checkpoint.keep: 2 -> 7",
        "train.ema: none -> {decay: 0.5}",
        "threads per process: 1 -> 2, which changes the last bits of sums",
    ]
    assert column(run, "lr")[4:] == [5e-3] * 4
    changed = "train.duration: 4 steps -> 8 steps; train.optimizer.lr: 0.01 -> 0.005"
    assert f"learning rate 1.00e-02 -> 5.00e-03 at step 5 ({changed})" in out
    assert len([path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-")]) == 4


def test_a_rise_of_the_learning_rate_is_told(root: Path) -> None:
    run = train(root, "decayed", "train.duration=4 steps")
    code, out = start(root, "decayed", "train.duration=12 steps")
    before, after = column(run, "lr")[3:5]
    assert code == 0 and after > 2 * before
    line = f"learning rate {before:.2e} -> {after:.2e} at step 5 (train.duration: 4 steps -> 12 steps)"
    assert any(line in each and "pipeline fork" in each for each in tiny.warnings_of(out))
    assert "learning rate" not in start(root, "decayed", "train.duration=12 steps")[1]


@pytest.mark.parametrize(
    ("change", "line", "aspect"),
    [
        ("model.norm_eps=1e-4", "model.norm_eps: 1e-05 -> 0.0001", "model"),
        ("train.objective.type=fim", "train.objective.rate: none -> 0.5", "objective"),
    ],
)
def test_what_would_change_the_meaning_is_refused_unless_it_is_named(
    begin: Callable[..., tuple[int, str, Path]], change: str, line: str, aspect: str
) -> None:
    code, out, run = begin(change)
    assert code == 2
    assert line in out and f"resume.allow=[{aspect}]" in out
    assert winner(change.partition("=")[0]) == "checkpoint"
    if aspect == "model":
        shutil.rmtree(run)
        code, out, _ = begin(change, "resume.allow=[model]")
        assert code == 0, out
        assert f"warning: allowed difference from the checkpoint: {line}" in out
        assert not any(each.startswith("model.") for each in shown(out))


def test_versions_and_layout_that_differ_are_shown(
    begin: Callable[..., tuple[int, str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = versions()
    monkeypatch.setattr(
        resume, "versions", lambda: {**found, "torch": "9.9", "git": {"revision": "abc", "changed": True}}
    )
    code, out, _ = begin()
    assert code == 0, out
    assert f"versions.torch: {found['torch']} -> 9.9" in shown(out)
    assert any(line.startswith("versions.git") and line.endswith("-> abc") for line in shown(out)) or "git" not in found
    assert not any(line.startswith("layout") for line in shown(out))


def test_a_dataset_that_no_step_has_read_may_be_another_and_is_shown(root: Path) -> None:
    old = {"data": {"sea": "1", "land": "2"}, "tokenizer": "t"}
    config = load(root / "run.yaml")
    state = {"fingerprints": old, "config": config.model_dump(mode="json"), "versions": versions()}
    now = {**old, "data": {"sea": "1", "land": "3"}}
    assert resume.changes(state, config, now) == ["data.land: 2 -> 3"]
    assert resume.changes(state, config, old) == []


def test_another_layout_is_shown(root: Path) -> None:
    config = load(root / "run.yaml")
    prints: dict[str, Any] = {"data": {}, "tokenizer": "t"}
    one = {**Layout().degrees, "dp": 1, "world_size": 1}
    state = {"fingerprints": prints, "config": config.model_dump(mode="json"), "versions": versions(), "layout": one}
    assert resume.changes(state, config, prints, Layout()) == []
    assert resume.changes(state, config, prints, Layout(dp_shard=3, tp=2)) == [
        "layout: dp 1 -> 3, dp_shard 1 -> 3, tp 1 -> 2, world_size 1 -> 6",
    ]
    # Not a second time as keys.
    asked = load(root / "run.yaml", ["parallel.tp=2", "parallel.sequence_parallel=false"])
    assert resume.changes(state, asked, prints, Layout(tp=2)) == [
        "parallel.sequence_parallel: true -> false",
        "layout: tp 1 -> 2, world_size 1 -> 2",
    ]


def test_values_are_shown_as_a_run_file_has_them(root: Path) -> None:
    saved = load(root / "run.yaml").model_dump(mode="json")
    asked = load(
        root / "run.yaml",
        ["train.deterministic=true", "train.optimizer.betas=[0.9, 0.98]", "blend.phases=[{name: a}]"],
    )
    assert config_differences(saved, asked) == [
        "blend.phases.a: (not there) -> {name: a, loss_weights: {}, slices: {}}",
        "train.optimizer.betas: [0.9, 0.95] -> [0.9, 0.98]",
        "train.deterministic: false -> true",
    ]


def test_a_model_whose_weights_do_not_fit_is_refused_in_words(
    begin: Callable[..., tuple[int, str, Path]],
) -> None:
    code, out, run = begin("model.dim=64")
    assert code == 2 and "model.dim: 32 -> 64" in out
    assert "resume.allow" not in out, "it would not help"
    shutil.rmtree(run)
    code, out, run = begin("model.dim=64", "resume.allow=[model]")
    assert code == 2
    where = run / "checkpoints" / "step-00000004"
    assert f"embedding.weight is 304 x 32 in {where} and 304 x 64 in this model; set `model` back" in out
    assert "torch.Size" not in out


def test_keys_that_an_older_checkpoint_does_not_have_meant_their_defaults(root: Path) -> None:
    config = load(root / "run.yaml")
    saved = config.model_dump(mode="json")
    del saved["train"]["faults"], saved["resume"], saved["launch"]["crash_loop"], saved["data"]["sources"][0]["weight"]
    saved["train"]["gone"] = 3
    assert config_differences(saved, config) == [
        "data.sources.sea.weight: none -> 3.0",  # which is not the default
        "train.gone: 3 -> (not there)",
    ]
    other = load(root / "run.yaml", ["train.faults.max_rewinds=9"])
    assert "train.faults.max_rewinds: 3 -> 9" in config_differences(saved, other)


def test_sources_and_phases_are_compared_by_name(root: Path) -> None:
    old = load(root / "run.yaml", ["blend.phases=[{name: a, until: 5 steps}, {name: b}]"])
    new = load(
        root / "run.yaml",
        ["data.sources.1.weight=4", "blend.phases=[{name: a, until: 6 steps}, {name: b}]", "data.splits.test=0.1"],
    )
    assert config_differences(old.model_dump(mode="json"), new) == [
        "data.sources.land.weight: 1.0 -> 4.0",
        "data.splits.test: (not there) -> 0.1",
        "blend.phases.a.until: 5 steps -> 6 steps",
    ]


def test_a_named_step_is_gone_on_from(begin: Callable[..., tuple[int, str, Path]]) -> None:
    code, out, run = begin("resume.from=3")
    assert code == 0, out
    assert tiny.resumed_from(out) == 3 and "train: changed since step-00000003 (checkpoint -> now):" in out
    assert (run / "checkpoints" / "abandoned" / "step-00000004").is_dir()
    assert [row["step"] for row in exact(run)] == list(range(1, 9))
    state = orjson.loads((run / "checkpoints" / "step-00000008" / "state.json").read_bytes())
    assert state["config"]["resume"]["from"] == 3


def test_a_run_that_is_refused_has_gone_back_nowhere(begin: Callable[..., tuple[int, str, Path]]) -> None:
    code, _, run = begin("resume.from=3", "model.dim=16")
    assert code == 2
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-00000004"
    assert not (run / "checkpoints" / "abandoned").exists()


def test_nothing_to_go_on_from_is_an_error_where_it_was_asked_for(root: Path) -> None:
    for wanted in ("latest", "3"):
        code, out = start(root, f"nothing-{wanted}", f"resume.from={wanted}")
        assert code == 2
        assert "train first" in out or "steps there: none" in out


def test_versions_have_the_revision_of_a_checkout() -> None:
    found = versions()
    top = Path(pipeline.__file__).parents[1]
    asked = subprocess.run(["git", "-C", str(top), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if (top / ".git").exists() and asked.returncode == 0:
        assert found["git"]["revision"] == asked.stdout.strip()
        assert isinstance(found["git"]["changed"], bool)
    else:
        assert "git" not in found
    assert found["torch"] and found["numpy"] and found["python"] and found["pipeline"]


@pytest.mark.guard
def test_an_installed_package_below_another_checkout_has_no_revision(tmp_path: Path) -> None:
    package = tmp_path / "venv" / "lib" / "pipeline"
    shutil.copytree(Path(pipeline.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    script = "from pipeline.common.versions import versions; import json; print(json.dumps(versions()))"
    done = subprocess.run(
        [tiny.command()[0], "-c", script], capture_output=True, text=True, cwd=package.parent, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    assert "git" not in found
