"""Recorded AWQ, GPTQ and compressed-tensors models: exact as loaded and as packed, and the kernel agrees."""

import json

import jax
import numpy as np
import pytest

from pallas_kernels.affine_linear import PackedAffine, affine_linear, unpack
from tests.core.test_eight_bit import logits_of, recorded, rms_of_errors
from tests.core.test_goldens import GOLDENS
from turbojax.models.model import load_model

pytestmark = pytest.mark.skipif(not GOLDENS.is_dir(), reason=f"golden checkpoints are not at {GOLDENS}")


def affine_cases():
    if not GOLDENS.is_dir():
        return []
    cases = json.loads((GOLDENS / "manifest.json").read_text())["cases"]
    return [c for c in cases if c["name"].startswith(("awq", "gptq", "ct_w4"))]


@pytest.mark.parametrize("case", affine_cases(), ids=lambda c: c["name"])
def test_against_transformers(case):
    """Logits, log-probabilities and greedy ids: each id is the likeliest behind those recorded before it."""
    prompts, tolerance = recorded(case), case["tolerance"]["float32_engine"]
    model = load_model(GOLDENS / case["name"], dtype="float32")
    for got, (name, ids, want, logprobs, new) in zip(logits_of(model, prompts), prompts, strict=True):
        end = len(ids)
        np.testing.assert_allclose(got[end - 4 : end], want, atol=tolerance["logits_atol"], rtol=0, err_msg=name)
        likely = np.asarray(jax.nn.log_softmax(got[: end - 1], axis=-1))[np.arange(end - 1), ids[1:]]
        np.testing.assert_allclose(likely, logprobs, atol=tolerance["logprobs_atol"], rtol=0, err_msg=name)
        np.testing.assert_array_equal(got[end - 1 :].argmax(-1), new, err_msg=name)


@pytest.mark.parametrize("name", ["awq_gemm_g64", "ct_w4_asym_g32"])
def test_in_16_bits_as_near_as_the_library_is(goldens, name):
    [case] = [c for c in affine_cases() if c["name"] == name]
    dtype, engine = ("float16", "f16_engine") if name.startswith("awq") else ("bfloat16", "bf16_engine")
    prompts, tolerance = recorded(case), case["tolerance"][engine]
    got = logits_of(load_model(goldens / name, dtype=dtype), prompts)
    assert rms_of_errors(got, prompts) < tolerance["logits_rms"]
    for logits, (prompt, ids, want, _, _) in zip(got, prompts, strict=True):
        end = len(ids)
        np.testing.assert_allclose(logits[end - 4 : end], want, atol=tolerance["logits_atol"], rtol=0, err_msg=prompt)


def linears(model):
    return [w for s in model.weights.segments for w in (*s.qkv, s.o, *s.gate_up, s.down)]


@pytest.mark.parametrize("case", affine_cases(), ids=lambda c: c["name"])
def test_packing_while_loading_keeps_every_value(case):
    plain = load_model(GOLDENS / case["name"], dtype="float32", place=np.asarray)
    packed = load_model(GOLDENS / case["name"], dtype="float32", pack=True)
    for want, got in zip(linears(plain), linears(packed), strict=True):
        assert isinstance(got.weight, PackedAffine)
        again = unpack(got.weight)
        assert (again.bits, again.group_size) == (want.weight.bits, want.weight.group_size)
        for field in ("codes", "scale", "offset", "perm"):
            np.testing.assert_array_equal(getattr(again, field), getattr(want.weight, field), err_msg=field)
        assert got.weight.kind == ("symmetric" if want.weight.offset is None else "zero"), "zero points are found again"
        assert got.weight.scale.dtype == np.float16, "half scales too"


KERNEL_CASES = ("awq_gemm_g64", "gptq_v1_asym_actorder", "gptq_8bit", "ct_w4_sym_g32")


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_the_kernel_reads_what_was_packed(goldens, name):
    packed = load_model(goldens / name, dtype="float32", pack=True).weights.segments[0].down.weight
    plain = load_model(goldens / name, dtype="float32").weights.segments[0].down.weight
    x = np.random.default_rng(0).normal(size=(4, plain.K)).astype(np.float16)
    layer = np.int32(1)
    got = affine_linear(x, packed, layer, implementation="interpret")
    want = affine_linear(x.astype(np.float32), plain, layer, implementation="reference")
    np.testing.assert_allclose(got, want, rtol=5e-3, atol=5e-3 * float(np.abs(want).max()))
