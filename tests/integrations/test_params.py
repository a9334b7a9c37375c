"""Models from arrays in memory are those of the files they came from, and give back what they were made of."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze, meta
from flax.traverse_util import flatten_dict

import turbojax
from checkpoints import AffineTensor, EightBitTensor, MissingTensorError, ShapeMismatchError, open_checkpoint
from tests.core.harness import all_logits, chunks, fresh
from turbojax import EngineConfig, GenerationConfig, from_flax, from_params, to_params
from turbojax.errors import ConfigError, InteropError, ModelConfigError
from turbojax.models.model import load_model

PROMPT = np.arange(3, 19, dtype=np.int32)
DENSE = ["llama_plain", "qwen2_bias_tied", "qwen3_qknorm", "gemma2_softcap", "phi3_fused"]
IN_CODES = ["gptq_v1_asym_actorder", "gptq_8bit", "ct_w4_asym_g32", "ct_w8a8_int8", "fp8_block"]
ENGINE = EngineConfig(max_batch_size=1, session_len=64, max_prefill_token_num=64, num_decode_steps=1)


def logits_of(model):
    state = fresh(model.spec, page_len=16, num_slots=1, max_len=32)
    return np.asarray(all_logits(model.weights, state, chunks((0, PROMPT, 0, True), sink=1), 16)[1])


def assert_same(model, other):
    """Not a bit is different, so no logit is."""
    assert model.spec == other.spec
    jax.tree.map(np.testing.assert_array_equal, model.weights, other.weights)


def opened(folder):
    """Config and tensors of a checkpoint."""
    checkpoint = open_checkpoint(folder)
    return checkpoint.config, {name: checkpoint.read(name) for name in checkpoint.tensors}


@pytest.mark.parametrize("case", DENSE + IN_CODES)
def test_parameters_give_the_model_of_their_checkpoint_and_come_back(goldens, case):
    config, tensors = opened(goldens / case)
    model = from_params(config, tensors)
    assert_same(model, load_model(goldens / case))
    back = to_params(model)
    unused = {name for name in tensors if name not in back}
    assert all("lm_head" in name for name in unused), "a tied head alone is not kept"
    for name, tensor in back.items():
        want = tensors[name]
        assert type(tensor) is type(want) or isinstance(want, np.ndarray), name
        if isinstance(tensor, AffineTensor):
            assert (tensor.bits, tensor.group_size) == (want.bits, want.group_size)
            assert (tensor.offset is None, tensor.perm is None) == (want.offset is None, want.perm is None)
        for field in ("codes", "scale", "offset", "perm") if isinstance(tensor, AffineTensor | EightBitTensor) else ():
            if getattr(want, field, None) is not None:
                np.testing.assert_array_equal(getattr(tensor, field), getattr(want, field), err_msg=name)
        if isinstance(tensor, np.ndarray):
            np.testing.assert_array_equal(tensor, np.asarray(want, np.float32), err_msg=name)
    assert_same(from_params(config, back), model)


def test_codes_of_fused_projections_come_back_in_one_piece(goldens):
    """The rows of q, k and v stand in one tensor, codes and scales of channels alike."""
    config, tensors = opened(goldens / "phi3_fused")
    rng = np.random.default_rng(0)
    for name, tensor in tensors.items():
        if "qkv_proj" in name:
            N, K = tensor.shape
            params = rng.uniform(-1, 1, (2, K // 32, N)).astype(np.float32)
            tensors[name] = AffineTensor(rng.integers(0, 16, (K, N), dtype=np.uint8), *params, 4, 32)
        elif "gate_up_proj" in name:
            scale = rng.uniform(0.1, 1, (len(tensor), 1)).astype(np.float32)
            tensors[name] = EightBitTensor(rng.integers(-128, 128, tensor.shape, dtype=np.int8), scale)
    back = to_params(from_params(config, tensors))
    for name, tensor in tensors.items():
        for field in ("codes", "scale", "offset") if not isinstance(tensor, np.ndarray) else ():
            np.testing.assert_array_equal(getattr(back[name], field, None), getattr(tensor, field, None), err_msg=name)


def test_logits_are_those_of_the_checkpoint_to_the_bit(goldens):
    """From arrays on a device in the checkpoint's own dtype."""
    config, tensors = opened(goldens / "llama_plain")
    on_device = {name: jnp.asarray(tensor) for name, tensor in tensors.items()}
    for dtype in ("float32", "bfloat16"):
        got = logits_of(from_params(config, on_device, dtype=dtype))
        np.testing.assert_array_equal(got, logits_of(load_model(goldens / "llama_plain", dtype=dtype)))


def test_a_pipeline_takes_a_model(goldens):
    """The same answer as from the folder, with the run's own KV precision and the model's own end."""
    config, tensors = opened(goldens / "llama_plain")
    model = from_params(config, tensors, generation_config={"eos_token_id": 2})
    gen, answers = GenerationConfig(max_new_tokens=8), []
    for source in (goldens / "llama_plain", model):
        with turbojax.pipeline(source, EngineConfig(**vars(ENGINE) | {"quant_policy": 8})) as pipe:
            answers.append(pipe([5, 6, 7], gen).token_ids)
    assert answers[0] == answers[1]
    with pytest.raises(ConfigError, match=r"dtype is 'bfloat16'.*float32"):
        turbojax.pipeline(model, EngineConfig(dtype="bfloat16"))
    with pytest.raises(ConfigError, match="model_format"):
        turbojax.pipeline(model, EngineConfig(model_format="awq"))


def test_bad_parameters_are_named(goldens):
    config, tensors = opened(goldens / "llama_plain")
    name, k_name = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(MissingTensorError, match=rf"<params>: tensor '{name}'"):
        from_params(config, {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(ShapeMismatchError, match=r"k_proj\.weight.*has shape \[128, 64\].*implies \[64, 128\]"):
        from_params(config, tensors | {k_name: tensors[k_name].T})
    with pytest.raises(InteropError, match=rf"'{name}' is a ndarray of int8; accepted: an array of floats"):
        from_params(config, tensors | {name: np.zeros(tensors[name].shape, np.int8)})
    with pytest.raises(InteropError, match=rf"'{name}' is a list"):
        from_params(config, tensors | {name: [1.0]})
    with pytest.raises(ModelConfigError, match="vocab_size"):
        from_params({k: v for k, v in config.items() if k != "vocab_size"}, tensors)
    from_params(config, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": "no parameter of the model"})


def test_broken_codes_are_found_before_they_are_used(goldens):
    config, tensors = opened(goldens / "ct_w4_asym_g32")
    name = "model.layers.0.self_attn.q_proj.weight"
    broken = tensors[name].scale.copy()
    broken[0, 0] = np.nan
    part = tensors[name]
    nan = AffineTensor(part.codes, broken, part.offset, part.bits, part.group_size)
    with pytest.raises(InteropError, match=rf"'{name}': scale holds values that are not finite"):
        from_params(config, tensors | {name: nan})
    three = AffineTensor(part.codes, part.scale, part.offset, 3, part.group_size)
    with pytest.raises(InteropError, match=rf"'{name}'.*codes of 4 or 8 bits"):
        from_params(config, tensors | {name: three})


def test_packed_weights_do_not_come_back(goldens):
    with pytest.raises(InteropError, match=r"q_proj.*pack=False"):
        to_params(load_model(goldens / "ct_w4_asym_g32", pack=True))


def as_flax(tensors):
    """Nested as a flax model has it: kernels [K, N], an embedding, scales of norms."""
    tree: dict = {}
    for name, tensor in tensors.items():
        *modules, last = name.split(".")
        if last == "weight":
            kind = "embedding" if "embed" in name else "scale" if "norm" in name else "kernel"
            last, tensor = kind, tensor.T if kind == "kernel" else tensor
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[last] = jnp.asarray(tensor)
    return tree


def renumbered(tree):
    """`layers_0` beside each other in place of `layers/0`."""
    layers = tree["model"]["layers"]
    rest = {key: value for key, value in tree["model"].items() if key != "layers"}
    return tree | {"model": rest | {f"layers_{i}": layer for i, layer in layers.items()}}


def nnx_tree(tree):
    """With Variables for arrays, and numbers for the names of layers, as nnx has them."""
    if isinstance(tree, dict):
        return {int(key) if key.isdigit() else key: nnx_tree(value) for key, value in tree.items()}
    return nnx.Param(tree)


FLAX_FORMS = {
    "nested": lambda tree: tree,
    "linen": lambda tree: freeze({"params": renumbered(tree)}),
    "boxed": lambda tree: jax.tree.map(lambda x: meta.Partitioned(x, (None,) * x.ndim), tree),
    "nnx": lambda tree: nnx.State(nnx_tree(tree)),
    "tuples": lambda tree: flatten_dict(tree),
    "slashes": lambda tree: flatten_dict(tree, sep="/"),
    "dots": lambda tree: flatten_dict(renumbered(tree), sep="."),
}


@pytest.mark.parametrize("form", FLAX_FORMS)
def test_flax_parameters_give_the_model_of_the_checkpoint(goldens, form):
    config, tensors = opened(goldens / "qwen2_bias_tied")
    params = FLAX_FORMS[form](as_flax(tensors))
    assert_same(from_flax(config, params), load_model(goldens / "qwen2_bias_tied"))


def test_flax_parameters_are_named_as_in_the_checkpoint(goldens):
    config, tensors = opened(goldens / "llama_plain")
    tree = as_flax(tensors)
    with pytest.raises(InteropError, match=r"'model\.norm\.weight' comes twice.*model/norm/"):
        from_flax(config, tree | {"model.norm.weight": tree["model"]["norm"]["scale"]})
    del tree["model"]["norm"]
    with pytest.raises(MissingTensorError, match=r"model\.norm\.weight"):
        from_flax(config, tree)


def test_a_module_of_flax_gives_its_state(goldens):
    """Real nnx modules, one of whose kernels the model takes over."""
    config = json.loads((goldens / "llama_plain" / "config.json").read_text())
    _, tensors = opened(goldens / "llama_plain")
    head = nnx.Linear(config["hidden_size"], config["vocab_size"], use_bias=False, rngs=nnx.Rngs(0))
    state = nnx.state(nnx.Dict(lm_head=head))
    others = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    model = from_flax(config, others | {"lm_head": state["lm_head"]})
    np.testing.assert_array_equal(np.asarray(model.weights.head.weight)[0], np.asarray(head.kernel[...]).T)
