"""What the `data` commands say of objectives that choose what is predicted, against the loader's batches."""

import io
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.common.format import percent
from pipeline.config.load import load
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.open import open_datasets
from pipeline.data.loading.loader import open_loader
from pipeline.data.plan.build import make_data_plan
from pipeline.data.plan.show import print_data_plan
from pipeline.data.provenance.document_to_steps import when
from pipeline.data.provenance.run import open_view
from pipeline.data.provenance.step_to_documents import where
from pipeline.data.tokenization.tokenizer import Tokenizer
from slurm.local import stages
from tests import tiny

SPECIAL = ["[MASK]", *(f"<extra_id_{number}>" for number in range(8))]
OBJECTIVES = {
    "masked": ({"type": "masked", "whole_words": True}, {"model.direction": "both"}),
    "spans": ({"type": "spans", "rate": 0.3}, {"model.encoder": {"layers": 1}}),
    "prefix": ({"type": "prefix"}, {}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("predicted")
    file = tiny.write_run(root, {"tokenizer.special_tokens": SPECIAL})
    stages.preprocess(load(file))
    return root


@pytest.mark.parametrize("name", OBJECTIVES)
def test_where_names_the_predicted_tokens(root: Path, name: str) -> None:
    objective, model = OBJECTIVES[name]
    file = tiny.write_run(
        root, {"tokenizer.special_tokens": SPECIAL, "train.objective": objective, **model}, f"{name}.yaml"
    )
    config = load(file)
    datasets = open_datasets(config, TRAIN)
    tokenizer = Tokenizer.open(datasets["sea"].folder)
    result = where(open_view(file), 3, say=lambda text: None)
    data = open_loader(config, datasets).batches(2)
    rows = {
        sample: (batch.targets[row], batch.weight[row])
        for batch in data.micro_batches
        for row, sample in enumerate(batch.samples.tolist())
    }
    special = set(tokenizer.special_tokens.values())
    for sample in result.json["samples"]:
        targets, weight = rows[sample["sample"]]
        expected = sorted(token for token in targets[weight > 0].tolist() if token not in special)
        found, dataset = [], datasets[sample["source"]]
        for document in sample["documents"]:
            first = dataset.document_start(document["document"])
            texts = []
            for start, end in document["predicted"]:
                assert document["targets"][0] <= start < end <= document["targets"][1]
                ids = dataset.read(first + start, end - start)
                found += ids.tolist()
                texts.append(tokenizer.decode(ids).strip())
            assert document["predicted_text"].rstrip("…") in " … ".join(texts)
        if name == "spans":  # each piece ends with an end-of-document token, which the text may have there or not
            end = tokenizer.end_of_document
            assert [token for token in expected if token != end] == sorted(token for token in found if token != end)
        else:
            assert sorted(found) == expected
    lines = list(result.lines())
    assert any(line.startswith("    predicted: ") and " of its tokens, " in line for line in lines)
    assert any(line.startswith(f"train.objective.type: {name}: ") for line in lines)


@pytest.mark.guard
@pytest.mark.parametrize("name", OBJECTIVES)
def test_when_is_the_inverse_of_where(root: Path, name: str) -> None:
    """In short windows many documents begin or end with the first token or the last."""
    objective, model = OBJECTIVES[name]
    changes = {
        "tokenizer.special_tokens": SPECIAL,
        "train.objective": {**objective, **({} if name == "prefix" else {"rate": 0.4})},
        "train.sequence_length": 7,
        "train.batch_size": 500,
        "train.duration": "10 steps",
        "train.loss": {"mask_document_start": True},
        **model,
    }
    view = open_view(tiny.write_run(root, changes, f"when-{name}.yaml"))
    assert any("mask_document_start" in note for note in view.notes) == (name == "prefix")
    expected: dict[tuple[str, int], list[tuple[object, ...]]] = defaultdict(list)
    for step in range(1, view.steps + 1):
        answer = where(view, step, say=lambda text: None)
        for line in answer.lines():
            found = re.search(r"tokens? (-?[\d,]+).*? of ([\d,]+)", line) if line.startswith("  document") else None
            assert found is None or int(found[1].replace(",", "")) < int(found[2].replace(",", ""))
            assert ("behind what the model gets" not in line) or name != "prefix"
            assert ("input only" not in line) or name == "prefix"
        for sample in answer.shown:
            for piece in sample.pieces:
                if piece.targets[0] < piece.targets[1]:
                    seen = (sample.epoch, step, sample.sample, piece.targets)
                    expected[sample.source, piece.about.document].append(seen)
    laps = set()
    for source, dataset in view.datasets.items():
        for document in range(dataset.documents):
            (times,) = when(view, source, document=document, say=lambda text: None).documents
            found = [(one.lap, one.step, one.sample, one.tokens) for one in times.seen]
            assert sorted(found) == sorted(expected.pop((source, document), [])), (source, document)
            covered = defaultdict(list)
            for one in [*times.seen, *times.unseen]:
                covered[one.lap] += range(*one.tokens)
            assert all(sorted(each) == list(range(times.about.tokens)) for each in covered.values())
            laps |= covered.keys()
    assert not expected and len(laps) > 1


def test_the_plan_shows_shapes(root: Path) -> None:
    changes = {
        "tokenizer.special_tokens": SPECIAL,
        "model.encoder": {"layers": 1},
        "train.objective": {"type": "spans", "rate": 0.3},
        "blend.phases": [
            {"until": "4 steps"},
            {"objective": {"type": "ul2", "denoisers": [{"rate": 0.2}, {"rate": 0.5, "mean_span": 8}]}},
        ],
    }
    config = load(tiny.write_run(root, changes, "plan.yaml"))
    plan = make_data_plan(config)
    spans, ul2 = plan.objectives
    assert (spans.objective, spans.encoder, spans.decoder, spans.padding) == ("spans", 26, 14, 0)
    # 20 % of 32 tokens in 2 spans: 29 and 9 positions; half of them in 2: 19 and 19; at most these, and one more.
    assert (ul2.first_step, ul2.encoder, ul2.decoder) == (5, 30, 20) and ul2.padding == pytest.approx(1 - 38 / 50)
    console = Console(file=io.StringIO())
    print_data_plan(config, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "objectives, by window" in text and percent(0.24, 1) in text
    assert json.loads(json.dumps(plan.to_json()))["objectives"][1]["predicted"] == 20
