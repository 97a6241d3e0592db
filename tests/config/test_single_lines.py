"""Text that becomes a line of a script: control characters are refused, wherever they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.common.errors import UserError
from pipeline.config.load import load
from slurm.site.site_profile import load_site
from tests import tiny

ODD = ["\n", "\r", "\0", "\x1b[2J", "\x7f", "\x85", "\u2028", "\t"]


def refused(root: Path, changes: dict[str, object]) -> str:
    with pytest.raises(UserError) as error:
        load(tiny.write_run(root, changes))
    return str(error.value)


@pytest.mark.parametrize("odd", ODD, ids=ascii)
def test_of_a_run_file(tmp_path: Path, odd: str) -> None:
    text = f"a{odd}#SBATCH --wrap=id"
    keys: dict[str, object] = {
        "run.dir": f"/tmp/{text}",
        "slurm.private_dir": f"/tmp/{text}",
        "slurm.profile": text,
        "slurm.group": text,
        "slurm.train": {"partition": text, "options": {"comment": text}},
        "slurm.eval": {"options": {text: "1"}},
    }
    message = refused(tmp_path, keys)
    for key in ("run.dir", "slurm.private_dir", "slurm.profile", "slurm.group", "slurm.train.partition"):
        assert f"{key} = " in message
    assert "slurm.train.options.comment = " in message and "slurm.eval.options: must be one line" in message
    assert message.count(f"has {odd[0]!a} in 'a") + message.count(f"has {odd[0]!a} in '/tmp/a") == len(keys) + 1
    assert all(line.isprintable() for line in message.split("\n"))


def test_of_a_profile(tmp_path: Path) -> None:
    keys = {
        "defaults": {"account": "a\nb", "options": {"x\ny": "1"}},
        **dict.fromkeys(["gpu_type", "python", "container_prefix", "network_interface", "wckey"], "a\nb"),
        "modules": ["a\nb"],
        "srun_options": ["a\nb"],
        "setup": ["if true; then\n\techo two lines\nfi", "a\rb"],
        "environment": {"GOOD": "a\nb"},
        "train": {"qos": "a\nb"},
    }
    file = tmp_path / "site.yaml"
    file.write_text(yaml.safe_dump(keys))
    with pytest.raises(UserError) as error:
        load_site(str(file))
    message = str(error.value)
    assert "12 problems" in message and "setup.1 = " in message and "setup.0" not in message
    assert "environment.GOOD = " in message and "defaults.options: must be one line" in message


@pytest.mark.parametrize("name", ["A B", "A;id", "A\nB", "1A", ""])
def test_names_of_variables(tmp_path: Path, name: str) -> None:
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"environment": {name: "1"}}))
    with pytest.raises(UserError) as error:
        load_site(str(tmp_path / "site.yaml"))
    assert f"environment: {name!a} cannot be the name of a variable" in str(error.value)


def test_unicode_blanks_and_signs_are_text(tmp_path: Path) -> None:
    config = load(
        tiny.write_run(tmp_path, {"run.dir": str(tmp_path / 'it\'s `$HOME` "ü 漢"'), "slurm.group": "grüpp e"})
    )
    assert config.run.dir.name == 'it\'s `$HOME` "ü 漢"' and config.slurm.group == "grüpp e"
