"""`pipeline run` as a user starts it: the whole way, then again, then further."""

from pathlib import Path

import orjson
import pytest

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.train.run.folder import read_metrics
from slurm.local.stages import run
from tests import tiny

FIGURES = {
    "documents", "tokens", "bytes", "loss_first", "loss_last", "heldout_loss", "perplexity", "bits_per_byte",
    "unigram_bits_per_byte", "zstd_bits_per_byte", "seconds",
}  # fmt: skip


@pytest.mark.slow
def test_run_then_again_then_further(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path)
    first = tiny.pipeline("run", file)
    assert first.returncode == 0, first.stdout + first.stderr
    summary = orjson.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert summary.keys() >= FIGURES
    assert {"preprocess", "train", "eval"} == summary["seconds"].keys()
    texts = [path.read_bytes() for name in ("sea", "land") for path in (tmp_path / name).iterdir()]
    assert (summary["documents"], summary["bytes"]) == (len(texts), sum(map(len, texts)))
    rows = read_metrics(tmp_path / "run")
    assert (summary["loss_first"], summary["loss_last"]) == (rows[0]["loss"], rows[-1]["loss"])
    for text in ("bits per byte", "zstd -19", "run folder:", "try next:", "generate", "inspect"):
        assert text in first.stdout
    assert "Traceback" not in first.stderr

    again = tiny.pipeline("run", file)
    assert again.returncode == 0
    assert "nothing to do" in again.stdout and "already at step 8" in again.stdout
    figures = orjson.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert figures == summary
    assert len(read_metrics(tmp_path / "run")) == 8

    older = tiny.pipeline("eval", file, "--step", "6")
    assert older.returncode == 0 and "held-out loss at step 6" in older.stdout
    written = tiny.pipeline("generate", file, "--step", "6", "--prompt", "the sea", "--greedy", "--max-tokens", "3")
    assert written.returncode == 0 and written.stdout.startswith("step-00000006:\nthe sea")

    further = tiny.pipeline("run", file, "train.duration=12 steps")
    assert further.returncode == 0, further.stderr
    assert tiny.resumed_from(further.stdout) == 8
    summary = orjson.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert summary["steps"] == 12
    assert (tmp_path / "run" / "eval" / "step-00000012.json").exists()
    assert (tmp_path / "run" / "eval" / "step-00000008.json").exists()


def test_what_could_not_be_evaluated_is_refused_first(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path)
    config = load(file, ["eval.processes=2", "eval.parallel.cp=2", "eval.max_length=31"])
    with pytest.raises(UserError, match=r"eval.max_length=31 cannot be cut over eval.parallel.cp=2"):
        run(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_diverged_run_has_a_summary_and_no_traceback(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path, {"train.schedule": {"warmup": "0 steps"}, "train.duration": "2 steps"})
    done = tiny.pipeline("run", file, "train.optimizer.lr=1e38")
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0
    summary = orjson.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert summary["heldout_loss"] is None and summary["continuation"] is None
    again = tiny.pipeline("run", file, "train.optimizer.lr=1e38")
    assert again.returncode == 0 and "Traceback" not in again.stderr


@pytest.mark.slow
def test_what_a_crash_left_of_a_summary_is_written_anew(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path)
    assert tiny.pipeline("run", file).returncode == 0
    for name in ("summary.json", "eval/step-00000008.json"):
        (tmp_path / "run" / name).write_bytes(b"")
    assert tiny.pipeline("run", file, "generate.prompt=a storm").returncode == 0
    summary = orjson.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert summary["generate"]["prompt"] == "a storm"
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"")
    empty = tiny.pipeline("run", file)
    assert empty.returncode == 2 and "metrics.jsonl has no step" in empty.stderr.replace("\n", " ")
