"""Groups of parameters: torch's optimizers with groups made by hand, what is refused, what is printed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.optim.parameter_groups import group_lines
from pipeline.train.parallel.parallelize import ParallelModel, build_model
from pipeline.train.rules.layout import check_layout, layout_warnings
from pipeline.train.rules.layout_check import check
from pipeline.train.torch_compat.core import with_local
from tests.config.runfile import refused, write
from tests.train.one_process import config_of, setup_of
from tests.train.runs import column, start, train

SHAPE = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "qk_norm": True, "vocab_multiple": 8}
LR, DECAY, YES = 1e-2, 0.1, torch.tensor(True)
GROUPS: list[dict[str, Any]] = [
    {"match": "layers.1.mixer.wq.weight"},
    {"match": ["embedding.weight", "layers.*.mixer.w[qkv].*"], "lr_scale": 0.5},
    {"match": "*norm.weight", "weight_decay": 0.3, "lr_scale": 2},
    {"match": "*.w2.*", "weight_decay": 0.0},
]


def by_hand(name: str) -> tuple[float, float]:
    """Factor on the learning rate, and weight decay, as `GROUPS` says."""
    if name == "layers.1.mixer.wq.weight":
        return 1.0, DECAY
    if name == "embedding.weight" or name.split(".")[-2] in ("wq", "wk", "wv"):
        return 0.5, DECAY
    if name.endswith("norm.weight"):
        return 2.0, 0.3
    return 1.0, 0.0 if ".w2." in name else DECAY


def build(**optimizer: Any) -> tuple[Config, ParallelModel]:
    keys = {"lr": LR, "weight_decay": DECAY, "groups": GROUPS, **optimizer}
    config = config_of(SHAPE, sequence_length=16, precision={"compute": "fp32"}, optimizer=keys)
    return config, build_model(config, setup_of(config))


def weights(model: ParallelModel) -> dict[str, Tensor]:
    return {name: parameter.detach().full_tensor().clone() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("keys", [{}, {"type": "muon"}, {"states": "bf16"}], ids=str)
def test_torch_with_groups_by_hand_has_the_same_bits(keys: dict[str, str]) -> None:
    config, model = build(**keys)
    ours = Optimizers(config, model)
    reference = {name: nn.Parameter(value) for name, value in weights(model).items()}
    groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for name, parameter in reference.items():
        scale, decay = by_hand(name)
        muon = "muon" in keys.values() and name.startswith("layers.") and parameter.ndim == 2
        groups[muon].append({"params": [parameter], "lr": LR * scale, "weight_decay": decay})
    optimizer = config.train.optimizer
    theirs: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups[False], betas=optimizer.betas, eps=optimizer.eps, fused=True)
    ]
    if groups[True]:
        theirs.append(torch.optim.Muon(groups[True], momentum=0.95, adjust_lr_fn="match_rms_adamw"))
    # Moments that begin at zero are exact in the first step whatever their format.
    for step in range(1 if "states" in keys else 3):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in model.named_parameters():
            reference[name].grad = gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = with_local(parameter, gradient.clone())  # type: ignore[assignment]
        ours.step(LR, YES)
        for each in theirs:
            each.step()
    for name, value in weights(model).items():
        assert torch.equal(value, reference[name]), name


def test_the_factor_of_mup_is_multiplied() -> None:
    shape = {**SHAPE, "init": {"scheme": "mup", "mup_base_dim": 8}}
    config = config_of(shape, optimizer={"groups": GROUPS}, precision={"compute": "fp32"}, sequence_length=16)
    model = build_model(config, setup_of(config))
    (optimizer,) = Optimizers(config, model).all()
    found = {id(each): group["lr_scale"] for group in optimizer.param_groups for each in group["params"]}
    for name, parameter in model.named_parameters():
        mup = 0.25 if name.startswith("layers.") and parameter.ndim == 2 else 1.0
        assert found[id(parameter)] == mup * by_hand(name)[0], name


def test_a_pattern_without_parameters_is_refused_with_the_nearest_names(tmp_path: Path) -> None:
    file = write(tmp_path)

    def problems(groups: str, *values: str) -> str:
        with pytest.raises(UserError) as caught:
            check_layout(load(file, [f"train.optimizer.groups={groups}", *values]), 1)
        return str(caught.value)

    text = problems('[{match: "*"}, {match: [head.weight, "layers.*.mixer.wqq.weight"]}]')
    assert "train.optimizer.groups.1.match: 'layers.*.mixer.wqq.weight' matches no parameter" in text
    assert "the nearest names are layers.*.mixer.wq.weight" in text and "'head.weight'" not in text
    assert "'head.weight' matches no" in problems("[{match: head.weight}]", "model.tie_embeddings=true")
    assert "'layers.2.*' matches no" in problems('[{match: "layers.2.*"}]')
    for groups in ("[{match: []}]", '[{match: ""}]', "[{match: a, lr_scale: -1}]", "[{lr_scale: 2}]"):
        assert "train.optimizer.groups.0" in refused(file, f"train.optimizer.groups={groups}")


def test_a_group_that_earlier_ones_leave_nothing_is_warned_of(tmp_path: Path) -> None:
    groups = '[{match: "*", lr_scale: 2}, {match: head.weight, lr_scale: 0.5}]'
    config = load(write(tmp_path), [f"train.optimizer.groups={groups}"])
    (line,) = [each for each in layout_warnings(config, check_layout(config, 1)) if "optimizer" in each]
    assert line == "train.optimizer.groups.1 has no effect: all its parameters are in earlier groups"


def test_lines_have_every_parameter_once(tmp_path: Path) -> None:
    config, _ = build()
    spec = decoder_spec(ModelConfig.model_validate(SHAPE), 61, 16)
    sizes = {name: parameter.numel() for name, parameter in Decoder(spec).named_parameters()}
    first, *lines = group_lines(config.train.optimizer, spec)
    assert "4 parameter groups" in first and len(lines) == 5
    counted = [int(line.split(": ")[1].split()[0].replace(",", "")) for line in lines]
    assert counted[0] == sizes["layers.1.mixer.wq.weight"] and sum(counted) == sum(sizes.values())
    assert counted[2] == sum(size for name, size in sizes.items() if name.endswith("norm.weight"))
    assert "learning rate x 2, weight decay 0.3" in lines[2]
    assert list(group_lines(config_of(SHAPE).train.optimizer, spec)) == []


def test_the_check_prints_them(tmp_path: Path) -> None:
    stream = io.StringIO()
    check(
        load(write(tmp_path), ['train.optimizer.groups=[{match: "*", lr_scale: 3}]']), Console(file=stream, width=200)
    )
    assert "1 parameter group," in stream.getvalue() and "learning rate x 3" in stream.getvalue()


@pytest.mark.guard
def test_a_run_resumes_with_other_groups(root: Path) -> None:
    folder = train(root, "groups", "train.duration=4 steps", "train.schedule.type=constant")
    values = ["train.duration=6 steps", "train.schedule.type=constant"]
    code, out = start(root, "groups", *values, 'train.optimizer.groups=[{match: "*", lr_scale: 0, weight_decay: 0}]')
    assert code == 0, out
    assert "train.optimizer.groups.0: (not there) -> {match: *, lr_scale: 0.0, weight_decay: 0.0}" in out
    assert "train:   0 (*): " in out
    assert len(column(folder, "loss")) == 6
