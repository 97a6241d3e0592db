"""The copy of the code in a run folder: what is edited after the submission does not change what jobs run."""

import errno
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import orjson
import pytest

from pipeline.common import imports, storage, versions
from pipeline.config.slurm import SiteConfig
from slurm.site.site_profile import load_site, shipped
from slurm.submit import code_snapshot


def run_python(code: Path, words: list[str], cwd: Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1", **variables}
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_code_that_is_edited_later_does_not_change_what_runs(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    checkout = tmp_path / "checkout"
    with zipfile.ZipFile(code_snapshot.take(tmp_path / "run")) as archive:
        archive.extractall(checkout, [each for each in archive.namelist() if not each.endswith(".pyc")])
    (checkout / "RUN").mkdir()
    take = "from pathlib import Path; from slurm.submit import code_snapshot; print(code_snapshot.take(Path('RUN')))"
    taken = checkout / run_python(checkout, ["-c", take], checkout)
    assert taken.parent == checkout / "RUN" / "slurm" / "code"
    assert taken.name == code_snapshot.place(tmp_path / "run")[0].name
    assert run_python(checkout, ["-c", take], checkout) == str(taken.relative_to(checkout))
    assert len(list(checkout.glob("RUN/slurm/environment-*.json"))) == 1
    assert run_python(taken, ["-c", take], checkout) == str(taken.relative_to(checkout))

    source = checkout / "pipeline" / "__init__.py"
    source.write_text(source.read_text() + '\n__version__ = "edited"\n')
    version = ["-c", "import pipeline; print(pipeline.__version__)"]
    assert run_python(checkout, version, tmp_path) == "edited"
    # As a job runs: in the folder of the checkout, from where it was submitted.
    assert run_python(taken, version, checkout) != "edited"
    assert run_python(taken, ["-m", "pipeline", "--version"], checkout).split()[-1] != "edited"
    shipped = "from pipeline.config.load import packaged_configs as p; print((p() / 'quickstart.yaml').read_text())"
    assert run_python(taken, ["-c", shipped], checkout) == (checkout / "configs/quickstart.yaml").read_text().strip()

    again = checkout / run_python(checkout, ["-c", take], checkout)
    assert again != taken and taken.is_file()
    assert sorted((checkout / "RUN/slurm/code").iterdir()) == sorted([again, taken])


def test_what_is_run_is_what_is_in_the_packages_and_compiled(tmp_path: Path) -> None:
    code = code_snapshot.take(tmp_path)
    told = """if True:
        import json, sys
        from pipeline.common import imports, versions
        from pipeline.config.parsing import schema
        from pipeline.config.slurm import SiteConfig
        from slurm.site.site_profile import load_site, shipped
        compiled = [each.__file__.endswith(".pyc") for name, each in sys.modules.items()
                    if name.partition(".")[0] in ("pipeline", "slurm")]
        told = [versions.code_hash(), shipped(), load_site("gres").gpus_by, imports.source_hash(imports),
                SiteConfig.__doc__, min(compiled)]
        print(json.dumps(told))
    """
    words = [sys.executable, "-c", told]
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    site = load_site("gres")
    assert orjson.loads(done.stdout) == [
        *(versions.code_hash(), shipped(), site.gpus_by, imports.source_hash(imports)),
        *(SiteConfig.__doc__, True),
    ]


def test_a_traceback_has_the_lines_of_the_archive(tmp_path: Path) -> None:
    code = code_snapshot.take(tmp_path)
    fails = """if True:
        import traceback
        from pipeline.config import load
        try:
            load.load(3)
        except TypeError:
            print(traceback.format_exc())
    """
    told = run_python(code, ["-c", fails], tmp_path)
    _, _, frame = told.partition(f'File "{code.name}/pipeline/config/load.py"')
    assert "in load\n" in frame and "Path(" in frame.splitlines()[1], told


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    code_snapshot.take(tmp_path / "other")  # and so it is in the cache

    def write(path: Path, data: bytes, mode: int | None = None) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "write_new", write)
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
    assert noted["code"] == code.stem
    assert noted["modules"] == ["cuda/12.8"]
    assert noted["environment"]["NCCL_DEBUG"] == "INFO"
    assert noted["environment"]["CONDA_CHANNELS"] == "https://conda.example.org/t/***/main,https://***@host/c"
    assert noted["environment"]["TORCH_HUB_URL"] == "https://host/models?***"
    assert noted["distributions"]["torch"] and noted["python"]["executable"] == sys.executable
