"""Runs over datasets that are trained on in part: layouts, resumes, whole epochs, steps without a target, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import api
from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.packing.files import PackFiles
from pipeline.data.packing.command import pack
from pipeline.data.plan.build import make_data_plan
from pipeline.data.provenance.document_to_steps import when
from pipeline.data.provenance.run import open_view
from pipeline.data.provenance.step_to_documents import where
from pipeline.eval.perplexity import evaluate
from pipeline.train.parallel.step_shapes import step_counts
from pipeline.train.parallel.tested import OVERLAPPED, TESTED, WITHIN_LAYERS
from pipeline.train.run.folder import read_metrics
from slurm.submit.course import in_steps
from tests.data import masked
from tests.train import runs
from tests.train.distributed.ranks import Ranks
from tests.train.parallel import layouts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets of conversations and of text, and run files of both and of the first alone."""
    root = tmp_path_factory.mktemp("conversations")
    masked.make(masked.write(root))
    masked.write(root, {"train.batch_size": 7, "train.micro_batch_size": 2}, "chat.yaml", sources=1)
    return root


def chat(folder: Path) -> Dataset:
    return Dataset.open(folder / "data" / "chat" / "train")


@pytest.mark.guard
def test_targets_in_training_validation_and_provenance(folder: Path) -> None:
    """Counts of metrics are those of the masks; a held-out loss and the documents of a step show them."""
    run = runs.train(folder, "both", "train.duration=3 steps", "train.validation.every_steps=3")
    view, rows = open_view(run), read_metrics(run)
    for step, row in enumerate(rows, 1):
        shown = where(view, step, say=print)
        for sample in shown.shown:
            for piece in sample.pieces:
                if sample.source == "chat":
                    assert piece.predicted is not None
                    mask = chat(folder).mask(piece.about.document)
                    found = [token for a, b in piece.predicted.tokens for token in range(a, b)]
                    assert found == mask.nonzero()[0].tolist()
                    (times,) = when(view, "chat", document=piece.about.document, say=print).documents
                    assert times.targets == len(found) and step in [seen.step for seen in times.seen]
                else:
                    assert piece.predicted is None
        assert set(row["loss_by_source"]) == {"chat", "text"}
    assert rows[-1]["validation_loss"] > 0
    report = evaluate(load(folder / "run.yaml", [f"run.dir={run}"]), keep=False)
    heldout = {name: Dataset.open(folder / "data" / name / "heldout") for name in ("chat", "text")}
    assert report.sources["chat"].targets == heldout["chat"].manifest.trained_tokens
    assert report.sources["chat"].bits_per_byte is None is report.blended.bits_per_byte
    assert report.sources["text"].targets == heldout["text"].tokens and report.sources["text"].bits_per_byte


@pytest.mark.guard
def test_epochs_with_a_stop_equal_those_without(folder: Path) -> None:
    keys = ("train.schedule.type=constant", "train.validation.samples=0")
    straight = runs.train(folder, "straight", "train.duration=2 epochs", *keys, file="chat.yaml")
    runs.train(folder, "split", "train.duration=5 steps", *keys, file="chat.yaml")
    split = runs.train(folder, "split", "train.duration=2 epochs", *keys, file="chat.yaml")
    assert len(read_metrics(straight)) > 5
    assert runs.exact(straight) == runs.exact(split) and runs.weights_hash(straight) == runs.weights_hash(split)
    assert read_metrics(straight)[-1]["epochs_by_source"] == {"chat": 2.0}
    run = api.Run(straight)
    batches = [run.batch(step) for step in range(1, len(read_metrics(straight)) + 1)]
    packs = sum(len(batch.samples) for batch in batches)
    assert len(batches[-1].samples) < 7 and packs == 2 * PackFiles.open(chat(folder), 32).index.packs
    assert sum(batch.valid_targets for batch in batches) == 2 * chat(folder).manifest.trained_tokens
    assert len(batches[-1].documents) == len(batches[-1].ids) == len(batches[-1].samples)
    config = load(folder / "chat.yaml", [f"run.dir={folder / 'planned'}", "train.duration=2 epochs"])
    plan = make_data_plan(config)
    assert in_steps(config).train.duration.count == plan.steps == len(batches) and plan.samples == packs
    trained = sum(batch.valid_targets for batch in batches)
    assert plan.segments[0].trained_per_step == pytest.approx(trained / len(batches))
    with pytest.raises(UserError, match="packs that are not there yet"):
        step_counts(config, 1)
    assert not where(open_view(straight), len(batches), rank=2, ranks=3, say=print).warnings
    code, out = runs.start(folder, "straight", "train.duration=3 epochs", *keys, file="chat.yaml")
    assert code == 2 and "fork from a checkpoint before that step" in out


def test_a_step_without_a_trained_target_is_counted_and_changes_nothing(tmp_path: Path) -> None:
    file = masked.write(tmp_path, {"train.validation.samples": 0}, sources=1)
    masked.make(file, share=0.0)
    run = runs.train(tmp_path, "none", "train.duration=3 steps", "train.checkpoint={every_steps: 1, keep: 9}")
    assert [row.get("passed_over") for row in read_metrics(run)] == [True] * 3
    assert runs.weights_hash(run, 1) == runs.weights_hash(run, 3)


@pytest.mark.guard
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.loader.packing=windows"], "data.loader.packing: windows would cut them"),
        (["model.document_attention=false"], "set model.document_attention: true"),
        (["train.objective.by_source={chat: {type: prefix}}"], "train.objective.by_source.chat.type: prefix"),
        (["train.duration=2 epochs"], "several sources"),
    ],
)
def test_what_does_not_go_with_masks_is_refused(folder: Path, overrides: list[str], says: str) -> None:
    code, out = runs.start(folder, "refused", *overrides)
    assert code == 2 and says in out
    assert not (folder / "refused" / "checkpoints").exists()


@pytest.mark.guard
def test_conversations_longer_than_a_pack_are_refused(folder: Path) -> None:
    pack(folder / "data" / "chat", [6], workers=1)
    pack(folder / "data" / "text", [6], workers=1)
    code, out = runs.start(folder, "long", "train.sequence_length=6")
    assert code == 2 and "conversations are longer than the sequence_length of 6 tokens" in out
    assert "set chat.max_tokens: 6" in out


ROWS = {row.name: row for row in (*TESTED, *WITHIN_LAYERS, *OVERLAPPED)}
CASES = ["reshard-cp2-all_gather", "pp2-1f1b", "tp2", "fsdp2-reshard", "ddp2", "reshard-cp2-ulysses"]


@pytest.fixture(scope="module")
def masked_family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("masked")
    changes = {**layouts.COMMON, **layouts.FAMILIES["ahead"], **masked.KEYS}
    changes["blend"] = {"skip": [{"samples": "34-35"}, {"source": "chat", "documents": ["1-2"]}]}
    masked.make(masked.write(root, changes, "ahead.yaml"))
    return root


@pytest.mark.slow  # pairs go the same way, with more of it
@pytest.mark.parallel
@pytest.mark.parametrize("name", CASES)
def test_a_layout_computes_what_one_process_does(
    masked_family: Path, processes: Callable[[int], Ranks], name: str
) -> None:
    """With multi-token prediction, and skips of samples and documents."""
    row = ROWS[name]
    assert layouts.compare(masked_family, "ahead", row, processes(row.layout.world_size)) == []
