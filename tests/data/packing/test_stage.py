"""Packs as the last step of the preprocess stage, and by the commands for datasets that are there."""

import os
import shutil

import numpy as np
import pytest
from rich.console import Console

from pipeline.cli.main import app
from pipeline.common.errors import UserError
from pipeline.config.data import HeldOutSourceConfig, LoaderConfig
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.packing.files import block_path, packs_folder
from pipeline.data.datasets.packing.packs import Packs
from pipeline.data.preprocess.stage import is_complete, preprocess
from pipeline.data.preprocess.status import print_status, read_state
from pipeline.train.start.run_plan import plan_run
from tests.data.runs import make_config, tree


def best_fit(config, *lengths):
    """The run with packs of these lengths; all but the first are those of phases."""
    loader = LoaderConfig(packing="best_fit")
    config = config.model_copy(update={"data": config.data.model_copy(update={"loader": loader})})
    train = config.train.model_copy(update={"sequence_length": lengths[0]})
    phases = [{"sequence_length": length} for length in lengths[1:]]
    phases = [{"until": "100 tokens"}, *phases] if phases else []
    blend = type(config.blend).model_validate({"phases": phases})
    return config.model_copy(update={"train": train, "blend": blend})


def test_made_by_the_stage(config, capsys):
    before = tree(config.data_dir)
    assert is_complete(config)
    config = best_fit(config, 16, 48)
    assert config.pack_lengths == [16, 48]
    assert not is_complete(config)
    assert {(state.state, tuple(state.unpacked)) for state in read_state(config)} == {("tokenized", (16, 48))}
    preprocess(config, dry_run=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("1 of 1 block to make") == 4
    assert tree(config.data_dir) == before

    preprocess(config)
    shown = " ".join(capsys.readouterr().out.split())
    assert is_complete(config) and {state.state for state in read_state(config)} == {"finished"}
    after = tree(config.data_dir)
    assert {name: data for name, data in after.items() if "/packs/" not in name} == before
    for source in ("t", "j"):
        dataset = Dataset.open(config.data_dir / source / "train")
        found = Packs.open(dataset, 48)
        assert found.targets(np.arange(found.count)).sum() == dataset.tokens
        assert f"{source}: {found.count:,} packs of 48 tokens" in shown

    shutil.rmtree(config.data_dir / "j" / "train" / "packs" / "48")
    assert not is_complete(config)
    shown = Console(record=True, quiet=False)
    print_status(shown, config)
    assert "packs to make, of 48 tokens" in shown.export_text()
    preprocess(config)
    assert tree(config.data_dir) == after


@pytest.mark.guard
def test_no_packs_of_held_out_sources(config, tmp_path, capsys):
    (tmp_path / "far.txt").write_text("a text that is never trained on")
    far = HeldOutSourceConfig.model_validate({"name": "far", "paths": [str(tmp_path / "far.txt")]})
    config = config.model_copy(update={"data": config.data.model_copy(update={"heldout_sources": [far]})})
    config = best_fit(config, 16)
    preprocess(config)
    assert is_complete(config) and {state.state for state in read_state(config)} == {"finished"}
    assert not (config.data_dir / "far" / "train").exists()
    capsys.readouterr()
    preprocess(config, dry_run=True)
    assert "far: packs" not in capsys.readouterr().out


def test_a_length_that_packs_cannot_have(config):
    with pytest.raises(UserError, match="packs have 1 to 4,194,303 tokens"):
        preprocess(best_fit(config, 2**22))


def test_training_does_not_begin_with_damaged_packs(config):
    config = best_fit(config, 16)
    preprocess(config)
    plan_run(config, None, check=True)
    folder = config.data_dir / "j" / "train"
    os.truncate(block_path(packs_folder(folder, 16), 0), 100)
    with pytest.raises(UserError, match=f"pipeline data pack {folder} --length 16`"):
        plan_run(config, None, check=True)


@pytest.mark.parametrize("dry_run", [True, False])
def test_adopted_without_packs_is_refused(done, tmp_path, dry_run):
    folder = shutil.copytree(done.data_dir / "t", tmp_path / "t")
    source = {"name": "t", "dataset": str(folder)}
    config = make_config(tmp_path, [source], tokenizer={"path": str(folder / "train" / "tokenizer.json")})
    with pytest.raises(
        UserError, match=rf"^data\.sources\.0\.dataset: .*`pipeline data pack {folder}/train --length 16`"
    ):
        preprocess(best_fit(config, 16), dry_run=dry_run)


def test_adopted_without_packs(done, tmp_path, capsys):
    folder = shutil.copytree(done.data_dir / "t", tmp_path / "t")
    source = {"name": "t", "dataset": str(folder)}
    tokenizer = {"path": str(folder / "train" / "tokenizer.json")}
    config = best_fit(make_config(tmp_path, [source], tokenizer=tokenizer), 16)
    run(f"data pack {folder} --length 16 --length 24 --dry-run")
    assert "1 of 1 block to make" in capsys.readouterr().out
    assert not (folder / "train" / "packs").exists()
    run(f"data pack {folder} --length 16 --workers 1")
    preprocess(config)
    assert is_complete(config)
    capsys.readouterr()
    run(f"data inspect {folder}/train")
    count = Packs.open(Dataset.open(folder / "train"), 16).count
    assert f"{count:,} packs of 16 tokens" in capsys.readouterr().out
    assert not (folder / "heldout" / "packs").exists()


def run(command):
    app(command.split(), standalone_mode=False)
