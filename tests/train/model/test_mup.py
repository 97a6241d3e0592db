"""muP over kinds of mixers and mlps: how much each product's output changes in a few steps, at two widths."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.train import coordinates
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.train.checkpoint.fingerprint import model_fingerprint
from pipeline.train.rules.layout import check_layout
from tests import tiers
from tests.config.runfile import write

WIDTHS = (64, 256)
MUP = {"scheme": "mup", "mup_base_dim": 64, "std": 0.1}
LATENT = {"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 16}


@pytest.mark.parametrize(
    ("kind", "fixed"),
    tiers.first(2, [("mla", True), ("experts", True), *((kind, False) for kind in coordinates.KINDS)], rest="slow"),
)
def test_changes_are_as_large_at_each_width(kind: str, fixed: bool) -> None:
    sizes = coordinates.FIXED[kind] if fixed else []
    found = coordinates.slopes(kind, WIDTHS, 2, fixed=fixed, init={**MUP, "mup_fixed": sizes})
    inside = {name: slope for name, slope in found.items() if name != "logits"}
    assert max(map(abs, inside.values())) < 0.25, found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "product"), [("mla", "mixer.wkb"), ("experts", "mlp.shared.w2")])
def test_one_factor_for_all_matrices_stops_those_of_fixed_sizes(kind: str, product: str) -> None:
    found = coordinates.slopes(kind, WIDTHS, 2, fixed=True, init={**MUP, "mup_fixed": []})
    assert found[f"layers.0.{product}"] < -0.4


def _config(folder: Path, *overrides: str) -> Config:
    sizes = ", ".join(f"{key}: {value}" for key, value in LATENT.items())
    return load(write(folder), ["model.mixer=mla", f"model.mla={{{sizes}}}", "model.init.scheme=mup", *overrides])


def test_sizes_that_may_be_fixed_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mla.q_rank=16, mla.kv_rank=16 that the model"):
        check_layout(_config(tmp_path, "model.init.mup_base_dim=16"), 1)
    with pytest.raises(UserError, match="mup_fixed=experts.ffn_dim: .* it has mla.q_rank, mla.kv_rank"):
        check_layout(_config(tmp_path, "model.init.mup_base_dim=16", "model.init.mup_fixed=[experts.ffn_dim]"), 1)
    check_layout(_config(tmp_path, "model.init.mup_base_dim=32"), 1)  # the base itself
    for fixed in ("[]", "[mla.kv_rank]"):
        check_layout(_config(tmp_path, "model.init.mup_base_dim=16", f"model.init.mup_fixed={fixed}"), 1)
    with pytest.raises(UserError, match="mup_fixed needs scheme: mup"):
        load(write(tmp_path), ["model.init.mup_fixed=[]"])


def test_a_run_from_before_the_key_is_one_whose_sizes_all_grow(tmp_path: Path) -> None:
    unset, none, one = (
        model_fingerprint(_config(tmp_path, "model.init.mup_base_dim=16", *more))
        for more in ([], ["model.init.mup_fixed=[]"], ["model.init.mup_fixed=[mla.kv_rank]"])
    )
    assert unset == none != one and "mup_fixed" not in unset["init"]
