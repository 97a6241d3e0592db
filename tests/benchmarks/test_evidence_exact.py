"""The items `exact/...` of `benchmarks/gpu_evidence.py`: what they compare, and their rehearsals on a CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

from evidence import corpus  # noqa: E402
from evidence.catalog import ITEMS  # noqa: E402
from evidence.documents import LIMIT, checks, differences, draw, reference, seen  # noqa: E402
from evidence.exact import beside_cpu, beside_transformers, first_difference, furthest, same_bits  # noqa: E402

from benchmarks.train.attention import documents  # noqa: E402
from pipeline.train.model.kernels.attention_mask import AttentionMask  # noqa: E402
from pipeline.train.model.kernels.sdpa import Sdpa  # noqa: E402
from pipeline.train.model.part_spec import Reach  # noqa: E402

CPU = torch.device("cpu")
Rows = list[dict[str, Any]]


def rehearse(name: str, to: Path) -> dict[str, Any]:
    """The result of an item in a process of its own."""
    command = [sys.executable, FOLDER / "gpu_evidence.py", "--rehearse", "--only", name, "--to", to / "lines.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [json.loads(row) for row in (to / "lines.jsonl").read_text().splitlines()]
    assert line["item"] == name and line["status"] == "ok" and line["rehearsal"]
    assert "pipeline/config/train.py" in line["files"]
    result: dict[str, Any] = line["result"]
    assert result["checks"] and all(result["checks"].values())
    return result


def failing(result: dict[str, Any]) -> list[str]:
    return [name for name, holds in result["checks"].items() if not holds]


def rows(steps: int = 4) -> Rows:
    """Rows of a run as metrics.jsonl has them, as far as they are compared."""
    return [
        {
            "step": step,
            "loss": 7.0 - 0.2 * step,
            "loss_by_source": {"library": 7.0 - 0.2 * step},
            "grad_norm": 1.0 / step,
            "lr": 1e-3,
            "tokens": 128 * step,
            "order_hash": f"{step:016x}",
            "data_hash": f"{step + 99:016x}",
            "attempt": 1,
        }
        for step in range(1, steps + 1)
    ]


def changed(step: int, key: str, value: object) -> Rows:
    return [row | {key: value} if row["step"] == step else row for row in rows()]


def test_rows_of_a_device_and_of_a_cpu() -> None:
    result = beside_cpu(changed(3, "loss", 6.4 * (1 + 9e-5)), rows())
    assert failing(result) == []
    assert result["largest_difference"] == {"relative": pytest.approx(9e-5), "step": 3}
    for key in ("order_hash", "data_hash", "tokens"):
        assert failing(beside_cpu(changed(2, key, "other"), rows())) == [f"{key} is equal"]
    for loss in (6.4 * (1 + 2e-4), math.nan):
        assert failing(beside_cpu(changed(3, "loss", loss), rows())) == ["losses differ by at most 0.0001"]
    assert failing(beside_cpu(changed(4, "loss", 6.7), changed(4, "loss", 6.7))) == ["the loss falls"]
    assert "the runs have the same steps" in failing(beside_cpu(rows()[:3], rows()))
    assert "the runs have the same steps" in failing(beside_cpu([], []))


def test_the_largest_difference_is_relative_and_has_its_step() -> None:
    assert furthest([1.0, 2.2, 10.5], [1.0, 2.0, 10.0]) == {"relative": pytest.approx(0.1), "step": 2}
    assert furthest([1.0, math.nan, 99.0], [1.0, 2.0, 10.0])["step"] == 2


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two run folders, of which the first went on after step 2 in another attempt."""
    for name, attempts in (("mine", (1, 1, 2, 2)), ("other", (1, 1, 1, 1))):
        checkpoint = tmp_path / name / "checkpoints" / "step-00000004"
        checkpoint.mkdir(parents=True)
        (checkpoint.parent / "latest").write_text("step-00000004\n")
        (checkpoint / "__0_0.distcp").write_bytes(bytes(range(256)))
        (checkpoint / "state.json").write_text(name)
        lines = [json.dumps(row | {"attempt": number}) for row, number in zip(rows(), attempts, strict=True)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "mine", tmp_path / "other"


def test_equal_runs_have_the_same_bits(folders: tuple[Path, Path]) -> None:
    result = same_bits(*folders, stopped=2)
    assert failing(result) == []
    assert result["first_difference"] is None and list(result["checkpoint_files"]) == ["__0_0.distcp"]
    assert failing(same_bits(*folders, stopped=4)) == ["it was stopped before the end"]


def test_a_bit_of_the_weights_is_seen(folders: tuple[Path, Path]) -> None:
    file = folders[0] / "checkpoints" / "step-00000004" / "__0_0.distcp"
    values = bytearray(file.read_bytes())
    values[100] ^= 1
    file.write_bytes(values)
    assert failing(same_bits(*folders, stopped=2)) == ["weights and optimizer states have the same bits"]
    file.unlink()
    assert failing(same_bits(*folders, stopped=2)) == ["weights and optimizer states have the same bits"]


def test_a_bit_of_a_row_is_seen(folders: tuple[Path, Path]) -> None:
    other = changed(3, "grad_norm", math.nextafter(1 / 3, 1))
    (folders[1] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    result = same_bits(*folders, stopped=2)
    assert failing(result) == ["rows have the same bits"]
    assert result["first_difference"].startswith("step 3, grad_norm: ")
    assert first_difference(rows()[:3], rows()) == "3 and 4 rows"


def test_losses_beside_those_of_transformers() -> None:
    base = [7.0 - 0.1 * step for step in range(10)]

    def off(relative: float, step: int | None = None) -> list[float]:
        return [loss * (1 + relative) if step in (None, k) else loss for k, loss in enumerate(base)]

    result = beside_transformers({"ours_fp32": base, "transformers_fp32": off(9e-5, 4)}, "fp32")
    assert failing(result) == []
    assert result["largest_difference"]["transformers_fp32"] == {"relative": pytest.approx(9e-5), "step": 5}
    assert len(failing(beside_transformers({"ours_fp32": base, "transformers_fp32": off(2e-4, 9)}, "fp32"))) == 1
    same = {"ours_fp32": base, "transformers_bf16": off(1e-3)}
    order = ("ours_fp32", "ours_bf16", "transformers_bf16")
    near, far, wrong = ({**same, "ours_bf16": off(relative)} for relative in (1.9e-3, 2.1e-3, 4e-3))
    assert failing(beside_transformers({name: near[name] for name in order}, "bf16")) == []
    assert failing(beside_transformers({name: far[name] for name in order}, "bf16")) == [
        "ours_bf16 is at most 2 times as far from ours_fp32 as transformers_bf16"
    ]
    assert len(failing(beside_transformers({name: wrong[name] for name in order}, "bf16"))) == 2


def test_the_mask_that_is_counted_out() -> None:
    drawn = documents("tens", 2, 24, CPU)
    assert drawn is not None
    mask = seen(2, 24, drawn, 4, CPU)
    for row in range(2):
        for query in range(24):
            begin = max(start for start in drawn.by_row[row] if start <= query)
            wanted = list(range(max(begin, query - 3), query + 1))
            assert mask[row, 0, query].nonzero()[:, 0].tolist() == wanted
    assert seen(1, 3, None, None, CPU)[0, 0].tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_a_kernel_that_keeps_to_other_documents_or_windows_is_seen() -> None:
    drawn, other = documents("tens", 2, 64, CPU), documents("fifties", 2, 64, CPU)
    inputs = draw(2, 64, 4, 2, 8, torch.float32, CPU)
    expected = reference(seen(2, 64, drawn, 6, CPU), inputs)

    def found(window: int | None, bounds: Any) -> dict[str, float]:
        return differences(Sdpa(), AttentionMask.of(2, (0, 64), Reach.window(window), CPU, bounds), inputs, expected)

    right = found(6, drawn)
    assert list(right) == ["output", "q", "k", "v"] and max(right.values()) < LIMIT["fp32"]
    for wrong in (found(7, drawn), found(5, drawn), found(6, None), found(6, other), found(None, drawn)):
        assert min(wrong.values()) > LIMIT["bf16"]


def test_every_backend_has_to_be_within_its_limit() -> None:
    def row(compute: str, value: float, backend: str = "flex") -> dict[str, Any]:
        return {"backend": backend, "compute": compute, "differences": {"output": 1e-7, "q": value}}

    good, bad = "flex in fp32 differs by at most 0.0001", "flex in bf16 differs by at most 0.03"
    some = [row("fp32", 1e-5), row("bf16", 0.1), row("bf16", 1e-3), row("bf16", 1e-3, "te")]
    assert checks(some) == {"backends ran": True, good: True, bad: False, bad.replace("flex", "te"): True}
    assert checks([row("fp32", math.nan)])[good] is False
    assert checks([row("fp32", 1e-5), {"backend": "flex", "compute": "fp32", "error": "no"}])[good] is False
    assert checks([]) == {"backends ran": False}


def test_the_text_of_the_corpus_is_the_same_each_time(tmp_path: Path) -> None:
    files, limits = [tmp_path / name for name in ("once", "again", "more")], (90_000, 90_000, 200_000)
    once, again, more = (corpus._write_text(file, limit) for file, limit in zip(files, limits, strict=True))
    assert once == again and files[0].read_bytes() == files[1].read_bytes()
    assert 0 < once["text_bytes"] <= 90_000 < more["text_bytes"] <= 200_000
    assert once["text_hash"] != more["text_hash"]
    assert files[2].read_bytes().startswith(files[0].read_bytes())
    records = [json.loads(line) for line in files[2].read_text().splitlines()]
    names = [record["id"] for record in records]
    assert names == sorted(names) and len(names) == more["documents"]
    assert sum(len(record["text"].encode()) for record in records) == more["text_bytes"]
    assert not {"test", "tests", "site-packages"} & {part for name in names for part in name.split("/")}
    with pytest.raises(RuntimeError, match="fit into 10 bytes"):
        corpus._write_text(tmp_path / "none", 10)


def test_rehearsals_have_the_keys_of_the_full_shapes() -> None:
    items = [item for item in ITEMS if item.name.startswith("exact/")]
    assert [item.name for item in items] == [
        *("exact/cpu", "exact/resume", "exact/transformers-fp32", "exact/transformers-bf16", "exact/documents")
    ]
    assert all(item.full.keys() == item.rehearsal.keys() and callable(item.load()) for item in items)


@pytest.mark.slow
def test_rehearsal_beside_a_cpu(tmp_path: Path) -> None:
    result = rehearse("exact/cpu", tmp_path)
    assert result["steps"] == [50, 50]
    assert result["losses"] == result["losses_cpu"], "both are on a CPU"
    assert result["largest_difference"]["relative"] == 0
    assert result["corpus"]["text_bytes"] <= 500_000


@pytest.mark.slow
def test_rehearsal_of_a_resumed_run(tmp_path: Path) -> None:
    result = rehearse("exact/resume", tmp_path)
    assert result["steps"] == 50 and result["stopped_after"] in (25, 26)
    assert result["first_difference"] is None
    assert list(result["checkpoint_files"]) == ["__0_0.distcp"]


@pytest.mark.slow
def test_rehearsal_beside_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = rehearse("exact/transformers-fp32", tmp_path)
    assert list(result["losses"]) == ["ours_fp32", "transformers_fp32"]
    assert result["largest_difference"]["transformers_fp32"]["relative"] < 1e-5


@pytest.mark.slow
def test_rehearsal_beside_transformers_in_bf16(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = rehearse("exact/transformers-bf16", tmp_path)
    assert list(result["losses"]) == ["ours_fp32", "ours_bf16", "transformers_bf16"]
    assert 0 < result["largest_difference"]["ours_bf16"]["relative"] <= 3e-3


@pytest.mark.slow
def test_rehearsal_of_documents(tmp_path: Path) -> None:
    result = rehearse("exact/documents", tmp_path)
    assert {row["backend"] for row in result["rows"]} == {"sdpa"}
    assert {row["mask"] for row in result["rows"]} == {"documents", "window", "documents and window"}
    assert {(row["compute"], row["head_size"]) for row in result["rows"]} == {("bf16", 64), ("fp32", 64), ("fp32", 128)}
    assert set(result["missing"]) == {f"{name}, {kind}" for name in ("varlen", "flash", "te", "flex") for kind in LIMIT}
