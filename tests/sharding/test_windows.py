"""Windows of quantised linears: what is read of them alone is what the whole has there; none cuts groups or words."""

import numpy as np
import pytest

from checkpoints import open_checkpoint
from turbojax.models.cutting import ModelCut
from turbojax.models.families import architecture_of
from turbojax.models.planning import plan_model
from turbojax.models.shard_view import ShardView, shard_architecture

NAMES = ["gptq_v1_sym", "gptq_v2_asym", "gptq_8bit", "gptq_v1_asym_actorder", "ct_w4_sym_g32", "ct_w4_asym_g32"]


@pytest.mark.parametrize("name", NAMES)
def test_a_window_is_the_whole_read_there(goldens, name):
    checkpoint, num_found = open_checkpoint(goldens / name), 0
    for part in ("self_attn.q_proj", "mlp.down_proj"):
        tensor = f"model.layers.0.{part}.weight"
        whole = checkpoint.read(tensor)
        num_inputs, num_outputs = whole.shape
        dense, size = whole.dequantize(), whole.group_size
        all_rows, all_columns = slice(0, num_outputs), slice(0, num_inputs)
        halves = slice(num_outputs // 2, num_outputs), slice(0, max(size, num_inputs // 2 // size * size))
        for rows, columns in ((halves[0], all_columns), (all_rows, halves[1]), halves):
            found = checkpoint.read_window(tensor, rows, columns)
            if whole.perm is not None and columns != all_columns:
                assert found is None
                continue
            np.testing.assert_array_equal(found.dequantize(), dense[columns, rows])
            num_found += 1
        assert checkpoint.read_window(tensor, slice(1, num_outputs), all_columns) is None, "within a word"
        assert checkpoint.read_window(tensor, all_rows, slice(size // 2, num_inputs)) is None, "within a group"
    assert num_found >= 2


def test_other_formats_are_read_whole(goldens):
    checkpoint = open_checkpoint(goldens / "awq_gemm_g64")
    assert checkpoint.read_window("model.layers.0.mlp.up_proj.weight", slice(0, 8), slice(0, 64)) is None


@pytest.mark.parametrize("name", ["gptq_v1_asym_actorder", "gptq_8bit", "ct_w4_asym_g32"])
@pytest.mark.parametrize("num_shards", [2, 4])
def test_shards_are_the_same_by_windows(goldens, monkeypatch, name, num_shards):
    checkpoint = open_checkpoint(goldens / name)
    arch = architecture_of(checkpoint.config)
    cut = ModelCut.of(plan_model(checkpoint, arch, "float32", lambda layer: (16, 16)), num_shards)
    names = [shard_architecture(arch).sources[part].at(0) for part in ("q", "k", "v", "o", "gate", "up", "down")]
    views = [ShardView(checkpoint, arch, cut, shard) for shard in range(num_shards)]
    found, num_windows = [view.read(name) for view in views for name in names], []
    monkeypatch.setattr(checkpoint, "read_window", lambda *window: num_windows.append(window))
    whole = [view.read(name) for view in views for name in names]
    assert num_windows, "some of them can be read alone"
    for one, other in zip(found, whole, strict=True):
        assert (one.group_size, one.bits) == (other.group_size, other.bits)
        for field in ("codes", "scale", "offset", "perm"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field), err_msg=field)
