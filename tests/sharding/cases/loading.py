"""Each device gets its slice and no more: of safetensors, of a native checkpoint; the host holds a block at a time."""

from __future__ import annotations

import json
import tracemalloc

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import open_checkpoint
from tests.sharding.harness import generated, load, logits_of, recorded, write_native
from turbojax.api import pipeline
from turbojax.configs import EngineConfig
from turbojax.errors import ConfigError, ModelConfigError
from turbojax.models import model as model_module
from turbojax.models.cutting import PARTS, ModelCut
from turbojax.models.families import architecture_of
from turbojax.models.model import load_model
from turbojax.models.native import load_native_model, save_model
from turbojax.models.planning import plan_model
from turbojax.models.shard_view import ShardView, shard_architecture
from turbojax.sharding import placements

MIB = 1 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 512, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def views_of(folder, num_shards):
    checkpoint = open_checkpoint(folder)
    arch = architecture_of(checkpoint.config)
    spec = plan_model(checkpoint, arch, "float32", lambda layer: (16, 16))
    cut = ModelCut.of(spec, num_shards)
    return checkpoint, arch, [ShardView(checkpoint, arch, cut, shard) for shard in range(num_shards)]


def test_a_shard_reads_a_slice_of_each_mapped_tensor(goldens):
    """Views of the file: nothing else of it is read, whoever reads them."""
    checkpoint, arch, views = views_of(goldens / "llama_plain", 2)
    names = shard_architecture(arch).sources
    for part in PARTS:
        whole = checkpoint.read(arch.sources[part].at(0))
        every = [view.read(names[part].at(0)) for view in views]
        assert all(np.shares_memory(mine, whole) for mine in every), part
        assert sum(mine.nbytes for mine in every) == whole.nbytes


def test_codes_in_words_are_sliced_before_they_are_unpacked(goldens):
    checkpoint, arch, views = views_of(goldens / "awq_gemm_g64", 2)
    names = shard_architecture(arch).sources
    for part in ("q", "k", "v", "o"):  # the MLP has three groups, and half of them is padded
        whole = checkpoint.read_words(arch.sources[part].at(0))
        every = [view.read_words(names[part].at(0)) for view in views]
        assert all(np.shares_memory(mine.words, whole.words) for mine in every), part
        assert sum(mine.words.nbytes for mine in every) == whole.words.nbytes
        assert sum(mine.scale.nbytes for mine in every) == whole.scale.nbytes


def write_model(folder, num_files=2):
    """A model of 16 layers, 32 MiB in float16, in files of eight layers each."""
    rng, arch = np.random.default_rng(0), architecture_of(CONFIG)
    files, norms = [{} for _ in range(num_files)], ("attn_norm", "ffw_norm", "final_norm")
    for part, source in arch.sources.items():
        if part in ("q_norm", "k_norm"):
            continue
        for layer in range(arch.num_layers if "{i}" in source.name else 1):
            shape = (256,) if part in norms else (arch.out_dims.get(part, 512), arch.in_dims.get(part, 256))
            array = rng.normal(size=shape, scale=0.06).astype(np.float16)
            files[layer * num_files // arch.num_layers][source.at(layer)] = array
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return max(sum(tensor.nbytes for tensor in tensors.values()) for tensors in files)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_host_holds_less_than_a_file(tmp_path, monkeypatch, tp):
    """Of a model that comes to 64 MiB in float32; on devices with memory of their own, as copies stand for here."""
    largest_file, [placement] = write_model(tmp_path / "model"), placements(tp, 1)
    whole = load_model(tmp_path / "model", dtype="float32", placement=placement)
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args, **kwargs: put(*args, **kwargs, may_alias=False))
    monkeypatch.setattr(model_module, "BLOCK_BYTES", 2 * MIB)
    monkeypatch.setattr(model_module, "block_bytes", lambda: 2 * MIB)
    load_model(tmp_path / "model", dtype="float32", placement=placement)  # traces what joins blocks
    tracemalloc.start()
    try:
        model = load_model(tmp_path / "model", dtype="float32", placement=placement)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < largest_file
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights)) > 3.9 * largest_file
    jax.tree.map(np.testing.assert_array_equal, model.weights, whole.weights)


def test_packed_shards_compute_the_same(goldens):
    """As GPUs have them: packed shard by shard, in one form."""
    folder = goldens / "awq_gemm_g64"
    sequences, lengths = recorded(folder)
    for logits, ids, length in zip(logits_of(load(folder, 4, pack=True), sequences), sequences, lengths, strict=True):
        np.testing.assert_array_equal(generated(logits, length), ids[length:])


@pytest.mark.parametrize("form", ["w4-awq", "w8a8"])
def test_a_native_checkpoint_is_restored_into_shards(tmp_path, form):
    """Slices of what is stored, packed codes as well, compute what the model computed that was saved."""
    model = write_native(tmp_path / "native", form)
    restored = load_native_model(tmp_path / "native", placement=placements(2, 1)[0])
    assert restored.spec == ModelCut.of(model.spec, 2).shard_spec()
    embedding = restored.weights.embedding.weight
    assert [shard.data.shape for shard in embedding.addressable_shards] == [(1, 256, 256)] * 2
    sequences = [np.arange(20) * 7 % 512]
    [found], [want] = logits_of(restored, sequences), logits_of(model, sequences)
    rms = float(np.sqrt(np.mean((found - want) ** 2)) / want.std())
    assert rms < (1e-4 if form == "w4-awq" else 0.05), "activations of eight bits have a scale for half a row"


def test_shards_are_not_saved(goldens, tmp_path):
    with pytest.raises(ModelConfigError, match="the model is cut for 2 devices"):
        save_model(load(goldens / "llama_plain", 2), tmp_path / "native")


def test_a_native_checkpoint_whose_slices_are_no_shards_is_refused(goldens, tmp_path):
    save_model(load_model(goldens / "llama_plain", dtype="float32"), tmp_path / "native")
    with pytest.raises(ConfigError, match=r"EngineConfig\.tp is 4; accepted: .*saved from: 2 kv heads"):
        pipeline(tmp_path / "native", EngineConfig(tp=4, dtype="float32"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 16}, r"EngineConfig\.tp is 16; accepted: at most 8: there are 8 devices"),
        ({"tp": 2, "dp": 5}, r"EngineConfig\.dp is 5; accepted: at most 4 of 2 devices each \(tp\): there are 8"),
        ({"tp": 3, "dp": 3}, r"EngineConfig\.dp is 3; accepted: at most 2 of 3 devices each"),
    ],
)
def test_more_devices_than_there_are(goldens, fields, message):
    with pytest.raises(ConfigError, match=message):
        pipeline(goldens / "llama_plain", EngineConfig(**fields))


def test_shards_that_cut_blocks_of_scales_apart(goldens):
    """Two heads of 64 are one block of q and of o."""
    with pytest.raises(ConfigError, match=r"EngineConfig\.tp is 2; .*blocks of 128 of q whole; 2 cut them into 64"):
        pipeline(goldens / "fp8_block", EngineConfig(tp=2))


def test_a_model_in_memory_has_the_devices_that_it_has(goldens):
    model = load_model(goldens / "llama_plain", dtype="float32")
    with pytest.raises(ConfigError, match=r"EngineConfig\.tp is 2; accepted: 1: the weights of llama_plain are cut"):
        pipeline(model, EngineConfig(tp=2, dtype="float32"))
