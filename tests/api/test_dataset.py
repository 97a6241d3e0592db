"""`api.Dataset` beside the files that it was made of."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from pipeline import api
from pipeline.config.load import load, load_run
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.open import open_split
from pipeline.data.provenance.run import open_view
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.weight_source import open_weights
from pipeline.train.run.folder import read_metrics


def test_documents_are_those_of_the_corpus(windows: Path) -> None:
    data = windows.parent / "data"
    dataset = api.Dataset.open(str(data), "sea")
    texts = {path.read_text() for path in (windows.parent / "sea").glob("*.txt")}
    heldout = api.Dataset.open(data / "sea", split="heldout")
    assert {dataset.text(i) for i in range(len(dataset))} | {heldout.text(i) for i in range(len(heldout))} == texts
    assert len(dataset) + len(heldout) == len(texts)
    end = dataset.tokenizer.end_of_document
    for number, tokens in enumerate(dataset):
        assert tokens.dtype == dataset.dtype == np.uint16
        assert tokens.tolist() == [*dataset.tokenizer.encode(dataset.text(number)), end]
    assert sum(map(len, dataset)) == dataset.tokens
    assert np.concatenate(dataset[:]).tolist() == dataset.read_tokens(0, dataset.tokens).tolist()


def test_it_is_a_sequence(windows: Path) -> None:
    dataset = api.Dataset.open(windows.parent / "data/land/train")
    count = len(dataset)
    everything = [each.tolist() for each in dataset]
    assert dataset[-1].tolist() == everything[-1] and dataset[np.int64(2)].tolist() == everything[2]
    for part in (slice(2, 5), slice(-3, None), slice(None, None, -7), slice(5, 5), slice(count - 1, count + 9)):
        assert [each.tolist() for each in dataset[part]] == everything[part]
    for outside in (count, -count - 1):
        with pytest.raises(IndexError, match=rf"document {outside} is outside of the {count} documents of "):
            dataset[outside]
        with pytest.raises(IndexError):
            dataset.text(outside)
    assert dataset.metadata(-1) == {}
    assert repr(dataset) == f"Dataset('{dataset.path}': {count:,} documents, {dataset.tokens:,} tokens, uint16)"
    again = pickle.loads(pickle.dumps(dataset))
    assert again[3].tolist() == everything[3] and again.fingerprint == dataset.fingerprint
    copied = dataset[0]
    copied[:] = 0
    assert dataset[0].tolist() == everything[0], "arrays are copies"


def test_the_run_and_the_folder_have_the_same_dataset(windows: Path) -> None:
    run = api.Run(windows)
    of_folder = api.Dataset.open(windows.parent / "data", "sea", "heldout")
    assert run.dataset("sea", "heldout").fingerprint == of_folder.fingerprint
    with pytest.raises(api.UserError, match="has no source 'lake'; its sources: sea, land"):
        run.dataset("lake")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no folder .*nowhere; give the folder of a dataset"),
        (["data"], "it has the sources land, sea: name one as `source`"),
        (["data", "lake"], "no source 'lake' .* sources land, sea"),
        (["data/sea"], "it has the splits heldout, train: name one as `split`"),
        (["data", "sea", "test"], "no split 'test'; it has the splits heldout, train"),
        (["sea"], "not a finished dataset"),
        (["run"], r"is a run folder; its datasets: api.Run\(.*run'\).dataset\('NAME'\)"),
    ],
)
def test_what_is_not_a_dataset(windows: Path, arguments: list[str], message: str) -> None:
    path, *others = arguments
    with pytest.raises(api.UserError, match=message):
        api.Dataset.open(windows.parent / path, *others)


def test_paths_may_be_text(windows: Path) -> None:
    """Also where the package takes them itself."""
    folder = windows.parent / "data/sea/train"
    assert Dataset.open(os.fspath(folder)).fingerprint == api.Dataset.open(os.fspath(folder)).fingerprint
    assert Tokenizer.open(str(folder)).fingerprint == Tokenizer.open(folder).fingerprint
    assert load_run(str(windows)) == load_run(windows)
    config = load(str(windows.parent / "run.yaml"))
    assert len(read_metrics(str(windows))) == 8 == open_view(str(windows)).done
    assert Checkpoints.of_run(str(windows)).latest() == Checkpoints.of_run(windows).latest()
    assert open_weights(str(windows), 4, "model").positions == 32
    assert open_split(config, config.data.sources[0], "train").documents
