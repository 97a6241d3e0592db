"""Profiles of sites: what ships is valid, and what is wrong in a user's own is told with line, key and a guess."""

from pathlib import Path

import pytest

from pipeline.config.load import load
from pipeline.config.slurm import SiteConfig
from pipeline.errors import UserError
from slurm import profile
from tests import tiny


def test_all_that_ship_are_valid_and_say_which_site_they_are_for() -> None:
    assert {"generic", "devcluster"} < set(profile.shipped())
    for name in profile.shipped():
        assert profile.load_site(name).description


def test_the_generic_one_names_every_key() -> None:
    text = (Path(profile.__file__).parent / "profiles" / "generic.yaml").read_text()
    missing = [key for key in SiteConfig.model_fields if f"{key}:" not in text]
    assert not missing


def test_everything_wrong_in_a_file_is_told_at_once_by_line(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("default: {partition: a}\ntrain:\n  tim: 3h\n  mem_gb: lots\npython: ???\n")
    with pytest.raises(UserError) as refused:
        profile.load_site(str(file))
    message = str(refused.value)
    assert f"{file}:1: default: unknown key; did you mean defaults?" in message
    assert f"{file}:3: train.tim: unknown key; did you mean train.time?" in message
    assert f'{file}:4: train.mem_gb = "lots": must be a number' in message
    assert f"{file}:5: python = ???: fill in a value here" in message
    assert "4 problems" in message and "generic.yaml" in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("genric", ["no profile has this name; did you mean generic?", "generic, gres"]),
        ("./nowhere.yaml", ["the file is not there; those that ship are", "generic, gres"]),
    ],
)
def test_a_profile_that_is_not_there(name: str, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        profile.load_site(name)
    assert all(each in str(refused.value) for each in [f"slurm.profile = {name}", *words])


def test_a_file_does_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.yaml").write_text("train: {time: 1-12:00:00}\n")
    monkeypatch.chdir(tmp_path)
    config = load(tiny.write_run(tmp_path), ["slurm.profile=./site.yaml"])
    monkeypatch.chdir("/")
    assert config.slurm.profile == str(tmp_path / "site.yaml")
    assert profile.load_site(config.slurm.profile).train.time == 36 * 60
    assert load(tmp_path / "run.yaml", ["slurm.profile=generic"]).slurm.profile == "generic"
