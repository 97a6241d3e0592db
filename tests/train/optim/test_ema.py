"""The moving average of the weights: against its closed form, withheld steps, checkpoints, evaluation."""

import shutil
from pathlib import Path

import pytest
import torch

from pipeline.cli.main import main
from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.train import EmaConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.perplexity import evaluate, read_report
from pipeline.train.optim.ema import Ema
from pipeline.train.parallel.parallelize import ParallelModel, build_model
from pipeline.train.start.setup import load_for_inference
from tests import tiny
from tests.train.one_process import config_of, setup_of
from tests.train.optim.averages import averages_differ, tensors
from tests.train.runs import start, train, weights_hash

CPU = torch.device("cpu")
MODEL = ModelConfig(layers=2, dim=32, heads=2, vocab_multiple=8)


def model() -> ParallelModel:
    config = config_of(MODEL, sequence_length=16, precision={"compute": "fp32"})
    return build_model(config, setup_of(config))


def bits(ema: Ema) -> dict[str, torch.Tensor]:
    return {name: average.to_local().view(torch.int32).clone() for name, average in ema.averages.items()}


def change(of: ParallelModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in of.named_parameters():
            local = parameter.to_local()
            local.add_(torch.randn(local.shape, generator=generator))


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.9999])
def test_the_average_is_a_geometric_sum_of_the_weights(decay: float) -> None:
    trained = model()
    ema = Ema(EmaConfig(decay=decay), trained)
    history = [{name: p.full_tensor().double() for name, p in trained.named_parameters()}]
    for step in range(5):
        change(trained, step)
        ema.update(torch.tensor(True))
        history.append({name: p.full_tensor().double() for name, p in trained.named_parameters()})
    for name, average in ema.averages.items():
        expected = decay**5 * history[0][name]
        expected += sum((1 - decay) * decay ** (5 - step) * history[step][name] for step in range(1, 6))
        torch.testing.assert_close(average.full_tensor().double(), expected, rtol=1e-5, atol=1e-6)
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter.full_tensor().double(), history[-1][name]), "the weights are only read"
        assert parameter.grad is None


@pytest.mark.parametrize("poison", [1.0, float("inf"), float("nan")])
def test_a_withheld_step_changes_no_bit_of_the_average(poison: float) -> None:
    trained = model()
    with torch.no_grad():
        trained.whole.norm.weight.to_local()[:2] = torch.tensor([-0.0, 0.0])
    ema = Ema(EmaConfig(decay=0.9), trained)
    change(trained, 0)
    ema.update(torch.tensor(False))
    trained.whole.norm.weight.to_local().data.fill_(poison)
    before = bits(ema)
    assert before["norm.weight"][0] != before["norm.weight"][1], "a negative zero stays one"
    ema.update(torch.tensor(False))
    for name, value in bits(ema).items():
        assert torch.equal(value, before[name]), name


def test_it_starts_again_from_the_weights() -> None:
    trained = model()
    ema = Ema(EmaConfig(decay=0.9), trained)
    change(trained, 0)
    ema.reset()
    for name, parameter in trained.named_parameters():
        assert torch.equal(ema.averages[name].full_tensor(), parameter.full_tensor())
        assert ema.averages[name].to_local().data_ptr() != parameter.to_local().data_ptr()
    change(trained, 1)
    ema.update(torch.tensor(True))
    assert not torch.equal(ema.averages["norm.weight"].full_tensor(), trained.whole.norm.weight.full_tensor())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ema")
    # Every checkpoint stays, so that the average can be made again from the files.
    checkpoint = {"every_steps": 1, "keep": 99}
    file = tiny.write_run(
        folder,
        {
            "train.checkpoint": checkpoint,
            "train.precision.compute": "fp32",
            "train.validation.samples": 0,
            "model.tie_embeddings": True,
        },
    )
    preprocess(load(file))
    return folder


@pytest.fixture(scope="module")
def run(root: Path) -> Path:
    return train(root, "averaged", "train.ema.decay=0.8")


def seeded(root: Path, name: str, of: Path, step: int) -> Path:
    """A run folder that has one checkpoint of another."""
    checkpoint = f"checkpoints/step-{step:08d}"
    shutil.copytree(of / checkpoint, root / name / checkpoint)
    return root / name


def test_every_checkpoint_has_the_average_of_the_weights_so_far(root: Path, run: Path) -> None:
    assert averages_differ(run, 0.8, first=1, last=8) == []


@pytest.mark.slow
def test_the_average_does_not_change_the_training(root: Path, run: Path) -> None:
    without = train(root, "without")
    for name, weight in tensors(without, 8, "model").items():
        assert torch.equal(weight, tensors(run, 8, "model")[name]), name
    assert tensors(without, 8, "ema") == {}


def test_a_resumed_average_equals_an_uninterrupted_one_bit_for_bit(root: Path, run: Path) -> None:
    resumed = seeded(root, "resumed", run, 3)
    train(root, "resumed", "train.ema.decay=0.8")
    assert weights_hash(resumed) == weights_hash(run)


@pytest.mark.guard
def test_an_average_that_is_turned_on_later_starts_from_the_weights(root: Path) -> None:
    plain = train(root, "plain")
    later = seeded(root, "later", plain, 4)
    train(root, "later", "train.ema.decay=0.8")
    assert averages_differ(later, 0.8, first=4, last=8, given=False) == []


@pytest.mark.slow
def test_an_average_that_is_turned_off_is_left_alone(root: Path, run: Path) -> None:
    off = seeded(root, "off", run, 5)
    train(root, "off")
    assert tensors(off, 8, "ema") == {}
    for name, weight in tensors(off, 8, "model").items():
        assert torch.equal(weight, tensors(run, 8, "model")[name]), name


def test_the_average_is_what_is_evaluated_and_continues_prompts(
    root: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline.eval.text import continue_prompt

    trained = load(root / "run.yaml", [f"run.dir={run}", "train.ema.decay=0.8"])
    averaged = load(root / "run.yaml", [f"run.dir={run}", "train.ema.decay=0.8", "eval.weights=ema"])
    for config, section in ((trained, "model"), (averaged, "ema")):
        loaded = load_for_inference(config, 6).model
        expected = tensors(run, 6, section)
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter.full_tensor(), expected[name]), (section, name)
    one, other = evaluate(trained, 6), evaluate(averaged, 6)
    assert one.blended.loss != other.blended.loss
    assert read_report(trained, 6) == one
    assert read_report(averaged, 6) == other
    assert "held-out loss of the moving average at step 6" in capsys.readouterr().out
    continue_prompt(averaged, 6)
    assert "step-00000006, moving average:" in capsys.readouterr().out


def test_a_checkpoint_without_an_average_is_refused_where_one_is_asked_for(root: Path) -> None:
    bare = train(root, "bare", "train.duration=2 steps")
    config = load(root / "run.yaml", [f"run.dir={bare}", "train.ema.decay=0.8", "eval.weights=ema"])
    with pytest.raises(UserError, match=r"step-00000002 has no moving average of the weights .*train\.ema"):
        evaluate(config)


def test_an_average_that_nobody_keeps_cannot_be_evaluated(root: Path) -> None:
    with pytest.raises(UserError, match=r"eval\.weights: 'ema' needs train\.ema"):
        load(root / "run.yaml", ["eval.weights=ema"])


def test_check_counts_the_average(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = {}
    for values in ((), ("train.ema.decay=0.9",)):
        monkeypatch.setattr("sys.argv", ["pipeline", "train", str(root / "run.yaml"), *values, "--check"])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfd.readouterr()
        assert left.value.code == 0, err
        text[values] = out
    assert "weights, moments, gradients + " in text[()]
    assert "weights, moments, gradients, moving average + " in text["train.ema.decay=0.9",]


def test_a_wrong_decay_is_refused(root: Path) -> None:
    code, out = start(root, "wrong", "train.ema.decay=1")
    assert code == 2
    assert "train.ema.decay" in out
