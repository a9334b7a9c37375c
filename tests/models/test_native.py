"""The abstract tree is what loading gives, and native checkpoints give back what was saved, into any sharding."""

import jax
import numpy as np
import pytest

from checkpoints import CheckpointFileError, ConfigError, is_native
from pallas_kernels.affine_linear import PackedAffine
from turbojax import EngineConfig, GenerationConfig, pipeline
from turbojax.errors import ConfigError as EngineConfigError
from turbojax.models.abstract import abstract_weights
from turbojax.models.model import load_model
from turbojax.models.native import load_native_model, save_model, with_kv_bits
from turbojax.models.packing import pack_weights

CASES = ["llama_plain", "qwen2_bias_tied", "qwen3_qknorm", "gemma2_softcap", "phi3_fused"]


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


@pytest.mark.parametrize("case", CASES)
def test_the_abstract_tree_is_what_loading_gives(goldens, case):
    for dtype in ("float32", "bfloat16"):
        model = load_model(goldens / case, dtype=dtype)
        assert shapes(abstract_weights(model.spec)) == shapes(model.weights)


def test_the_abstract_tree_of_a_quantised_model(smollm2):
    model = load_model(smollm2)
    assert shapes(abstract_weights(model.spec)) == shapes(model.weights)


@pytest.mark.parametrize("case", CASES)
def test_a_native_checkpoint_restores_the_same_model(goldens, tmp_path, case):
    model = load_model(goldens / case, kv_bits=(8, 4))
    save_model(model, tmp_path / "native")
    assert is_native(tmp_path / "native")
    again = load_native_model(tmp_path / "native")
    assert again.spec == model.spec
    assert hash(again.spec) == hash(model.spec)
    assert (again.config, again.generation_config) == (model.config, model.generation_config)
    jax.tree.map(np.testing.assert_array_equal, again.weights, model.weights)


def test_a_native_checkpoint_restores_into_a_given_sharding(goldens, tmp_path):
    model = load_model(goldens / "llama_plain")
    save_model(model, tmp_path / "native")
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("tp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    place = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
    again = load_native_model(tmp_path / "native", place)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(again.weights))
    jax.tree.map(np.testing.assert_array_equal, again.weights, model.weights)


def test_an_existing_folder_and_a_foreign_one_are_refused(goldens, tmp_path):
    model = load_model(goldens / "llama_plain")
    save_model(model, tmp_path / "native")
    with pytest.raises(CheckpointFileError, match=r"native: exists already"):
        save_model(model, tmp_path / "native")
    with pytest.raises(ConfigError, match="is no native checkpoint"):
        load_native_model(goldens / "llama_plain")


def test_the_engine_opens_a_native_checkpoint(goldens, tmp_path):
    """The same answer as from the checkpoint it came from, with a KV precision of the run's own."""
    save_model(load_model(goldens / "llama_plain"), tmp_path / "native")
    config = EngineConfig(
        quant_policy=8, max_batch_size=1, session_len=64, max_prefill_token_num=64, num_decode_steps=1
    )
    gen = GenerationConfig(max_new_tokens=8)
    answers = []
    for path in (goldens / "llama_plain", tmp_path / "native"):
        with pipeline(path, config) as pipe:
            answers.append(pipe([5, 6, 7], gen).token_ids)
    assert answers[0] == answers[1]
    with pytest.raises(EngineConfigError, match="bfloat16"):
        pipeline(tmp_path / "native", EngineConfig(dtype="bfloat16"))


@pytest.mark.parametrize("kv_bits", [lambda layer: (8, 4), lambda layer: (16, 16) if layer else (4, 8)])
def test_another_kv_precision_is_that_of_a_model_that_was_loaded_with_it(goldens, kv_bits):
    model = load_model(goldens / "llama_plain")
    changed, loaded = with_kv_bits(model, kv_bits), load_model(goldens / "llama_plain", kv_bits=kv_bits)
    assert changed.spec == changed.weights.spec == loaded.spec
    jax.tree.map(np.testing.assert_array_equal, changed.weights, loaded.weights)
    assert with_kv_bits(changed, lambda layer: (16, 16)).spec.num_layers == model.spec.num_layers


def test_loading_reports_all_of_its_bytes(goldens):
    shares = []
    load_model(goldens / "gemma2_softcap", progress=shares.append)
    assert len(shares) > 10
    assert sum(shares) == pytest.approx(1)


QUANTISED = ["awq_gemm_g64", "gptq_v1_asym_actorder", "gptq_8bit", "ct_w4_asym_g32"]


@pytest.mark.parametrize("case", QUANTISED)
def test_a_quantised_model_comes_back_as_it_was_and_as_kernels_read_it(goldens, tmp_path, case):
    model = load_model(goldens / case, dtype="float32")
    save_model(model, tmp_path / "native")
    again = load_native_model(tmp_path / "native", packed=False)
    jax.tree.map(np.testing.assert_array_equal, again.weights, model.weights)
    packed = load_native_model(tmp_path / "native", packed=True)
    jax.tree.map(np.testing.assert_array_equal, packed.weights, pack_weights(model.weights))
    save_model(packed, tmp_path / "second")
    twice = load_native_model(tmp_path / "second", packed=True)
    jax.tree.map(np.testing.assert_array_equal, twice.weights, packed.weights)


def test_free_offsets_come_back_to_the_last_bit(smollm2, tmp_path):
    """Which those of a GGUF file are; its embedding is quantised and tied, so the packed form has a head beside it."""
    model = load_model(smollm2)
    save_model(model, tmp_path / "native")
    again = load_native_model(tmp_path / "native", packed=False)
    jax.tree.map(np.testing.assert_array_equal, again.weights, model.weights)
    packed, expected = load_native_model(tmp_path / "native", packed=True).weights, pack_weights(model.weights)
    jax.tree.map(np.testing.assert_array_equal, packed, expected)
    assert isinstance(packed.head.weight, PackedAffine)
