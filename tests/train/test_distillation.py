"""Runs with a frozen teacher: against transformers by hand, across stops, on layouts, and what is refused."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pipeline.config.load import load
from pipeline.data.loading.batch import StepData
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint import export
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.distributed.layout import Layout
from pipeline.train.host.devices import DEVICES
from pipeline.train.loop.step import Stepper
from pipeline.train.model.flops import extra_flops, num_parameters
from pipeline.train.parallel.step_shapes import step_shapes
from pipeline.train.parallel.tested import OF_EXPERTS, OVERLAPPED, TESTED, WITHIN_LAYERS
from pipeline.train.planning.teacher import TeacherPlan
from pipeline.train.rules.layout_check import planned_spec
from pipeline.train.run.folder import read_metrics
from pipeline.train.start.teacher import _described
from tests import tiny
from tests.tiers import first
from tests.train.distributed.ranks import Ranks
from tests.train.huggingface.hf_mapping import randomize
from tests.train.parallel import layouts
from tests.train.runs import column, exact, start, train, weights_hash

VOCAB = 310
FP32 = ("train.precision.compute=fp32", "train.distill.dtype=fp32")
START = ("train.schedule.warmup=0 steps", "train.validation.samples=0")
LLAMA = ("model.ffn_dim=64", "model.kv_heads=1", f"model.vocab_size={VOCAB}", "model.norm_eps=1e-5")


def llama(root: Path, name: str, **keys: Any) -> Path:
    """A random Llama that takes the ids of the corpus."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["num_key_value_heads"] = 1
    config = LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=64, rms_norm_eps=1e-5, eos_token_id=0,
        bos_token_id=0, **{**sizes, **keys},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    randomize(model, seed=keys.get("num_hidden_layers", 5))
    model.save_pretrained(root / name, max_shard_size="50KB")
    run_tokenizer(load(root / "run.yaml")).save(root / name)
    return root / name


@pytest.fixture(scope="module")
def student(root: Path) -> Path:
    return llama(root, "student")


@pytest.fixture(scope="module")
def teacher(root: Path) -> Path:
    return llama(root, "teacher", hidden_size=48, num_attention_heads=4, num_hidden_layers=3)


@pytest.fixture(scope="module")
def donor(root: Path) -> Path:
    """A run of this suite, of another size than the student."""
    return train(root, "donor", "train.precision.compute=fp32", "model.dim=48", "model.layers=1", "train.ema.decay=0.5")


@pytest.mark.guard
@pytest.mark.parametrize(("weight", "temperature", "clip"), [(0.9, 1.0, 1.0), (0.4, 2.0, 0.1)])
def test_ten_steps_equal_transformers_by_hand(
    root: Path,
    student: Path,
    teacher: Path,
    monkeypatch: pytest.MonkeyPatch,
    weight: float,
    temperature: float,
    clip: float,
) -> None:
    seen: list[StepData] = []
    step = Stepper.step

    def watched(self: Stepper, data: StepData, lr: float) -> Any:
        seen.append(data)
        return step(self, data, lr)

    monkeypatch.setattr(Stepper, "step", watched)
    run = train(
        root, f"by-hand-{weight}", *FP32, *LLAMA, f"train.init_from.hf={student}",
        f"train.distill.teacher.hf={teacher}",
        f"train.distill.weight={weight}", f"train.distill.temperature={temperature}", "train.duration=10 steps",
        f"train.optimizer.clip_norm={clip}", "train.schedule={type: constant, warmup: 0 steps}",
        "train.loss.chunk_tokens=23", "model.document_attention=false",
    )  # fmt: skip
    monkeypatch.undo()
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (student, teacher))
    matrices, vectors = ([p for p in ours.parameters() if (p.ndim >= 2) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    rows = [row for row in read_metrics(run) if "loss" in row]
    assert len(rows) == len(seen) == 10
    for row, data in zip(rows, seen, strict=True):
        optimizer.zero_grad()
        sums = torch.zeros(3, dtype=torch.float64)
        for batch in data.micro_batches:
            logits = ours(batch.tokens).logits
            with torch.no_grad():
                wanted = theirs(batch.tokens).logits
            losses = [
                F.cross_entropy(each.flatten(0, 1), batch.targets.flatten(), reduction="none")
                for each in (logits, wanted)
            ]
            p, q = ((each.flatten(0, 1) / temperature).softmax(-1) for each in (wanted, logits))
            kl = (p * (p.log() - q.log())).sum(-1)
            flat = batch.weight.flatten() / data.valid_targets
            total = (((1 - weight) * losses[0] + weight * temperature**2 * kl) * flat).sum()
            total.backward()
            sums += torch.stack([(each.detach() * flat).sum().double() for each in (losses[0], kl, losses[1])])
        norm = torch.nn.utils.clip_grad_norm_(ours.parameters(), clip)
        optimizer.step()
        found = [row[key] for key in ("loss", "teacher_divergence", "teacher_loss")]
        assert found == pytest.approx(sums.tolist(), rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.guard
def test_a_teacher_that_is_the_student_teaches_nothing(root: Path) -> None:
    """With `weight: 1` there is no gradient at all, however the teacher is named."""
    donor = train(root, "same", "train.precision.compute=fp32", "train.checkpoint.keep=9")
    exported = root / "same-exported"
    quiet = Console(file=io.StringIO())
    export.export(Checkpoints.of_run(donor), exported, step=None, weights="model", max_shard=2**16, console=quiet)
    checkpoint = donor / "checkpoints" / "step-00000008"
    for number, path in enumerate((donor, checkpoint, exported)):
        keys = (*FP32, f"train.init_from.path={path}", f"train.distill.teacher.path={path}", "train.distill.weight=1")
        run = train(root, f"taught-{number}", *keys, "train.duration=1 steps", "train.distill.temperature=2", *START)
        (row,) = [row for row in read_metrics(run) if "loss" in row]
        assert row["teacher_divergence"] == row["grad_norm"] == 0
        assert row["teacher_loss"] == pytest.approx(row["loss"], rel=1e-6)


def test_a_weight_of_0_is_a_run_without_teacher(root: Path) -> None:
    """Which is not even looked for."""
    keys = ("train.duration=3 steps", "train.validation.samples=0")
    plain = train(root, "plain", *keys)
    nothing = train(root, "nothing", *keys, "train.distill={teacher: {hf: /nowhere}, weight: 0}")
    assert exact(plain) == exact(nothing) and weights_hash(plain) == weights_hash(nothing)
    assert "teacher_loss" not in read_metrics(nothing)[0]


@pytest.mark.guard
def test_a_resumed_run_is_the_straight_one(root: Path, donor: Path, teacher: Path) -> None:
    """And another teacher, none, or other settings are refused by name."""
    keys = ("train.loss.chunk_tokens=40", "train.distill.temperature=1.5", "train.schedule.type=constant")
    own = (*keys, f"train.distill.teacher.path={donor}")
    straight = train(root, "straight", *own)
    train(root, "split", *own, "train.duration=4 steps")
    moved = root / "moved"
    shutil.copytree(donor, moved)
    split = train(root, "split", *keys, f"train.distill.teacher.path={moved}")
    assert exact(straight) == exact(split) and weights_hash(straight) == weights_hash(split)
    for name in ("teacher_divergence", "teacher_loss"):
        assert column(straight, name) == column(split, name)
    more = "train.duration=9 steps"
    for override, words in (
        ("train.distill=null", "train.distill: {dtype: bf16, teacher: "),
        ("train.distill.weight=0", "-> none"),
        ("train.distill.weight=0.5", "train.distill.weight: 0.9 -> 0.5"),
        ("train.distill.dtype=fp32", "train.distill.dtype: bf16 -> fp32"),
        ("train.distill.temperature=1", "train.distill.temperature: 1.5 -> 1"),
        ("train.distill.teacher.weights=ema", "train.distill.teacher: "),
    ):
        code, out = start(root, "split", *own, more, override)
        assert code == 2 and words in out and "resume.allow=[distill]" in out, out
    code, out = start(root, "split", *own, more, "train.distill.weight=0.5", "resume.allow=[distill, schedule]")
    assert code == 0 and "train.distill.weight: 0.9 -> 0.5" in out


@pytest.mark.guard
def test_what_does_not_fit_is_refused_by_name(root: Path, donor: Path, teacher: Path, tmp_path: Path) -> None:
    run_of = f"train.distill.teacher.path={donor}"
    other = tmp_path / "other"
    other.mkdir()
    tiny.write_corpus(other / "sea", seed=7)
    tiny.write_corpus(other / "land", seed=8)
    (other / "land" / "000.txt").write_text("the quick brown fox jumps over lazy dogs. " * 20)
    preprocess(load(tiny.write_run(other)))
    foreign = train(other, "foreign")
    for keys, words in (
        ((f"train.distill.teacher.hf={teacher}",), "310 tokens with logits, and this run's"),
        ((f"train.distill.teacher.path={foreign}",), "were trained with another tokenizer"),
        ((f"train.distill.teacher.path={root / 'none'}",), "train.distill.teacher.path: there is no folder"),
        ((f"train.distill.teacher.hf={root}",), "has no config.json"),
        ((run_of, "train.distill.teacher.step=7"), "7"),
        ((run_of, "model.mtp.depth=1"), "train.distill does not work with model.mtp"),
        ((run_of, "model.vocab_multiple=32"), "model.vocab_multiple"),
        ((run_of, "model.direction=both", "train.objective.type=masked"), "model.direction=both"),
    ):
        code, out = start(root, "refused", *keys)
        assert code == 2 and words in out, (keys, out)
    code, out = start(root, "refused", run_of, "parallel.pp=2", "launch.processes=2")
    assert code == 2


@pytest.mark.guard
def test_a_teacher_has_its_own_tokens(root: Path, teacher: Path, tmp_path: Path) -> None:
    """Those that the run adds to its own tokenizer are not given to it, and those that it has count."""
    keys = f"tokenizer={{path: {teacher}, add_tokens: [<|turn|>]}}"
    folder = shutil.copytree(teacher, tmp_path / "has")
    Tokenizer.load(teacher, load(root / "run.yaml", [keys]).tokenizer).save(folder)
    for place, has in ((teacher, False), (folder, True)):
        config = load(root / "run.yaml", [keys, f"train.distill.teacher.hf={place}"])
        own = _described(config).tokenizer
        assert own is not None and ("<|turn|>" in own.special_tokens) is has


@pytest.mark.guard
def test_a_damaged_teacher_is_refused(root: Path, donor: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(donor, copy)
    file = next((copy / "checkpoints" / "step-00000008").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    path = copy / "checkpoints" / "step-00000008"
    code, out = start(root, "damaged", f"train.distill.teacher.path={path}")
    assert code == 2 and file.name in out, out


def test_a_plan_prices_the_teacher(root: Path, donor: Path) -> None:
    """Two FLOPs per weight of its matrices besides what training takes, and two bytes per weight."""
    config = load(root / "run.yaml", [f"train.distill.teacher.path={donor}", "model.document_attention=true"])
    spec = planned_spec(config)
    found = TeacherPlan.of(config, spec)
    assert found is not None and found.spec.dim == 48 and len(found.spec.layers) == 1
    shape = step_shapes(config, 1)[0]
    layer = sum(matrix.elements for matrix in found.spec.layers[0].matrices.values())
    scores = extra_flops(found.spec.layers[0], shape.stream, causal=False)
    assert found.flops(shape, causal=False) == pytest.approx(2 * (layer + 48 * spec.vocab_size) + scores)
    weights, tokens = 2 * num_parameters(found.spec), 2 * 32
    logits = tokens * spec.vocab_padded * (2 + 3 * 4)
    assert found.bytes(Layout(), shape) == weights + 2 * tokens * 48 + logits
    halved = found.bytes(Layout(dp_shard=2), shape)
    assert halved == weights // 2 + 2 * 48 * (2 * spec.vocab_padded + 1) + 2 * tokens * 48 + logits
    assert found.seconds(Layout(), shape, DEVICES["h100"]) > 0


ROWS = {row.name: row for row in (*TESTED, *WITHIN_LAYERS, *OVERLAPPED, *OF_EXPERTS)}
CASES = [
    ("llama", "mixtral", "tp2"),
    ("mixtral", "llama", "fsdp2-reshard-ep2"),
    ("gpt2", "llama", "reshard-cp2-all_gather"),
    ("qwen3", "latent", "fsdp2-keep"),
    ("llama", "mixtral", "fsdp2-reshard-tp2"),
    ("mixed", "qwen3", "ddp2"),
    ("mixed", "delta", "reshard-cp2-ulysses"),
    ("llama", "qwen3", "tp2-no_sp"),
    ("branches", "llama", "fsdp2-reshard-full"),
    ("llama", "mixtral", "hsdp2x2-keep"),
    ("llama", "qwen3", "fsdp2-reshard-compiled"),
    ("mixtral", "mixtral", "fsdp2-reshard-cp2-all_gather"),
]
"""Family of the student, that of the teacher, and the layout."""


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run files of all pairs, with loss weights; teachers are trained when they are needed."""
    root = tmp_path_factory.mktemp("taught")
    weights = {
        "data.sources": [{**each, "loss_weight": 1 + i} for i, each in enumerate(tiny.values(root)["data"]["sources"])]
    }
    for student, teacher, _ in CASES:
        common = {
            **layouts.COMMON,
            **weights,
            "data.loader": {"packing": "best_fit" if student == "llama" else "windows"},
        }
        distill = {"teacher": {"path": str(root / f"teacher-{teacher}")}, "temperature": 1.5, "dtype": "fp32"}
        tiny.write_run(
            root, {**common, **layouts.FAMILIES[teacher], "model.dim": 48, "model.layers": 2}, f"teacher-{teacher}.yaml"
        )
        preprocess(
            load(
                tiny.write_run(
                    root, {**common, **layouts.FAMILIES[student], "train.distill": distill}, f"{student}.{teacher}.yaml"
                )
            )
        )
    return root


@pytest.mark.guard
@pytest.mark.parallel
@pytest.mark.parametrize(("student", "teacher", "name"), first(1, CASES, rest="slow"))
def test_a_layout_computes_what_one_process_does(
    taught: Path, processes: Callable[[int], Ranks], student: str, teacher: str, name: str
) -> None:
    row, family = ROWS[name], f"{student}.{teacher}"
    if not (taught / f"teacher-{teacher}").exists():
        layouts.CHUNK_TOKENS.setdefault(family, 37)
        train(taught, f"teacher-{teacher}", "train.duration=2 steps", file=f"teacher-{teacher}.yaml")
    layouts.CHUNK_TOKENS[family] = 37
    assert layouts.compare(taught, family, row, processes(row.layout.world_size)) == []
    one = layouts.reference(taught, family, row.layers)
    mine, theirs = ({r["step"]: r for r in read_metrics(run)} for run in (taught / f"{family}-{name}", one))
    for step in range(layouts.SEED_STEP + 1, layouts.LAST_STEP + 1):
        for key in ("teacher_divergence", "teacher_loss", "weighted_loss"):
            assert mine[step][key] == pytest.approx(theirs[step][key], rel=1e-5)
        assert mine[step]["teacher_divergence"] > 1e-3
