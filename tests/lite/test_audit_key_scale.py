"""The scale of keys: where it is least wrong, kept with the checkpoint, and found by engines that turn keys."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.harness import all_logits, chunks, fresh
from turbojax.assembly import open_model
from turbojax.configs import EngineConfig
from turbojax.errors import ModelConfigError
from turbojax.kv_policy import read_k_scale, scale_file, write_k_scale
from turbojax.lite import rotation
from turbojax.lite.audit import Audit, uniform
from turbojax.lite.rotation import k_scale_of, scale_of
from turbojax.models.model import load_model
from turbojax.models.native import save_model

SHAPE = (2, 2, 32)  # layers, KV heads and head dim of the model


@pytest.fixture
def folder(goldens, tmp_path):
    return shutil.copytree(goldens / "llama_plain", tmp_path / "model", copy_function=shutil.copyfile)


@pytest.fixture(scope="module")
def window(goldens):
    return np.asarray(np.load(goldens / "llama_plain" / "inputs.npz")["p40_ids"], np.int32)


def test_the_scale_makes_the_product_of_both_sides_least():
    rng = np.random.default_rng(0)
    q_power, k_power = rng.uniform(0.1, 10, (2, 5, 16)) ** 2
    best = scale_of(q_power, k_power).astype(np.float64)

    def cost(d):
        return (k_power * d**2).sum(-1) * (q_power / d**2).sum(-1)

    for _ in range(50):
        assert np.all(cost(best) <= cost(best * rng.uniform(0.8, 1.25, best.shape)) * (1 + 1e-9))


def test_powers_are_those_of_the_keys_that_the_pool_holds(folder, window):
    """Against the pages that the engine fills; padding of the last chunk does not count."""
    model = load_model(folder, dtype="float32")
    seen = {}
    original = rotation.scale_of

    def watch(q_power, k_power):
        seen["k"] = k_power
        return original(q_power, k_power)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotation, "scale_of", watch)
        scale = k_scale_of(model.weights, window[None])
    assert scale.shape == SHAPE
    state = fresh(model.spec, num_slots=1, page_len=64, max_len=64)
    state, _ = all_logits(model.weights, state, chunks((0, window, 0, True), sink=1), 64)
    [pages] = state.pool.segments
    keys = np.asarray(pages.k, np.float64)[:, 1, :, : len(window)]
    np.testing.assert_allclose(seen["k"], (keys**2).sum(2), rtol=1e-4)


@pytest.mark.parametrize("k_bits", [4, 16])
def test_engines_that_turn_keys_find_the_scale(folder, window, k_bits):
    """At 4 bits the engine is what an audit measures; what is not turned is not scaled."""
    scale = np.exp(np.random.default_rng(1).standard_normal(SHAPE) / 2).astype(np.float32)
    write_k_scale(folder, scale)
    config = EngineConfig(dtype="float32", k_bits=k_bits, v_bits=16, kv_hadamard=True)
    model = open_model(folder, config, lambda share: None)
    assert [w.k_scale is not None for w in model.weights.segments] == [k_bits == 4]
    state = fresh(model.spec, num_slots=1, page_len=64, max_len=64)
    _, logits = all_logits(model.weights, state, chunks((0, window, 0, True), sink=1), 64)
    logits = np.asarray(logits, np.float64)[:-1]
    nll = np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(39), window[1:]])
    audit = Audit(load_model(folder, dtype="float32").weights, window[None], scale)
    policy = uniform(audit.spec, k_bits, 16, hadamard=True)
    assert nll == pytest.approx(audit.measure(policy).nll, abs=2e-4)


@pytest.mark.parametrize(
    ("scale", "match"),
    [
        (np.ones((2, 2, 16)), r"k_scale\.npy: has shape \(2, 2, 16\)"),
        (np.zeros(SHAPE), "above 0"),
        (np.full(SHAPE, np.nan), "finite"),
        (np.ones(4), r"\[layers, KV heads, head dim\]"),
    ],
    ids=["shape", "zero", "nan", "rank"],
)
def test_a_broken_scale_is_named(folder, scale, match):
    write_k_scale(folder, scale)
    with pytest.raises(ModelConfigError, match=match):
        open_model(folder, EngineConfig(dtype="float32", quant_policy=4, kv_hadamard=True), lambda share: None)


def test_a_file_that_is_no_array_is_named(folder):
    scale_file(folder).write_bytes(b"text")
    with pytest.raises(ModelConfigError, match=r"no \.npy file"):
        open_model(folder, EngineConfig(dtype="float32", quant_policy=4, kv_hadamard=True), lambda share: None)


def test_a_native_checkpoint_is_saved_with_the_scale_and_opened_with_it(folder, tmp_path):
    """Whatever bits it was saved with, and whatever file lies beside it later."""
    first, second = (np.exp(np.random.default_rng(seed).standard_normal(SHAPE)).astype(np.float32) for seed in (3, 4))
    write_k_scale(folder, first)
    native, turned = tmp_path / "native", EngineConfig(dtype="float32", k_bits=4, v_bits=16, kv_hadamard=True)
    save_model(open_model(folder, EngineConfig(dtype="float32", quant_policy=0), lambda share: None), native)
    np.testing.assert_array_equal(read_k_scale(native), first)
    for scale in (first, second):
        write_k_scale(native, scale)
        model = open_model(native, turned, lambda share: None)
        assert all(segment.layer.has_k_scale for segment in model.spec.segments)
        found = np.concatenate([np.asarray(w.k_scale) for w in model.weights.segments])
        np.testing.assert_array_equal(found, scale)
    write_k_scale(native, np.ones((2, 2, 16)))
    with pytest.raises(ModelConfigError, match=r"native.*k_scale\.npy: has shape"):
        open_model(native, turned, lambda share: None)


def test_products_stay_with_any_scale():
    from pallas_kernels.rope_write.reference import turn_keys

    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(rng.standard_normal((5, heads, 32)), jnp.float32) for heads in (6, 2))
    scale = jnp.asarray(np.exp(rng.standard_normal((2, 32))), jnp.float32)
    turned_q, turned_k = (np.asarray(x, np.float64) for x in turn_keys(q, k, scale))
    by_head = lambda x: np.asarray(x, np.float64).reshape(5, 2, 3, 32)
    got = np.einsum("rkgh,tkh->rtkg", by_head(turned_q), turned_k)
    np.testing.assert_allclose(got, np.einsum("rkgh,tkh->rtkg", by_head(q), np.asarray(k)), atol=1e-4)
    assert not np.allclose(turned_k, np.asarray(k))
