"""Training on pairs: against transformers by hand, across stops and layouts, its reference, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pipeline import api
from pipeline.common.errors import MachineError, Stopped, UserError
from pipeline.common.hashing import put_sealed
from pipeline.config.load import load
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.loading.batch import StepData
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.loop import trainer
from pipeline.train.loop.step import Stepper
from pipeline.train.parallel.tested import OVERLAPPED, TESTED, WITHIN_LAYERS
from pipeline.train.run.folder import read_metrics
from pipeline.train.start import reference
from tests import tiny
from tests.data import pairs
from tests.tiers import first
from tests.train.distributed.ranks import Ranks
from tests.train.huggingface.hf_mapping import randomize
from tests.train.parallel import layouts
from tests.train.runs import column, exact, start, train, weights_hash

FILE = "pairs.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, a run file, and a run on text whose weights it starts from."""
    root = tmp_path_factory.mktemp("pairs")
    pairs.make(pairs.write(root))
    pairs.base(root)
    return root


def dataset(folder: Path) -> Dataset:
    return Dataset.open(folder / "data" / "pairs" / "train")


def conversations(folder: Path, document: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids of both conversations of a pair, and whether each is a target."""
    data = dataset(folder)
    ids = data.read(data.document_start(document), data.document_start(document + 1) - data.document_start(document))
    mask = data.mask(document)
    border = int(np.flatnonzero(mask == 2)[0])
    both = zip(np.split(ids.astype(np.int64), [border]), np.split(mask == 1, [border]), strict=True)
    return [(torch.from_numpy(one), torch.from_numpy(trained)) for one, trained in both]


def log_probabilities(model: Any, folder: Path, document: int) -> list[torch.Tensor]:
    """Of the targets of each conversation, each of which a model of transformers sees alone."""
    found = []
    for ids, trained in conversations(folder, document):
        logits = model(ids[None, :-1]).logits[0].log_softmax(-1)
        found.append((logits.gather(1, ids[1:, None])[:, 0] * trained[1:]).sum())
    return found


@pytest.mark.guard
@pytest.mark.parametrize(("smoothing", "chunk"), [(0.0, 37), (0.2, "null")])
def test_ten_steps_equal_transformers_by_hand(
    folder: Path, monkeypatch: pytest.MonkeyPatch, smoothing: float, chunk: int | str
) -> None:
    size = Tokenizer.open(dataset(folder).folder).vocab_size
    config = LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, rms_norm_eps=1e-5, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    place = folder / f"llama-{smoothing}"
    policy = LlamaForCausalLM(config)
    randomize(policy, seed=4)
    policy.save_pretrained(place)
    Tokenizer.open(dataset(folder).folder).save(place)
    seen: list[StepData] = []
    step = Stepper.step

    def watched(self: Stepper, data: StepData, lr: float) -> Any:
        seen.append(data)
        return step(self, data, lr)

    monkeypatch.setattr(Stepper, "step", watched)
    run = train(
        folder, f"by-hand-{smoothing}", f"train.init_from={{hf: {place}}}", f"train.loss.chunk_tokens={chunk}",
        f"train.preference={{beta: 0.4, label_smoothing: {smoothing}}}", "train.duration=10 steps",
        # Gradients of both answers cancel for many weights: a smaller eps makes whole steps of rounding.
        "train.optimizer={lr: 2e-3, eps: 1e-4}",
        "model.ffn_dim=64", "model.kv_heads=1", f"model.vocab_size={size}", "model.norm_eps=1e-5", file=FILE,
    )  # fmt: skip
    monkeypatch.undo()
    frozen = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    matrices, vectors = ([p for p in policy.parameters() if (p.ndim >= 2) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-4)
    rows = [row for row in read_metrics(run) if "loss" in row]
    assert len(rows) == len(seen) == 10
    for number, (row, data) in enumerate(zip(rows, seen, strict=True), 1):
        documents = [span.document for spans in api.Run(run).batch(number).documents for span in spans]
        assert data.pairs == len(documents)
        optimizer.zero_grad()
        found = torch.zeros(3, dtype=torch.float64)
        for document in documents:
            with torch.no_grad():
                before = log_probabilities(frozen, folder, document)
            now = log_probabilities(policy, folder, document)
            chosen, rejected = (0.4 * (own - its) for own, its in zip(now, before, strict=True))
            z = chosen - rejected
            loss = -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)
            (loss / len(documents)).backward()
            found += torch.tensor([loss.item(), chosen.item(), rejected.item()])
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        loss, *rewards = (found / len(documents)).tolist()
        assert row["preference_loss"] == pytest.approx(loss, abs=1e-5)
        assert [row["reward_chosen"], row["reward_rejected"]] == pytest.approx(rewards, abs=2e-4)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_the_first_step_prefers_nothing(folder: Path) -> None:
    """The model is the reference there; the dataset's files stay as they are."""
    files = {path: path.read_bytes() for path in dataset(folder).folder.rglob("*") if path.is_file()}
    run = train(folder, "first", "train.duration=1 steps", file=FILE)
    (row,) = [row for row in read_metrics(run) if "loss" in row]
    assert row["preference_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert [row["reward_chosen"], row["reward_rejected"]] == pytest.approx([0, 0], abs=1e-4)
    assert files == {path: path.read_bytes() for path in dataset(folder).folder.rglob("*") if path.is_file()}


@pytest.mark.guard
def test_a_resumed_run_is_the_straight_one(folder: Path) -> None:
    """And another reference, or other settings, are refused by name with what to do."""
    straight = train(folder, "straight", "train.duration=7 steps", file=FILE)
    train(folder, "split", "train.duration=4 steps", file=FILE)
    split = train(folder, "split", "train.duration=7 steps", file=FILE)
    assert exact(straight) == exact(split) and weights_hash(straight) == weights_hash(split)
    for name in ("preference_loss", "reward_chosen"):
        assert column(straight, name) == column(split, name)
    place, kept = _folder_of(folder, split), folder / "kept"
    more = ("train.duration=8 steps",)
    for damage, words in (
        (lambda: shutil.rmtree(place), "is missing"),
        ((place / "reference.json").unlink, "is incomplete"),
        ((place / "block-00000.f64").unlink, "block-00000.f64 is missing"),
        (lambda: _flip(place / "block-00000.f64"), "block-00000.f64 is not as it was written"),
        (lambda: _flip(place / "reference.json"), "is incomplete"),
    ):
        shutil.copytree(place, kept)
        damage()
        code, out = start(folder, "split", *more, file=FILE)
        assert code == 2 and words in out and "pipeline train RUN.yaml --reference" in out, out
        shutil.rmtree(place, ignore_errors=True)
        kept.rename(place)
    for override, words in (
        ("train.preference=null", "set train.preference"),
        ("train.preference.beta=0.2", "train.preference.beta: 0.3 -> 0.2"),
        (f"train.preference.reference_dir={folder / 'none'}", "set train.preference.reference_dir"),
    ):
        code, out = start(folder, "split", *more, override, file=FILE)
        assert code == 2 and words in out, out
    code, out = start(folder, "split", *more, "train.preference.beta=0.2", "resume.allow=[preference]", file=FILE)
    assert code == 0 and "train.preference.beta: 0.3 -> 0.2" in out


def _folder_of(root: Path, run: Path) -> Path:
    """The folder of the reference that a run was trained with."""
    name = (run / "checkpoints" / "latest").read_text().strip()
    state = json.loads((run / "checkpoints" / name / "state.json").read_text())
    return root / "data" / "_reference" / state["fingerprints"]["preference"]["references"]["pairs"]["folder"]


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.guard
def test_a_reference_goes_on_where_it_was_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block; one that is damaged or of other weights is computed again."""
    monkeypatch.setattr(reference, "BLOCK_DOCUMENTS", 20)
    whole, apart = folder / "whole", folder / "apart"
    keys = ("launch.reference_only=true", "train.preference.reference_dir=")
    assert start(folder, "unused", keys[0], f"{keys[1]}{whole}", file=FILE)[0] == 0
    assert not (folder / "unused" / "checkpoints").exists()
    commit, done = reference.ReferenceFolder.commit, list[int]()

    def dies(self: Any, number: int, scores: Any) -> None:
        if len(done) == 2:
            raise Stopped("here")
        commit(self, number, scores)
        done.append(number)

    monkeypatch.setattr(reference.ReferenceFolder, "commit", dies)
    with pytest.raises(Stopped):
        start(folder, "unused", keys[0], f"{keys[1]}{apart}", file=FILE)
    assert done == [0, 1]
    (place,) = apart.iterdir()
    _flip(place / "block-00001.f64")
    done.clear()
    monkeypatch.setattr(reference.ReferenceFolder, "commit", lambda *given: (done.append(given[1]), commit(*given)))
    assert start(folder, "unused", keys[0], f"{keys[1]}{apart}", file=FILE)[0] == 0
    assert done == [1, 2, 3]
    (other,) = whole.iterdir()
    assert place.name == other.name
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }
    pairs.base(folder, {"train.duration": "4 steps"})
    assert start(folder, "unused", keys[0], f"{keys[1]}{apart}", file=FILE)[0] == 0
    assert len(list(apart.iterdir())) == 2 and done == [1, 2, 3, 0, 1, 2, 3]


@pytest.mark.guard
def test_a_reference_is_that_of_the_weights_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that the weights are of saves again meanwhile: reference and first step are of the old ones."""
    place, moving = folder / "moved", folder / "moving"
    shutil.copytree(folder / "base", moving)
    newest = moving / "checkpoints" / (moving / "checkpoints" / "latest").read_text().strip()
    commit = reference.ReferenceFolder.commit

    def meanwhile(self: Any, number: int, scores: Any) -> None:
        later = newest.with_name("step-00000009")
        if not later.exists():
            shutil.copytree(newest, later)
            (moving / "checkpoints" / "latest").write_text(later.name)
        commit(self, number, scores)

    monkeypatch.setattr(reference.ReferenceFolder, "commit", meanwhile)
    keys = (f"train.preference.reference_dir={place}", f"train.init_from.path={moving}", "train.duration=1 steps")
    run = train(folder, "from-moving", *keys, file=FILE)
    assert column(run, "reward_chosen")[0] == pytest.approx(0, abs=1e-4)
    state = json.loads((run / "checkpoints" / "step-00000001" / "state.json").read_text())
    assert state["origin"]["path"] == str(newest)


def test_two_starts_do_not_replace_what_the_other_made(folder: Path, tmp_path: Path) -> None:
    data = dataset(folder)
    made = reference.ReferenceFolder(tmp_path / "one", {"dataset": data.fingerprint}, data.documents)
    first, second = (np.full((data.documents, 2), value) for value in (-1.0, -2.0))
    with made.locked(1):
        assert not made.is_complete() and made.missing() == [0]
        made.commit(0, first)
        with pytest.raises(MachineError), made.locked(0.1):
            raise AssertionError
        made.commit(0, second)
        made.finish()
    assert made.is_complete() and (reference.open_reference(made.folder, data).scores == first).all()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_not_finite_is_refused(folder: Path, tmp_path: Path, value: float) -> None:
    data = dataset(folder)
    made = reference.ReferenceFolder(tmp_path / "one", {"dataset": data.fingerprint}, data.documents)
    scores = np.full((data.documents, 2), -1.0)
    scores[5, 1] = value
    with made.locked(1):
        made.commit(0, scores)
        made.finish()
    with pytest.raises(UserError, match="not finite for document 5"):
        reference.open_reference(made.folder, data)


@pytest.mark.parametrize("blocks", [None, [], ["0"], "0000", 7])
def test_a_forged_list_of_blocks_is_refused(folder: Path, tmp_path: Path, blocks: Any) -> None:
    data = dataset(folder)
    value = {"dataset": data.fingerprint, "documents": data.documents, "blocks": blocks}
    put_sealed(tmp_path / "reference.json", value)
    with open(tmp_path / "block-00000.f64", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match="is damaged"):
        reference.open_reference(tmp_path, data)
    made = reference.ReferenceFolder(tmp_path, {"dataset": data.fingerprint}, data.documents)
    put_sealed(tmp_path / "block-00000.json", {"key": 1})
    assert made.missing() == [0]


@pytest.mark.parametrize("saved", [{"pairs": "x"}, {"pairs": {"hash": "y"}}, ["pairs"], {"pairs": {"folder": "../x"}}])
def test_forged_references_of_a_checkpoint_are_refused(saved: Any) -> None:
    with pytest.raises(UserError):
        reference.saved_folders({"preference": {"references": saved}})


@pytest.mark.guard
def test_a_stop_during_the_reference_is_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for after a pass, what is done is kept, and the next start goes on."""
    monkeypatch.setattr(reference, "BLOCK_DOCUMENTS", 20)
    place, run = folder / "stopping", folder / "stopped"
    commit = reference.ReferenceFolder.commit

    def stops(self: Any, number: int, scores: Any) -> None:
        commit(self, number, scores)
        if number == 1:
            (run / "stop").touch()

    monkeypatch.setattr(reference.ReferenceFolder, "commit", stops)
    keys = ("train.duration=1 steps", f"train.preference.reference_dir={place}")
    with pytest.raises(Stopped, match="blocks of the reference that are computed are kept"):
        start(folder, "stopped", *keys, file=FILE)
    (made,) = place.iterdir()
    assert {path.name for path in made.glob("*.f64")} == {"block-00000.f64", "block-00001.f64"}
    assert not (run / "stop").exists()
    assert start(folder, "stopped", *keys, file=FILE)[0] == 0


@pytest.mark.guard
def test_a_source_that_is_added_later_is_refused(folder: Path) -> None:
    run = train(folder, "one-source", "train.duration=2 steps", file=FILE)
    values = yaml.safe_load((folder / FILE).read_text())
    values["data"]["sources"].append({"name": "more", "dataset": str(folder / "data" / "pairs")})
    (folder / "more.yaml").write_text(yaml.safe_dump(values))
    code, out = start(folder, "one-source", "train.duration=3 steps", "resume.allow=[data]", file="more.yaml")
    assert code == 2 and "source 'more' was added after the run began" in out, out
    shutil.rmtree(_folder_of(folder, run))
    assert start(folder, "one-source", "launch.reference_only=true", file=FILE)[0] == 0
    assert start(folder, "one-source", "train.duration=3 steps", file=FILE)[0] == 0
    code, out = start(folder, "one-source", "launch.reference_only=true", "train.precision.compute=bf16", file=FILE)
    assert code == 2 and "today's would be" in out


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.preference=null"], "half of which are not to be learned"),
        (["train.init_from=null"], "train.preference needs train.init_from"),
        (["train.loss.z_loss=1e-3"], "train.loss.z_loss=0.001"),
        (["model.mtp.depth=1"], "train.preference does not work with model.mtp"),
        (["model.dropout=0.1"], "train.preference does not work with model.dropout=0.1"),
        (["data.loader.packing=windows"], "data.loader.packing: windows would cut them"),
        (["model.document_attention=false"], "set model.document_attention: true"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(folder: Path, overrides: list[str], says: str) -> None:
    code, out = start(folder, "refused", *overrides, file=FILE)
    assert code == 2 and says in out, out


def test_a_folder_that_cannot_be_written_is_named_before(folder: Path) -> None:
    for place in ("/nowhere/here", "/proc/here"):
        with pytest.raises(UserError, match="train.preference.reference_dir"):
            reference.check_reference_dir(load(folder / FILE, [f"train.preference.reference_dir={place}"]))


def test_text_has_no_pairs(folder: Path) -> None:
    keys = ("train.preference.beta=0.1", f"train.init_from.path={folder / 'base'}")
    code, out = start(folder, "refused", *keys, file="base.yaml")
    assert code == 2 and "has no pairs of conversations" in out
    code, out = start(folder, "refused", "launch.reference_only=true", file="base.yaml")
    assert code == 2 and "set train.preference" in out


@pytest.mark.guard
def test_the_command_computes_a_reference_alone(folder: Path) -> None:
    """On several processes; the run is not trained, and jobs do it themselves."""
    place = folder / "by-command"
    keys = (folder / FILE, f"run.dir={folder / 'alone'}", f"train.preference.reference_dir={place}")
    done = tiny.pipeline("train", *keys, "parallel.dp_shard=2", "--reference")
    assert done.returncode == 0, done.stderr
    (made,) = place.iterdir()
    assert (made / "reference.json").exists() and not (folder / "alone" / "checkpoints").exists()
    shown = tiny.pipeline("train", *keys, "--dry-run")
    assert shown.returncode == 0 and "reference: computed before the first step" in shown.stdout
    refused = tiny.pipeline("train", *keys, "--reference", "--slurm")
    assert refused.returncode == 2 and "leave out --reference" in refused.stderr


ROWS = {row.name: row for row in (*TESTED, *WITHIN_LAYERS, *OVERLAPPED)}
CASES = [
    *("reshard-cp2-all_gather", "pp2-1f1b", "tp2", "fsdp2-reshard", "ddp2", "reshard-cp2-ulysses"),
    *("fsdp2-reshard-tp2", "hsdp2x2-keep", "tp2-no_sp"),
]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run files of models with as many layers as the layouts need, each with weights to start from."""
    root = tmp_path_factory.mktemp("layouts")
    for layers in sorted({ROWS[name].layers for name in CASES}):
        size = {key: layouts.COMMON[key] for key in layouts.COMMON if key.startswith("model.")} | {
            "model.layers": layers
        }
        pairs.base(root, size)
        (root / "base").rename(root / f"base-{layers}")
        own = {"train.init_from": {"path": str(root / f"base-{layers}")}}
        blend = {"skip": [{"samples": "34-35"}, {"source": "pairs", "documents": ["1-2"]}]}
        keys = {**layouts.COMMON, **pairs.KEYS, **own, "blend": blend}
        keys = {key: value for key, value in keys.items() if not key.startswith("tokenizer")}
        pairs.make(
            pairs.write(root, {**keys, "train.validation": {"every_steps": 100, "samples": 5}}, f"of{layers}.yaml")
        )
        layouts.CHUNK_TOKENS[f"of{layers}"] = 101
    return root


@pytest.mark.guard
@pytest.mark.parallel
@pytest.mark.parametrize("name", first(1, CASES, rest="slow"))
def test_a_layout_computes_what_one_process_does(families: Path, processes: Callable[[int], Ranks], name: str) -> None:
    """Steps with skips of samples and documents, and the reference."""
    row = ROWS[name]
    family, ranks = f"of{row.layers}", processes(row.layout.world_size)
    assert layouts.compare(families, family, row, ranks) == []
    one = layouts.reference(families, family, row.layers)
    mine, theirs = ({r["step"]: r for r in read_metrics(run)} for run in (families / f"{family}-{name}", one))
    for step in range(layouts.SEED_STEP + 1, layouts.LAST_STEP + 1):
        assert mine[step]["preference_loss"] == pytest.approx(theirs[step]["preference_loss"], rel=1e-5)
        assert mine[step]["reward_chosen"] == pytest.approx(theirs[step]["reward_chosen"], abs=1e-4)
    values = [
        *(f"parallel={row.parallel.model_dump_json(exclude_unset=True)}", f"model.layers={row.layers}"),
        *("launch.reference_only=true", f"train.preference.reference_dir={families / name}"),
    ]
    ranks.call(layouts.train, families / f"{family}.yaml", values, timeout=300)
    made, wanted = (next(iter(place.iterdir())) for place in (families / name, _reference_of(families, row.layers)))
    ours, its = (reference.open_reference(place, dataset(families)).scores for place in (made, wanted))
    assert made.name == wanted.name and np.abs(ours - its).max() < 1e-4 * np.abs(its).max()


def _reference_of(root: Path, layers: int) -> Path:
    """The reference that one process has made for a model of some layers."""
    place = root / f"reference-{layers}"
    if not place.exists():
        values = ["launch.reference_only=true", f"train.preference.reference_dir={place}"]
        trainer.train(load(root / f"of{layers}.yaml", [*values, f"model.layers={layers}"]))
    return place
