"""The memory plan: what is left for the pool, what is refused, and how far the estimate of the workspace is off."""

import logging
from dataclasses import replace
from typing import ClassVar

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runner.harness import SMALL
from turbojax import assembly, memory
from turbojax.assembly import assemble_model, limits_of, plan_engine, state_maker
from turbojax.buckets import MAX_PROGRAMS, Buckets, PickShape
from turbojax.configs import EngineConfig
from turbojax.engine.metrics import EngineMetrics
from turbojax.errors import OutOfMemoryError
from turbojax.executables import Executables
from turbojax.memory import estimate_workspace, plan_memory, rounded_down
from turbojax.models.model import load_model

MIB = 1 << 20


@pytest.fixture(scope="module")
def loaded(model):
    return load_model(model, dtype="float32")


@pytest.fixture
def free(monkeypatch):
    """Sets what the device has free."""
    return lambda num_bytes: monkeypatch.setattr(memory, "free_device_bytes", lambda device: num_bytes)


def plan(spec, workspace=20 * MIB, **others):
    options = {"page_len": 16, "max_batch_size": 64, "max_len": 1 << 20, "share": 0.5} | others
    return plan_memory(spec, 7 * MIB, workspace, **options)


def test_the_pool_takes_its_share_of_what_weights_and_workspace_leave(loaded, free):
    free(100 * MIB)
    found = plan(loaded.spec)
    assert 0.98 * 40 * MIB < found.pool_bytes <= 40 * MIB
    assert found.left_bytes == 100 * MIB - 20 * MIB - found.pool_bytes
    assert plan(loaded.spec, max_len=64, max_batch_size=2).num_pages == 2 * 4 + 1, "no more than can be used"
    assert plan(loaded.spec, share=33).num_pages == 33


def test_cached_files_are_no_reason_to_refuse(monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    meminfo.write_text("MemTotal: 8192 kB\nMemFree: 100 kB\nMemAvailable: 4096 kB\n")
    assert memory.free_device_bytes() == 4 * MIB
    meminfo.unlink()
    assert memory.free_device_bytes() > 0, "another system"


def test_the_table_shows_every_part(loaded, free):
    free(100 * MIB)
    lines = plan(loaded.spec, share=513, slot_bytes=MIB).table().splitlines()
    assert lines[0].split() == ["weights", "7", "MiB"]
    assert "513 pages of 16 tokens: 8,192 tokens" in lines[1]
    assert lines[2].split()[:2] == ["K16", "V16"]
    assert "2 layers, 512 bytes a token and layer" in lines[2]
    assert lines[3].split()[:3] == ["slots", "1", "MiB"]
    assert "largest temporary of a step, estimated" in lines[4]
    assert lines[5].startswith("left")
    assert "of 100 MiB free beside the weights" in lines[5]


def test_what_does_not_fit_is_refused_with_the_numbers(loaded, free):
    free(100 * MIB)
    page_bytes = plan(loaded.spec).page_bytes
    for wish in ({"workspace": 100 * MIB}, {"workspace": 101 * MIB}, {"share": 100 * MIB // page_bytes}):
        with pytest.raises(OutOfMemoryError, match=r"104,857,600 bytes are free beside 7,340,032 bytes of weights"):
            plan(loaded.spec, **wish)


@given(st.integers(0, 1 << 40))
def test_pool_sizes_are_few_and_cost_little(num_pages):
    found = rounded_down(num_pages)
    assert num_pages * 63 / 64 <= found <= num_pages
    assert found.bit_length() <= 7 or found % (1 << found.bit_length() - 7) == 0
    assert rounded_down(found) == found


def test_the_estimate_of_the_workspace_is_near_what_the_compiler_says(loaded):
    """For the largest step; not below it, and not so far above that it would cost a good part of the pool."""
    config = EngineConfig(max_batch_size=16, max_prefill_token_num=256, session_len=512)
    limits, _ = limits_of(config, loaded.spec)
    buckets = Buckets.of(max_batch_size=16, max_prefill_tokens=256, num_decode_steps=1, min_prefill_tokens=256)
    estimate = estimate_workspace(loaded.spec, buckets, 512)
    found = plan(loaded.spec, share=40)
    state = jax.eval_shape(state_maker(loaded.spec, config, limits, buckets, found.num_pages))
    executables = Executables(loaded.weights, state, buckets, EngineMetrics())
    largest = executables.keys()[0]
    assert (largest.num_decode_slots, largest.num_prefill_tokens) == (16, 240)
    executables.step(largest)
    assert executables.pick(PickShape(16, is_plain=False)) is not None
    assert executables.workspace_bytes() <= estimate <= 4 * executables.workspace_bytes()


class FakeExecutables:
    """Compiles nothing, and needs as much workspace as it was told."""

    workspace = 0
    compiled: ClassVar[list[int]] = []

    def __init__(self, weights, state, buckets, metrics, processors, placement):
        self.num_pages, self.is_complete = state.pool.num_pages, True

    def compile_all(self, progress):
        self.compiled.append(self.num_pages)

    def workspace_bytes(self):
        return self.workspace


@pytest.mark.parametrize(("needed", "fits"), [(10 * MIB, True), (95 * MIB, True), (200 * MIB, False)])
def test_steps_that_need_more_than_estimated_get_a_smaller_pool(loaded, free, monkeypatch, needed, fits):
    free(100 * MIB)
    monkeypatch.setattr(assembly, "Executables", FakeExecutables)
    monkeypatch.setattr(assembly, "estimate_workspace", lambda *_: 20 * MIB)
    monkeypatch.setattr(FakeExecutables, "workspace", needed)
    monkeypatch.setattr(FakeExecutables, "compiled", [])
    config = EngineConfig(**SMALL | {"session_len": 512, "max_batch_size": 64, "compile_ahead": True})
    limits, buckets = limits_of(config, loaded.spec)
    if not fits:
        with pytest.raises(OutOfMemoryError, match="steps need 209,715,200 of them"):
            plan_engine(loaded, config, limits, buckets, EngineMetrics())
        return
    executables, found = plan_engine(loaded, config, limits, buckets, EngineMetrics())
    assert found.is_workspace_measured
    assert (found.workspace_bytes, found.num_pages) == (needed, executables.num_pages)
    assert found.left_bytes >= 0
    assert len(FakeExecutables.compiled) == (1 if needed < 20 * MIB else 2)


@pytest.mark.parametrize(("on_gpu", "limits"), [(True, (256, 8192)), (False, (64, 2048))])
def test_limits_and_eagerness_follow_the_platform(loaded, free, monkeypatch, on_gpu, limits):
    free(100 * MIB)
    monkeypatch.setattr(assembly, "Executables", FakeExecutables)
    monkeypatch.setattr(assembly.backend, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(FakeExecutables, "compiled", [])
    config = EngineConfig(session_len=64, cache_max_entry_count=20, compile_ahead=None)
    found, buckets = limits_of(config, loaded.spec)
    assert (found.num_slots, found.max_prefill_tokens) == limits
    assert buckets.num_programs <= MAX_PROGRAMS
    invariant, tiles = limits_of(replace(config, batch_invariant=True, num_decode_steps=4), loaded.spec)
    assert (tiles.tile_rows, invariant.num_decode_steps) == (64 if on_gpu else 8, 1)
    plan_engine(loaded, config, found, buckets, EngineMetrics())
    assert len(FakeExecutables.compiled) == on_gpu
    given, _ = limits_of(
        EngineConfig(max_batch_size=3, max_prefill_token_num=128, cache_block_seq_len=128), loaded.spec
    )
    assert (given.num_slots, given.max_prefill_tokens, given.max_chunks) == (3, 128, 3)


def test_the_plan_is_shown_before_the_pool_is_allocated(loaded, monkeypatch, caplog):
    class NoRunner(Exception):
        pass

    def refuse(*args, **kwargs):
        raise NoRunner

    monkeypatch.setattr(assembly, "JaxRunner", refuse)
    with caplog.at_level(logging.INFO, "turbojax"), pytest.raises(NoRunner):
        assemble_model(loaded, EngineConfig(**SMALL))
    assert "KV pool" in caplog.text
    assert "workspace" in caplog.text


@pytest.mark.parametrize(("said", "error"), [("RESOURCE_EXHAUSTED: 16 GiB", OutOfMemoryError), ("INTERNAL", None)])
def test_memory_that_somebody_took_meanwhile_is_refused_too(loaded, monkeypatch, said, error):
    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(assembly, "JaxRunner", fail)
    with pytest.raises(error or jax.errors.JaxRuntimeError, match="KV pool" if error else said):
        assemble_model(loaded, EngineConfig(**SMALL))
