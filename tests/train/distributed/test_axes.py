"""The table of axes, and what layouts and meshes make of it."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import get_args

import numpy as np

from pipeline.config.parallel import ParallelConfig
from pipeline.train.distributed.axes import AXES, AxisName, axis_names
from pipeline.train.distributed.layout import Layout
from pipeline.train.distributed.process_group import destroy
from pipeline.train.planning.fake import fake_mesh
from pipeline.train.planning.traffic import DIMENSIONS, EXPOSED, IN_LAYERS


def test_every_axis_is_a_key_and_a_field_of_layouts() -> None:
    known = [axis.name for axis in AXES]
    assert sorted(known) == sorted(get_args(AxisName))
    assert sorted(known) == sorted(field.name for field in fields(Layout))
    for axis in AXES:
        least = [each.ge for each in ParallelConfig.model_fields[axis.name].metadata if hasattr(each, "ge")]
        assert least == [-1 if axis.takes_rest else 1], axis


def test_the_order_of_ranks_stays() -> None:
    """Which rank has which weights and samples: what runs and their checkpoints rely on."""
    assert axis_names() == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    layout = Layout(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=4, ep=8)
    ranks = np.arange(layout.world_size).reshape(*layout.degrees.values())
    for places, rank in np.ndenumerate(ranks):
        assert tuple(layout.place(int(rank), (axis,)) for axis in axis_names()) == places
    assert layout.place(int(ranks[1, 2, 1, 1, 3]), ("dp_replicate", "dp_shard")) == 2 * 2 + 1
    assert (layout.dp, layout.shards, layout.places, layout.expert_shards) == (6, 4, 16, 2)
    assert [layout.stride(axis.name) for axis in AXES] == [48, 16, 8, 4, 1, 1]


def test_samples_and_losses_count_once() -> None:
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    samples, losses = [], []
    destroy()  # a run in this process may have come before
    for rank in range(layout.world_size):
        with fake_mesh(layout, rank) as mesh:
            assert mesh.counts_losses == (mesh.rank("tp") == 0)
            samples += [mesh.rank("batch")] * mesh.counts_samples
            losses += [(mesh.rank("pp"), mesh.rank("batch"), mesh.rank("cp"))] * mesh.counts_losses
    assert samples == list(range(layout.dp))
    assert losses == list(product(range(2), range(4), range(2)))


def test_tables_of_traffic_have_every_axis() -> None:
    assert DIMENSIONS == ("tp", "cp", "ep", "pp", "dp_shard", "expert_shards", "dp_replicate")
    assert (DIMENSIONS[:3], DIMENSIONS[:4]) == (IN_LAYERS, EXPOSED)
