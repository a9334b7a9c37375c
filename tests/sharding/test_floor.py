"""Floors of a model in shards are those of one device: half of the model's work where everything divides by two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sharding.test_lowering import CONFIG, TwoH200s
from turbojax.bench.decode import Grid
from turbojax.bench.errors import BenchError
from turbojax.bench.roofline import decode_work, prefill_work
from turbojax.bench.settings import Settings
from turbojax.models.abstract import abstract_weights
from turbojax.models.cutting import ModelCut
from turbojax.models.families import architecture_of
from turbojax.models.planning import plan_model
from turbojax.models.random_model import WEIGHT_FORMATS, described_checkpoint


@pytest.mark.parametrize("form", ["w4", "bf16", "fp8-block"])
def test_a_device_has_half_of_the_work(form):
    arch = architecture_of(CONFIG)
    checkpoint = described_checkpoint("two", CONFIG, arch, WEIGHT_FORMATS[form])
    spec = plan_model(checkpoint, arch, "bfloat16", lambda layer: (8, 8))
    whole, placement = abstract_weights(spec), TwoH200s((None, None))
    shards = placement.join_abstract(abstract_weights(ModelCut.of(spec, 2).shard_spec()))
    for work in (lambda w: decode_work(w, [300.0, 500.0]), lambda w: prefill_work(w, 400)):
        assert work(shards).num_bytes == pytest.approx(work(whole).num_bytes / 2)
        assert work(shards).num_flops == pytest.approx(work(whole).num_flops / 2)


def test_cases_name_the_devices_and_loops_are_refused():
    settings = Settings(shape="llama-3.1-70b", kv=8, engine={"tp": 2})
    assert settings.case("decode b64 4k") == "llama-3.1-70b decode b64 4k kv8 tp2"
    grid = Grid(cells=((1, 64),), num_steps=4)
    with pytest.raises(BenchError, match="loop and profile run on one device, and tp is 2"):
        replace(grid, loop=True).config(settings)
