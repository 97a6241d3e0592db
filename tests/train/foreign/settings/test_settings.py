"""Settings of other suites become run files in which every setting is accounted for; nothing of a file is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.config.parsing.schema import keys
from pipeline.config.root import Config
from pipeline.train.doc_tables import page
from pipeline.train.foreign.megatron import MegatronCheckpoint
from pipeline.train.foreign.settings.rows import SuiteName, read_suite
from pipeline.train.foreign.settings.rules import Given
from pipeline.train.foreign.settings.translate import convert_config, rules_of, translate, written
from pipeline.train.foreign.settings.values import read_values
from tests.train.foreign.test_megatron import write

HERE = Path(__file__).parent
DOCS = Path(__file__).parents[4] / "docs" / "coming-from"
SUITES: tuple[SuiteName, ...] = get_args(SuiteName)
FILES: dict[SuiteName, str] = {
    "megatron": "megatron.sh",
    "torchtitan": "torchtitan.toml",
    "nanotron": "nanotron.yaml",
    "olmo": "olmo.json",
    "nemo": "nemo.yaml",
}


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix[:-1]: values}
    return {key: leaf for name, each in values.items() for key, leaf in flat(each, f"{prefix}{name}.").items()}


def translated(suite: SuiteName, *given: str) -> tuple[dict[str, Any], str]:
    """Values of the run file by key, and its text."""
    values, notes = read_values(suite, given)
    found = translate(suite, values)
    found.notes += notes
    text = written(found, read_suite(suite))
    return flat(yaml.safe_load(text)), text


@pytest.mark.parametrize("suite", SUITES)
def test_rows_have_rules_and_keys(suite: SuiteName) -> None:
    known = {key.path for key in keys(Config)}
    for row in read_suite(suite).rows():
        assert row.rule is None or row.rule in rules_of(suite), row
        assert row.to is None or row.to in known, row
        assert row.rule is None or row.keys, row
    page_of = DOCS / read_suite(suite).page
    assert page(f"coming-from/{page_of.name}", page_of.read_text()) == page_of.read_text(), "run make docs"


EXPECTED: dict[SuiteName, dict[str, Any]] = {
    "megatron": {
        "model.layers": 32,
        "model.dim": 4096,
        "model.kv_heads": 8,
        "model.ffn_dim": 14336,
        "model.mlp": "swiglu",
        "model.vocab_size": 129024,
        "model.dropout": 0,
        "parallel.tp": 8,
        "parallel.sequence_parallel": True,
        "train.optimizer.betas": [0.9, 0.95],
        "train.schedule.type": "???",
        "train.schedule.warmup": "430 steps",
        "train.schedule.min_ratio": 0.1,
        "train.validation.samples": 12800,
        "train.precision.compute": "bf16",
        "train.duration": "500000 steps",
        "tokenizer.path": "/tok/tokenizer.json",
        "data.sources": [
            {"name": "a_text_document", "dataset": "/c/a_text_document-adopted", "weight": 0.3},
            {"name": "b_text_document", "dataset": "/c/b_text_document-adopted", "weight": 0.7},
        ],
    },
    "torchtitan": {
        "train.sequence_length": 8192,
        "train.duration": "1000 steps",
        "train.schedule.type": "wsd",
        "train.schedule.decay": "200 steps",
        "train.schedule.min_ratio": 0.0,
        "train.recompute.mode": "selective",
        "parallel.tp": 4,
    },
    "nanotron": {
        "model.dim": 16,
        "model.layers": 2,
        "train.batch_size": 4,
        "train.duration": "15 steps",
        "train.optimizer.lr": 0.0003,
        "parallel.pp": 2,
        "parallel.reshard_after_forward": False,
    },
    "olmo": {
        "model.dim": 2048,
        "train.duration": "4000000000000 tokens",
        "train.batch_size": 1024,
        "train.micro_batch_size": 4,
        "train.schedule.type": "cosine",
        "train.loss.z_loss": 1e-5,
        "train.checkpoint.every_steps": 250,
    },
    "nemo": {"model.layers": 32, "train.optimizer.lr": 3e-4, "train.schedule.min_ratio": 0.1},
}


@pytest.mark.parametrize("suite", SUITES)
def test_every_setting_is_accounted_for(suite: SuiteName) -> None:
    found, text = translated(suite, str(HERE / FILES[suite]))
    assert {key: found[key] for key in EXPECTED[suite]} == EXPECTED[suite]
    suite_rows, values = read_suite(suite), read_values(suite, [str(HERE / FILES[suite])])[0]
    for name, value in values.items():
        shown = f"--{name.replace('_', '-')}" if suite == "megatron" else name
        silent = (
            name in suite_rows.ignored
            or value in (None, False)
            or value == Given({}, suite_rows.defaults).get(name)
            or re.search(rf"{re.escape(name.rpartition('.')[2])}\b", " ".join(_helpers(suite)))
        )
        assert silent or shown in text, name


def _helpers(suite: SuiteName) -> list[str]:
    """Settings that decide the value of another one together with it."""
    return {
        "megatron": ["max_position_embeddings", "lr_decay_iters"],
        "torchtitan": ["training.local_batch_size"],
        "nanotron": ["dp", "vocab_size", "limit_val_batches", "val_check_interval", "lr_decay_steps"],
        "olmo": ["unit", "max_sequence_length", "init_seed", "name"],
        "nemo": [],
    }[suite]


def test_a_run_file_of_a_script_trains(tmp_path: Path) -> None:
    to = tmp_path / "run.yaml"
    text = (HERE / "megatron.sh").read_text().replace("--lr-decay-iters 430000", "")
    (tmp_path / "run.sh").write_text(text.replace("$CHECKPOINT_PATH", "run"))
    convert_config("megatron", [str(tmp_path / "run.sh")], to)
    config = load(to)
    assert config.model.heads == 32 and config.train.schedule.warmup.count == 500
    assert config.parallel.reshard_after_forward is False and config.train.validation.samples == 12800
    with pytest.raises(UserError, match="is there already"):
        convert_config("megatron", [str(tmp_path / "run.sh")], to)


def test_forms_of_arguments() -> None:
    small = "--num-layers=2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128".split()
    found, _ = translated("megatron", *small, "--fp16")
    assert found["model.mlp"] == "gelu" and found["model.norm"] == "layernorm" and found["model.bias"] == "all"
    assert found["train.precision.compute"] == "fp16" and found["model.tie_embeddings"] is True
    assert found["train.precision.loss_scale.initial"] == 2**32 and found["train.optimizer.betas"] == [0.9, 0.999]
    found, text = translated("megatron", "--lr", "1e-3", "--multi-latent-attention", *small)
    assert found["model.layers"] == "???" and "multi_latent_attention" in text and found["train.optimizer.lr"] == 1e-3
    found, _ = translated("megatron", *small, "--swiglu", "--num-experts", "4", "--moe-router-topk", "1")
    assert found["model.experts.count"] == 4 and found["model.experts.top_k"] == 1
    assert found["train.balance.loss"] == 0.0
    found, _ = translated("megatron", *small, "--no-bias-gelu-fusion")
    assert found["model.mlp"] == "gelu_exact"


def test_arguments_in_a_checkpoint(tmp_path: Path) -> None:
    """`model:` is that of `convert from-megatron`."""
    write(tmp_path)
    found, _ = translated("megatron", str(tmp_path))
    spec = MegatronCheckpoint(tmp_path).spec
    assert found["model.layers"] == len(spec.layers) and found["model.dim"] == spec.dim
    assert found["model.vocab_size"] == spec.vocab_size


def test_scripts(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        'LR=1e-3\nARGS="--lr $LR --bf16"\nDATA=${DATA:-/d}\nrun $ARGS --train-iters ${STEPS:-7} --seed $X # --x\n'
    )
    values, notes = read_values("megatron", [str(script)])
    assert values == {"lr": 1e-3, "bf16": True, "train_iters": 7, "seed": "$X"}
    assert notes == ["--seed: the value of $X is not known; write it in"]
    script.write_bytes(b"--lr \xff")
    with pytest.raises(UserError, match="is not a script"):
        read_values("megatron", [str(script)])
    script.write_text("--lr 'x")
    with pytest.raises(UserError, match="is not a script"):
        read_values("megatron", [str(script)])


@pytest.mark.parametrize(
    ("script", "expected", "says"),
    [
        ("--save ${M##*/} \\\n--a run#3 \\\n--lr 1 # --b\n", {"save": "${M##*/}", "a": "run#3", "lr": 1}, ""),
        ('ARGS="$ARGS --lr 1"\nARGS+=" --seed 2"\nrun --bf16 $ARGS', {"lr": 1, "seed": 2, "bf16": True}, ""),
        ('cmd="torchrun p.py ${O} --lr 1"; eval $cmd', {"lr": 1}, "the options in ${O} are not known"),
        ("if x; then LR=1; else LR=2; fi\nrun --lr $LR", {"lr": 2}, "LR is set to 1 and to 2, which is taken"),
        ("A=1\nA=$A/b\nA+=c\nrun --save $A", {"save": "1/bc"}, ""),
        ("run --disable-bias-linear\necho done", {"add_bias_linear": False}, ""),
        ("run --swiglu --seed 1 2>&1 | tee log", {"swiglu": True, "seed": 1}, ""),
        ("run --log-x 2>&1 | tee log", {"log_x": True}, ""),
        ("run --log-x $EXTRA_ARGS", {"log_x": True}, "the options in $EXTRA_ARGS are not known"),
        ("run --seed 1 --bf16 $EXTRA", {"seed": 1, "bf16": True}, "the options in $EXTRA are not known"),
        ("run --seed x2>log", {"seed": "x2"}, ""),
        ("run --seed $(nproc)", {"seed": "$"}, "--seed: the value of $(...) is not known"),
        ("A='\n--lr 1\n--seed\n2'\nrun $A", {"lr": 1, "seed": 2}, ""),
        ("A=(\n--lr 1 # x\n--seed\n2\n)\nrun ${A[@]}", {"lr": 1, "seed": 2}, ""),
        (
            "python prep.py --lr 7\npython pretrain.py --lr 1\npython eval.py --lr 3",
            {"lr": 1},
            "of another command are not read, that of eval.py",
        ),
        ("A='--lr 1'\nA='--lr 2'", {"lr": 2}, "--lr: given as 1 and as 2, which is taken"),
    ],
)
def test_lines_of_scripts(tmp_path: Path, script: str, expected: dict[str, Any], says: str) -> None:
    (tmp_path / "run.sh").write_text(script)
    values, notes = read_values("megatron", [str(tmp_path / "run.sh")])
    assert values == expected
    assert says in "\n".join(notes) if says else notes in ([], ["--save: the value of ${M is not known; write it in"])


def test_variables_that_double(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("A=0123456789\n" + "A=$A$A\n" * 60 + "run --save $A")
    with pytest.raises(UserError, match="values of variables"):
        read_values("megatron", [str(tmp_path / "run.sh")])


@pytest.mark.parametrize(
    ("suite", "text", "says"),
    [
        ("nemo", "a: &a [1]\nb: [*a, *a]\n", "aliases"),
        ("nanotron", "- 1\n", "has no sections"),
        ("nanotron", "a: [" * 3000, "cannot be read"),
        ("olmo", '{"a":' * 100 + "1" + "}" * 100, "nested deeper"),
        ("olmo", "{", "cannot be read"),
        ("torchtitan", "a = ", "cannot be read"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, suite: SuiteName, text: str, says: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(UserError, match=says):
        read_values(suite, [str(tmp_path / "file")])
    with pytest.raises(UserError, match="there is no such file"):
        read_values(suite, [str(tmp_path / "none")])


def test_nothing_in_a_file_becomes_more_than_a_text(tmp_path: Path) -> None:
    path = tmp_path / "nemo.yaml"
    path.write_text(
        "_target_: os.system\nargs: !!python/object/apply:os.system ['touch x']\n"
        '"config.num_layers": [1, {2: 3}]\n"a\\nrun:\\n  dir: /evil": 3\nmin_lr: {}\nlr: no\n'
    )
    found, text = translated("nemo", str(path))
    assert found["run.dir"] == "runs/converted" and not (Path.cwd() / "x").exists()
    assert "os.system" in text
    for value in ("x", -1, [], {}, [[1]], float("nan"), 10**400, None, True):
        names = [key for row in read_suite("megatron").rows() for key in row.keys]
        yaml.safe_load(written(translate("megatron", dict.fromkeys(names, value)), read_suite("megatron")))


def test_samples_are_tokens_while_the_batch_grows() -> None:
    ramp = "--rampup-batch-size 16 8 1000 --global-batch-size 64 --seq-length 128".split()
    samples = "--train-samples 6400 --lr-warmup-samples 640".split()
    found, _ = translated("megatron", *ramp, *samples)
    assert found["train.duration"] == f"{6400 * 128} tokens" and found["train.schedule.warmup"] == f"{640 * 128} tokens"
    found, _ = translated("megatron", *ramp[4:], *samples)
    assert found["train.duration"] == "100 steps" and found["train.schedule.warmup"] == "10 steps"


def test_arguments_with_a_condition() -> None:
    found, _ = translated("megatron", "--data-path", "/a", "/b")
    assert [source.get("weight") for source in found["data.sources"]] == [None, None]
    wsd = "--lr-decay-style WSD --lr-wsd-decay-iters 10".split()
    found, text = translated("megatron", *wsd)
    assert found["train.schedule.decay"] == "???" and "(10 steps) is exponential there" in text
    found, text = translated("megatron", *wsd, "--lr-wsd-decay-style", "linear")
    assert found["train.schedule.decay"] == "10 steps" and "lr-wsd-decay-style" not in text
    found, text = translated("megatron", "--save", "/a", "--load", "/b")
    assert found["run.dir"] == "/a" and "train.init_from: --load /b is another folder" in text
    found, text = translated("megatron", "--reset-position-ids")
    assert "model.document_attention" not in found and "positions begin anew" in text
    found, _ = translated("megatron", "--reset-position-ids", "--reset-attention-mask")
    assert found["model.document_attention"] is True
    small = "--num-layers 2 --hidden-size 64 --num-attention-heads 4".split()
    found, _ = translated("megatron", *small, "--use-rotary-position-embeddings")
    assert found["model.positions"] == "rope" and found["model.layers"] == 2


def _of_text(suite: SuiteName, text: str, path: Path) -> tuple[dict[str, Any], str]:
    path.write_text(text)
    return translated(suite, str(path))


def test_defaults_of_suites(tmp_path: Path) -> None:
    path = tmp_path / "file"
    found, _ = _of_text("torchtitan", "[compile]\nenable = true\n", path)
    assert found["train.compile"] is True
    found, _ = _of_text("nemo", "optim:\n  config: {adam_beta1: 0.8, clip_grad: 0.0, lr: 3e-5}\n", path)
    assert found["train.optimizer.betas"] == [0.8, 0.999] and found["train.optimizer.weight_decay"] == 0.01
    assert found["train.optimizer.clip_norm"] is None and found["train.optimizer.lr"] == 3e-5
    rest = '"trainer": {"max_duration": {"value": 1000, "unit": "steps"}}}'
    scheduler = '{"train_module": {"optim": {"lr": 0.5}, "scheduler": {"_CLASS_": "x.WSD", "warmup": 10%s}}, ' + rest
    found, _ = _of_text("olmo", scheduler % "", path)
    assert found["train.schedule.decay"] == "100 steps" and found["train.schedule.min_ratio"] == 0.0
    found, _ = _of_text("olmo", scheduler % ', "decay_min_lr": 0.05, "decay": 20', path)
    assert found["train.schedule.decay"] == "20 steps" and found["train.schedule.min_ratio"] == 0.1


def test_decay_of_nanotron(tmp_path: Path) -> None:
    path = tmp_path / "file"
    text = (
        "tokens: {train_steps: 100}\noptimizer:\n  learning_rate_scheduler: {lr_decay_style: %s, lr_warmup_steps: 10, "
    )
    found, _ = _of_text("nanotron", text % "linear" + "lr_decay_starting_step: 80, lr_decay_steps: 20}", path)
    assert found["train.schedule.type"] == "wsd" and found["train.schedule.decay"] == "20 steps"
    found, shown = _of_text("nanotron", text % "linear" + "lr_decay_starting_step: 80, lr_decay_steps: null}", path)
    assert found["train.schedule.type"] == "???" and "it ends at step 170" in shown
    found, _ = _of_text("nanotron", text % "cosine" + "lr_decay_steps: 90}", path)
    assert found["train.schedule.type"] == "cosine"
    found, _ = _of_text("nanotron", text % "cosine" + "lr_decay_steps: 50}\n  clip_grad: null", path)
    assert found["train.optimizer.clip_norm"] is None
    assert found["train.schedule.type"] == "???"


def test_short_names_that_fit_several_settings(tmp_path: Path) -> None:
    found, text = _of_text("nemo", "a: {weight_decay: 3}\noptim:\n  config: {weight_decay: 0.2}\n", tmp_path / "file")
    assert found["train.optimizer.weight_decay"] == 0.2
    assert "optim.config.weight_decay is taken; there is a.weight_decay too" in text and "a.weight_decay 3" in text
    _, text = _of_text("nemo", "fancy: false\nother: false\n", tmp_path / "file")
    assert "false: fancy, other" in text


@pytest.mark.parametrize(
    "text", ["a" + ".a" * 70 + ": 1\n", "a" * 600 + ": 1\n", "".join(f"a{n}: 1\n" for n in range(20_001))]
)
def test_settings_that_are_too_many(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(UserError, match=r"letters or 64 sections|more than 20,000 settings"):
        read_values("nemo", [str(tmp_path / "file")])


def test_a_name_of_an_option_that_is_too_long() -> None:
    with pytest.raises(UserError, match="64 sections"):
        read_values("megatron", ["--a" + ".a" * 70, "1"])


def test_a_word_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("run --lr " + "${a:-" * 100_000)
    with pytest.raises(UserError, match="a word has more than"):
        read_values("megatron", [str(tmp_path / "run.sh")])
