"""Recorded W8A8 and FP8 models: exact with the values of their codes, near with activations in eight bits as well."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from tests.core.harness import all_logits, chunks, decode_batch, fresh
from tests.core.test_goldens import GOLDENS, PAGE_LEN, prompts_of
from tests.models.test_eight_bit import values
from tests.models.test_random_model import planned
from turbojax.assembly import open_model
from turbojax.configs import EngineConfig
from turbojax.core import steps
from turbojax.core.state import init_state
from turbojax.models.abstract import abstract_weights
from turbojax.models.model import load_model
from turbojax.models.random_model import WEIGHT_FORMATS

# How far activations in eight bits move the logits (root mean square). The library's own are 0.095 away for int8 by
# token and 0.326 for e4m3 by tensor, says manifest.json; the models are random, so rounding moves them far.
RMS_OF_ROUNDED_X = {"ct_w8a8_int8": 0.12, "fp8_block": 0.4, "fp8_tensor_ct": 0.4, "fp8_tensor_autofp8": 0.4}


def eight_bit_cases():
    if not GOLDENS.is_dir():
        return []
    cases = json.loads((GOLDENS / "manifest.json").read_text())["cases"]
    return [c for c in cases if c["name"] in RMS_OF_ROUNDED_X]


def recorded(case):
    folder = GOLDENS / case["name"]
    return list(prompts_of(np.load(folder / "inputs.npz"), np.load(folder / "expected.npz")))


def logits_of(model, prompts):
    """Logits [tokens, V] of each prompt and the recorded tokens behind it but the last, in one ragged batch."""
    ids = [np.concatenate([ids, new[:-1]]) for _, ids, _, _, new in prompts]
    state, sink = fresh(model.spec, num_slots=len(ids), page_len=PAGE_LEN), len(ids)
    _, logits = all_logits(
        model.weights, state, chunks(*((i, x, 0, True) for i, x in enumerate(ids)), sink=sink), PAGE_LEN
    )
    return np.split(np.asarray(logits), np.cumsum([len(x) for x in ids])[:-1])


def rms_of_errors(got, prompts):
    """Of the logits at each prompt's last 4 positions."""
    errors = [g[len(ids) - 4 : len(ids)] - want for g, (_, ids, want, _, _) in zip(got, prompts, strict=True)]
    return float(np.sqrt(np.mean(np.stack(errors) ** 2)))


@pytest.mark.parametrize("case", eight_bit_cases(), ids=lambda c: c["name"])
def test_goldens_by_the_values_of_their_codes(case):
    """The recorded outputs leave activations alone, and so does this: logits, log-probabilities, greedy ids.

    Each id is the likeliest behind the ids recorded before it, so they are what greedy decoding gives.
    """
    prompts, tolerance = recorded(case), case["tolerance"]["float32_engine"]
    model = values(load_model(GOLDENS / case["name"], dtype="float32"))
    for got, (name, ids, want, logprobs, new) in zip(logits_of(model, prompts), prompts, strict=True):
        end = len(ids)
        np.testing.assert_allclose(got[end - 4 : end], want, atol=tolerance["logits_atol"], rtol=0, err_msg=name)
        likely = np.asarray(jax.nn.log_softmax(got[: end - 1], axis=-1))[np.arange(end - 1), ids[1:]]
        np.testing.assert_allclose(likely, logprobs, atol=tolerance["logprobs_atol"], rtol=0, err_msg=name)
        np.testing.assert_array_equal(got[end - 1 :].argmax(-1), new, err_msg=name)


@pytest.mark.parametrize("case", eight_bit_cases(), ids=lambda c: c["name"])
def test_goldens_as_the_engine_runs_them(case):
    model, prompts = load_model(GOLDENS / case["name"], dtype="float32"), recorded(case)
    assert 0.05 < rms_of_errors(logits_of(model, prompts), prompts) < RMS_OF_ROUNDED_X[case["name"]]


def test_int8_activations_differ_from_the_library_by_its_other_scale(goldens):
    """It divides by max / 127.5 where the kernel divides by max / 127; the manifest has measured just that."""
    [case] = [c for c in eight_bit_cases() if c["name"] == "ct_w8a8_int8"]
    model, prompts = load_model(goldens / case["name"], dtype="float32"), recorded(case)
    logits = logits_of(model, prompts)
    for got, (name, ids, _, _, new) in zip(logits, prompts, strict=True):
        np.testing.assert_array_equal(got[len(ids) - 1 :].argmax(-1), new, err_msg=name)
    library = np.load(goldens / case["name"] / "expected_actq.npz")
    known = [(name, ids, library[f"{name}_logits"], None, new) for name, ids, _, _, new in prompts[:2]]
    measured = case["activation_quantization"]["scale_max_over_127_vs_library_rms"]
    assert rms_of_errors(logits[:2], known) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("weight_format", ["w8a8", "fp8-block"])
def test_a_whole_decode_step_lowers_for_cuda(weight_format):
    """Llama 3.1 8B on an H100: each linear's stack goes into kernels whole, and no op falls back."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        backend.reset_counts()
        spec = planned("llama-3.1-8b", WEIGHT_FORMATS[weight_format])
        state = jax.eval_shape(lambda: init_state(spec, num_slots=64, num_pages=65, max_len=4096))
        batch = jax.eval_shape(lambda: decode_batch(range(64), sink=64))
        decode = jax.jit(steps.decode, static_argnames="num_steps")
        traced = decode.trace(abstract_weights(spec), state, batch, num_steps=1)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert backend.num_fallbacks() == 0
        assert backend.chosen_implementations()["eight_bit_linear"] == {"triton": 4}, "qkv, o, gate_up, down"
    codes = "i8" if weight_format == "w8a8" else "f8E4M3FN"
    assert f"tensor<32x28672x4096x{codes}>" in text
    assert f"tensor<1x28672x4096x{codes}>" not in text, "no layer is cut out of its stack"


@pytest.mark.gpu
@pytest.mark.parametrize("case", eight_bit_cases(), ids=lambda c: c["name"])
def test_goldens_through_the_kernels(case):
    """In bfloat16, whose own rounding adds to that of activations."""
    backend.reset_counts()
    model = open_model(GOLDENS / case["name"], EngineConfig(dtype="bfloat16"), lambda share: None)
    assert model.weights.segments[0].o.weight.codes.dtype in (jnp.int8, jnp.float8_e4m3fn)
    bound, prompts = RMS_OF_ROUNDED_X[case["name"]] + case["tolerance"]["bf16_engine"]["logits_rms"], recorded(case)
    assert rms_of_errors(logits_of(model, prompts), prompts) < bound
    assert backend.num_fallbacks() == 0
