"""The copy of the code in a run folder: what is edited after the submission does not change what jobs run."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from slurm.submit import code_snapshot


def run_python(code: Path, words: list[str], cwd: Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1", **variables}
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.guard
def test_code_that_is_edited_later_does_not_change_what_runs(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    checkout = code_snapshot.take(tmp_path / "run")
    (checkout / "RUN").mkdir()
    take = "from pathlib import Path; from slurm.submit import code_snapshot; print(code_snapshot.take(Path('RUN')))"
    taken = checkout / run_python(checkout, ["-c", take], checkout)
    assert taken == checkout / "RUN" / "slurm" / "code" / checkout.name
    assert run_python(checkout, ["-c", take], checkout) == str(taken.relative_to(checkout))
    assert len(list(checkout.glob("RUN/slurm/environment-*.json"))) == 1

    source = checkout / "pipeline" / "__init__.py"
    source.write_text(source.read_text() + '\n__version__ = "edited"\n')
    version = ["-c", "import pipeline; print(pipeline.__version__)"]
    assert run_python(checkout, version, tmp_path) == "edited"
    # As a job runs: in the folder of the checkout, from where it was submitted.
    assert run_python(taken, version, checkout) != "edited"
    assert run_python(taken, ["-m", "pipeline", "--version"], checkout).split()[-1] != "edited"
    shipped = "from pipeline.config.load import packaged_configs as p; print(p(), (p() / 'quickstart.yaml').exists())"
    assert run_python(taken, ["-c", shipped], checkout) == f"{taken / 'configs'} True"

    again = checkout / run_python(checkout, ["-c", take], checkout)
    assert again != taken and taken.is_dir()
    assert not list(checkout.glob("RUN/slurm/code/.*.tmp"))
    assert not list(again.rglob("__pycache__"))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(OSError, match="No space left") as full:
        code_snapshot.take(tmp_path)
    assert full.value.filename == str(code_snapshot.place(tmp_path)[0])


def test_what_it_runs_with_is_noted_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "hidden")
    monkeypatch.setenv("CUDA_API_KEY", "hidden")
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    monkeypatch.setenv("CUDA_AUTH", "hidden")
    monkeypatch.setenv("CONDA_CHANNELS", "https://conda.example.org/t/hidden/main,https://u:hidden@host/c")
    monkeypatch.setenv("TORCH_HUB_URL", "https://host/models?sig=hidden")
    monkeypatch.setenv("MODULEPATH_ROOT", "git+ssh://hidden@host/x.git")
    monkeypatch.setenv("PYTHON_INDEX", "https://hidden:hidden@host/simple https://host/t/hidden")
    code = code_snapshot.take(tmp_path, ["cuda/12.8"])
    (file,) = (tmp_path / "slurm").glob("environment-*.json")
    assert b"hidden" not in file.read_bytes()
    noted = orjson.loads(file.read_bytes())
    assert noted["code"] == code.name
    assert noted["modules"] == ["cuda/12.8"]
    assert noted["environment"]["NCCL_DEBUG"] == "INFO"
    assert noted["environment"]["CONDA_CHANNELS"] == "https://conda.example.org/t/***/main,https://***@host/c"
    assert noted["environment"]["TORCH_HUB_URL"] == "https://host/models?***"
    assert noted["distributions"]["torch"] and noted["python"]["executable"] == sys.executable
