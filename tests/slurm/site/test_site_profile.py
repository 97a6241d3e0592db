"""Profiles of sites: what ships is valid, and what is wrong in a user's own is told with line, key and a guess."""

from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.config.slurm import SiteConfig
from slurm.site import site_profile
from tests import tiny


def test_all_that_ship_are_valid_and_say_which_site_they_are_for() -> None:
    assert {"generic", "devcluster"} < set(site_profile.shipped())
    for name in site_profile.shipped():
        assert site_profile.load_site(name).description


def test_the_generic_one_names_every_key() -> None:
    text = (Path(site_profile.__file__).parents[1] / "profiles" / "generic.yaml").read_text()
    missing = [key for key in SiteConfig.model_fields if f"{key}:" not in text]
    assert not missing


def test_everything_wrong_in_a_file_is_told_at_once_by_line(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("default: {partition: a}\ntrain:\n  tim: 3h\n  mem_gb: lots\npython: ???\n")
    with pytest.raises(UserError) as refused:
        site_profile.load_site(str(file))
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
        site_profile.load_site(name)
    assert all(each in str(refused.value) for each in [f"slurm.profile = {name}", *words])


def test_a_file_does_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.yaml").write_text("train: {time: 1-12:00:00}\n")
    monkeypatch.chdir(tmp_path)
    config = load(tiny.write_run(tmp_path), ["slurm.profile=./site.yaml"])
    monkeypatch.chdir("/")
    assert config.slurm.profile == str(tmp_path / "site.yaml")
    assert site_profile.load_site(config.slurm.profile).train.time == 36 * 60
    assert load(tmp_path / "run.yaml", ["slurm.profile=generic"]).slurm.profile == "generic"


def test_a_relative_file_is_looked_for_beside_the_run_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other paths in the working directory, then beside the file that names it; of the command line only there."""
    project, here = tmp_path / "project", tmp_path / "here"
    (project / "sites").mkdir(parents=True)
    here.mkdir()
    (project / "sites" / "site.yaml").write_text("train: {time: 3h}\n")
    run = tiny.write_run(project, {"slurm.profile": "sites/site.yaml"})
    monkeypatch.chdir(here)
    config = load(Path("../project/run.yaml"))
    assert config.slurm.profile == str(project / "sites" / "site.yaml")
    assert site_profile.site_of(config, {}).train.time == 180
    # A file that includes it need not be beside it.
    (here / "other.yaml").write_text("include: ../project/run.yaml\n")
    assert load(Path("other.yaml")) == config
    with pytest.raises(UserError) as refused:
        site_profile.site_of(load(run, ["slurm.profile=./sites/site.yaml"]), {})
    assert f"slurm.profile = {here}/sites/site.yaml: the file is not there; those" in str(refused.value)
    (here / "sites").mkdir()
    (here / "sites" / "site.yaml").write_text("train: {time: 4h}\n")
    assert site_profile.site_of(load(run), {}).train.time == 240


def test_a_relative_file_that_is_in_neither_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    run = tiny.write_run(tmp_path, {"slurm.profile": "./site.yaml"})
    monkeypatch.chdir(tmp_path / "here")
    config = load(run)  # what needs no profile goes on without it
    with pytest.raises(UserError) as refused:
        site_profile.site_of(config, {})
    assert f"{tmp_path}/here/site.yaml: the file is not there (working directory)" in str(refused.value)
    assert f"no {tmp_path}/site.yaml (folder of the run file) either" in str(refused.value)
