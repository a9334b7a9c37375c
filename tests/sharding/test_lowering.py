"""A decode step of two H200s lowers for CUDA without a GPU: kernels inside the shards, two all-reduces a layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import backend
from pallas_kernels.affine_linear import AffineWeights
from turbojax.assembly import on_devices
from turbojax.core import steps
from turbojax.core.shards import AXIS
from turbojax.core.state import init_state
from turbojax.models.abstract import abstract_weights
from turbojax.models.cutting import ModelCut
from turbojax.models.families import architecture_of
from turbojax.models.planning import plan_model
from turbojax.models.random_model import WEIGHT_FORMATS, described_checkpoint, packed_form
from turbojax.sharding import Placement

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 1024, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


class TwoH200s(Placement):
    """Devices that are known by name alone."""

    mesh = AbstractMesh((2,), (AXIS,), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))


def test_a_decode_step_has_its_kernels_and_two_all_reduces_a_layer():
    placement, arch = TwoH200s((None, None)), architecture_of(CONFIG)
    checkpoint = described_checkpoint("two", CONFIG, arch, WEIGHT_FORMATS["w4"])
    spec = plan_model(checkpoint, arch, "bfloat16", lambda layer: (8, 8))
    shard = abstract_weights(ModelCut.of(spec, 2).shard_spec())
    is_affine = lambda part: isinstance(part, AffineWeights)
    shard = jax.tree.map(lambda part: packed_form(part) if is_affine(part) else part, shard, is_leaf=is_affine)
    weights = placement.join_abstract(shard)
    make = on_devices(placement, lambda: init_state(shard.spec, num_slots=4, num_pages=9, page_len=64, max_len=128))
    state = placement.abstract(jax.eval_shape(make))
    row = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placement.whole)
    fallbacks = backend.num_fallbacks()
    decode = jax.jit(placement.spread(steps.decode, 1), donate_argnames="state")
    traced = decode.trace(weights, state, steps.DecodeBatch(row(4), row(4, 4)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert backend.num_fallbacks() == fallbacks
    assert "triton" in text or "mosaic" in text
    # One layer's in the body of the loop, and one behind the embedding's lookup.
    assert text.count("stablehlo.all_reduce") == 3
    assert text.count("stablehlo.all_gather") == 1
