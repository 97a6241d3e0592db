"""`benchmarks/train_gpu.py` on a CPU: what it measures, what it says of what cannot run, and what it makes of lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

from train_gpu_table import compare_losses, summary, table  # noqa: E402
from train_gpu_variants import variants  # noqa: E402

ONE_OF_EACH = ([8192, 4096], ["bf16", "fp8"], [True, False], ["auto", "flex"], ["one", "many"], ["none", "full"])


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, with one thread."""
    command = [sys.executable, str(FOLDER / "train_gpu.py"), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Four variants and the peer, one of which the rules refuse; the file and what is in it."""
    file = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    tiny = ["--device", "cpu", "--tiny", "--steps", 3, "--compile", "off", "--precision", "fp32", "--attention", "sdpa"]
    done = run(*tiny, "--recompute", "none", "full", "budget", "--to", file)
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert printed == [json.loads(line) for line in file.read_text().splitlines()]
    return file, printed


@pytest.mark.slow
def test_a_loop_of_transformers_has_the_same_losses(lines: tuple[Path, list[dict[str, Any]]]) -> None:
    base, peer, documents, full, refused, whole = lines[1]
    assert peer["peer"] == "sdpa"
    for other in (peer, full):
        assert other["compared_with"] == base["variant"]
        assert other["losses"] == pytest.approx(base["losses"], rel=1e-5)
        assert other["losses_equal"]
    assert base["losses"][-1] < base["losses"][0] - 0.3, "they fall, so that optimizers are compared, too"
    assert documents["losses"] != pytest.approx(base["losses"], rel=1e-4)
    assert "losses_equal" not in documents
    assert "train.recompute" in refused["error"]
    assert whole["to_peer"] == {
        peer["variant"]: pytest.approx(base["tokens_per_second"] / peer["tokens_per_second"], 0.01)
    }
    assert whole["failed"] == {refused["variant"]: refused["error"]}


@pytest.mark.slow
def test_rates_follow_from_the_time_of_a_step(lines: tuple[Path, list[dict[str, Any]]]) -> None:
    base = lines[1][0]
    assert base["tokens_per_second"] == pytest.approx(base["step_tokens"] / base["step_s"], rel=1e-2)
    low, high = base["tokens_per_second_quartiles"]
    assert low <= base["tokens_per_second"] <= high
    assert base["step_tokens"] == 2 * base["micro_batch_tokens"] == 512
    # D 64, 4 heads of 16 with 2 for keys and values, F 192, V 512, S 128, and 3 times forward.
    layer = 2 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 192)
    flops = 3 * (2 * (layer + 4 * 64 * 128) + 2 * 64 * 512)
    reached = sum(base["product_tflops"]) / 2 * 1e12
    assert base["product_share"] == pytest.approx(base["tokens_per_second"] * flops / reached, rel=0.05)
    assert base["product_share_causal"] < base["product_share"]
    assert base["mfu"] is None, "no peak is stated of a CPU"
    assert 0 < base["peak_gb"] < 10


@pytest.mark.slow
def test_a_table_of_lines_that_were_kept(lines: tuple[Path, list[dict[str, Any]]]) -> None:
    file, printed = lines
    done = run("--from", file, "--table")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == table(printed[:-1])
    rows = [line for line in done.stdout.splitlines() if line.startswith("| 128 ")]
    assert len(rows) == 4
    assert "transformers, sdpa" in rows[1] and "equal (" in rows[1]
    assert f"- {printed[4]['variant']}: " in done.stdout


@pytest.mark.slow
def test_compiled_bf16_and_fp8_on_a_cpu() -> None:
    words = ["--compile", "on", "--precision", "bf16", "fp8-emulated", "--recompute", "none", "--documents", "one"]
    done = run("--device", "cpu", "--tiny", *words, "--peer", "sdpa", "autocast", "--attention", "auto")
    base, *others, whole = (json.loads(line) for line in done.stdout.splitlines())
    assert not whole["failed"], done.stderr
    assert [other["peer"] for other in others] == ["sdpa", "autocast", None]
    assert base["losses_equal"] if "losses_equal" in base else all(other["losses_equal"] for other in others)


@pytest.mark.slow
def test_two_processes() -> None:
    words = ["--compile", "off", "--precision", "fp32", "--recompute", "none", "--documents", "one", "--processes", 2]
    done = run("--device", "cpu", "--tiny", *words, "--peer", "sdpa", "--attention", "auto")
    ours, peer, _ = (json.loads(line) for line in done.stdout.splitlines())
    assert ours["processes"] == 2
    assert ours["step_tokens"] == 1024
    assert ours["losses"][-1] < ours["losses"][0]
    assert "one device" in peer["error"]


@pytest.mark.slow
def test_a_plan_for_a_device_that_is_not_here() -> None:
    words = ["--only", "8192", "compiled", "bf16", "recompute:none", "documents:one", "attention:auto"]
    done = run("--dry-run", "--on", "h200", "--minutes", 1, *words)
    assert done.returncode == 0, done.stderr
    (line,) = (json.loads(each) for each in done.stdout.splitlines())
    # Of 143,771 MiB, and a layer more would not fit; the model has 32.
    assert 130 < line["planned_gb"] < 143.3
    assert 10 < line["layers"] < 32
    assert not line["in_time"], "a minute is less than a process takes to start"


def test_one_thing_is_changed_at_a_time() -> None:
    found = variants(*ONE_OF_EACH, ["sdpa"])
    base, peer, *others = found
    assert base.name == "8192 bf16 compiled attention:auto documents:one recompute:none"
    assert peer.name == "8192 bf16 compiled transformers:sdpa"
    changes = [[a for a, b in zip(other.name.split(), base.name.split(), strict=True) if a != b] for other in others]
    assert changes == [
        ["fp8"],
        ["documents:many"],
        ["recompute:full"],
        ["4096"],
        ["eager"],
        ["attention:flex"],
        ["attention:flex", "documents:many"],
    ]
    assert len(variants(*ONE_OF_EACH, ["sdpa"], cross=True)) == 2**6 + 4


def test_unequal_losses_are_told() -> None:
    about = {"sequence": 1, "documents": "one", "layers": 1, "parameters": 1, "processes": 1, "step_tokens": 1}
    first = {**about, "variant": "a", "precision": "bf16", "peer": None, "losses": [2.0, 1.0]}
    near = compare_losses({**first, "variant": "b", "losses": [2.001, 1.001]}, [first])
    far = compare_losses({**first, "variant": "c", "losses": [2.0, 1.1]}, [first, near])
    assert near["losses_equal"] and near["loss_difference"] == pytest.approx(1e-3)
    assert not far["losses_equal"] and far["compared_with"] == "a"
    assert compare_losses({**far, "sequence": 2}, [first]).get("compared_with", "c") == "a"
    failed = {**about, "variant": "d", "peer": None, "error": "out of memory"}
    assert compare_losses(failed, [first]) == failed
    assert summary([failed])["failed"] == {"d": "out of memory"}


@pytest.mark.slow
def test_peers_on_a_cpu_have_the_same_losses(tmp_path: Path) -> None:
    """`benchmarks/train/train_cpu.py`, without litgpt."""
    words = ["--work", str(tmp_path), "--dtype", "fp32", "--sides", "bare,bare-fsdp,ours,trainer", "--rounds", "3"]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "train" / "train_cpu.py"), *words, "--warmup", "1"],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *sides, _ = [json.loads(line) for line in done.stdout.splitlines()]
    assert [side["side"] for side in sides] == ["bare", "bare-fsdp", "ours", "trainer"]
    for side in sides:
        assert side["steps compared"] >= 4
        assert side["largest difference of losses from bare"] < 1e-5


@pytest.mark.slow
def test_crafted_files_are_held_off() -> None:
    """One kind of each; the script itself says what broke."""
    words = ["--only", "^(COMMIT|manifest: dtype|a pipe as run/metrics)", "--seed", "1"]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "attack_files.py"), *words], capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken, 0 ugly" in done.stdout
