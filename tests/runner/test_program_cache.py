"""Programs on disk: read back as they were, and never where anything that made them has changed."""

import os
import time

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from turbojax import executables as executables_module
from turbojax import program_cache
from turbojax.buckets import Buckets
from turbojax.core.state import init_state
from turbojax.engine.metrics import EngineMetrics
from turbojax.engine.plan import PageCopy
from turbojax.executables import COPY_PAGES, JOIN, Executables
from turbojax.models.model import load_model
from turbojax.program_cache import FOLDER, ProgramCache, use_compilation_cache

BUCKETS = Buckets.of(max_batch_size=1, max_prefill_tokens=16, num_decode_steps=1)


@pytest.fixture
def folder(tmp_path):
    """JAX's cache, somewhere else for this test and empty."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path / FOLDER
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def loaded(model):
    return load_model(model, dtype="float32")


def make(loaded, num_pages=5):
    state = init_state(loaded.spec, num_slots=1, num_pages=num_pages, page_len=16, max_len=32)
    return Executables(loaded.weights, state, BUCKETS, EngineMetrics()), state


def forget_jax(folder):
    """Empties JAX's own cache, so that the next program is compiled."""
    for path in folder.parent.iterdir():
        if path.is_file():
            path.unlink()


def test_a_second_engine_traces_nothing_and_runs_the_same(loaded, folder):
    first, state = make(loaded)
    dirty = first.copy_pages(state, first.batches.copies((PageCopy(1, 2, 3),)))
    second, state = make(loaded)
    again = second.copy_pages(state, second.batches.copies((PageCopy(1, 2, 3),)))
    assert (first.metrics.num_traces, second.metrics.num_traces) == (1, 0)
    assert second.metrics.num_compilations == second.metrics.num_programs_read == 1
    assert jax.tree.structure(dirty) == jax.tree.structure(again)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), dirty, again))
    assert state.slots.length.is_deleted(), "a program from disk donates as it did"
    assert second.workspace_bytes() == first.workspace_bytes()
    other, _ = make(loaded, num_pages=6)
    assert other.copy_pages is not None
    assert other.metrics.num_traces == 1, "another pool, another program"


def test_a_torn_file_is_written_anew(loaded, folder):
    first, _ = make(loaded)
    assert first.join is not None
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    forget_jax(folder)
    second, _ = make(loaded)
    assert second.join is not None
    assert second.metrics.num_traces == 1
    third, _ = make(loaded)
    assert third.join is not None
    assert third.metrics.num_traces == 0


def test_what_jax_read_from_its_own_cache_is_not_saved_again_and_runs(loaded, folder):
    """On a CPU it could be read, and would not find its own functions when it runs: after an upgrade, say."""
    first, _ = make(loaded)
    assert first.join is not None
    for path in folder.rglob("*"):  # as if other sources had made another folder
        if path.is_file():
            path.unlink()
    for _ in range(2):
        again, state = make(loaded)
        state = again.join(state, again.batches.joins(()))
        assert again.metrics.num_programs_read == 0
        assert int(state.slots.length.sum()) == 0
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_a_cache_that_can_only_be_read_is_read(loaded, folder, monkeypatch):
    first, _ = make(loaded)
    assert first.join is not None

    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(program_cache.os, "utime", refuse)
    second, _ = make(loaded)
    assert second.join is not None
    assert second.metrics.num_traces == 0


def test_programs_whose_ops_fall_back_are_traced_each_time(loaded, folder, monkeypatch):
    """Only tracing warns of a fallback and counts it."""
    counts = iter(range(100))
    monkeypatch.setattr(executables_module.backend, "num_fallbacks", lambda: next(counts))
    for _ in range(2):
        made, _ = make(loaded)
        assert made.join is not None
        assert made.metrics.num_traces == 1
    assert not folder.exists()


def test_the_folder_is_one_of_everything_that_makes_a_program(folder, monkeypatch):
    tree = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2), jnp.int32)}

    def place(*trees):
        return ProgramCache.of(*trees)._folder

    seen = [
        place(tree),
        place({**tree, "a": jnp.zeros(4)}),
        place({**tree, "a": jnp.zeros(3, jnp.int32)}),
        place(tree, tree),
    ]
    seen.append(place({"c": tree["a"], "b": tree["b"]}))
    monkeypatch.setattr(program_cache, "_source_digest", lambda: "other sources")
    seen.append(place(tree))
    with jax.default_matmul_precision("float32"):
        seen.append(place(tree))
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_dump_to=")
    seen.append(place(tree))
    monkeypatch.setattr(program_cache, "_cpu_flags", lambda: "another processor")
    seen.append(place(tree))
    assert len(set(seen)) == len(seen)
    assert {path.parent for path in seen} == {folder}
    assert place(tree) == place(dict(tree))


def test_no_cache_where_jax_has_none(folder):
    tree = {"a": jnp.zeros(3)}
    for option, value in (("jax_enable_compilation_cache", False), ("jax_compilation_cache_dir", "gs://bucket/cache")):
        before = getattr(jax.config, option)
        jax.config.update(option, value)
        assert ProgramCache.of(tree) is None
        jax.config.update(option, before)
    assert ProgramCache.of(tree) is not None


def test_what_nobody_used_for_weeks_is_removed(folder):
    cache = ProgramCache.of({"a": jnp.zeros(3)})
    old, recent = folder / "old", folder / "recent"
    for path in (old, recent):
        path.mkdir(parents=True)
        (path / "program").write_bytes(b"x")
    long_ago = time.time() - program_cache.UNUSED_FOR_S - 60
    os.utime(old, (long_ago, long_ago))
    cache.touch()
    assert {path.name for path in folder.iterdir()} == {"recent", cache._folder.name}


def test_a_process_that_has_chosen_a_cache_keeps_it(folder):
    use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(folder.parent)


def test_every_program_has_a_file_of_its_own(folder):
    cache = ProgramCache.of({"a": jnp.zeros(3)})
    keys = [*BUCKETS.all_shapes(), JOIN, COPY_PAGES]
    assert len({cache._file(key) for key in keys}) == len(keys)
