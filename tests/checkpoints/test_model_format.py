"""`model_format`: the user's word, held against the checkpoint's, and what older folders keep in files of their own."""

import json

import numpy as np
import pytest

from checkpoints import MODEL_FORMATS, ConfigError, DenseFormat, UnsupportedFormatError, open_checkpoint
from tests.checkpoints import layouts
from tests.checkpoints.layouts import folder, of
from tests.checkpoints.samples import ARRAYS, AWQ_32, GROUP, IN_AWQ, IN_GPTQ, linear
from turbojax.configs import EngineConfig
from turbojax.errors import ConfigError as FieldError

DENSE = {"a.weight": np.ones((4, 8), np.float32)}


def test_a_format_that_the_checkpoint_says_too(tmp_path):
    assert "a.weight" in open_checkpoint(folder(tmp_path / "m", of("a", IN_AWQ), AWQ_32), "awq").tensors
    assert open_checkpoint(folder(tmp_path / "d", DENSE), "hf").tensors["a.weight"].format == DenseFormat("float32")


@pytest.mark.parametrize("model_format", sorted(set(MODEL_FORMATS) - {"awq"}))
def test_a_contradiction_names_both(tmp_path, model_format):
    path = folder(tmp_path / "m", of("a", IN_AWQ), AWQ_32)
    with pytest.raises(ConfigError, match=rf"config\.json: is of format 'awq', and model_format says '{model_format}'"):
        open_checkpoint(path, model_format)


@pytest.mark.parametrize("model_format", ["compressed-tensors", "gguf"])
def test_a_folder_that_says_nothing_cannot_be_what_needs_a_config(tmp_path, model_format):
    with pytest.raises(ConfigError, match=rf"names no quantization method, and model_format says '{model_format}'"):
        open_checkpoint(folder(tmp_path / "m", DENSE), model_format)


@pytest.mark.parametrize(("model_format", "tensors"), [("awq", IN_AWQ), ("gptq", IN_GPTQ)])
def test_a_folder_that_says_nothing_is_what_the_user_says(tmp_path, model_format, tensors):
    """Group size and all else follow from the shapes."""
    checkpoint = open_checkpoint(folder(tmp_path / "m", of("a", tensors)), model_format)
    codes, zero, scale = ARRAYS
    want = (codes - zero[GROUP]) * scale.astype(np.float64)[GROUP]
    np.testing.assert_array_equal(checkpoint.read("a.weight").dequantize(), want)


def test_a_config_without_a_method_is_what_the_user_says(tmp_path):
    path = folder(tmp_path / "m", of("a", IN_AWQ), {"bits": 4, "group_size": 32})
    assert open_checkpoint(path, "awq").tensors["a.weight"].format.group_size == 32
    with pytest.raises(UnsupportedFormatError, match="'unnamed'"):
        open_checkpoint(path)


def test_a_dense_folder_is_not_awq(tmp_path):
    with pytest.raises(UnsupportedFormatError, match=r"no tensor's name ends with \.qweight"):
        open_checkpoint(folder(tmp_path / "m", DENSE), "awq")


def test_scales_that_tell_no_group_size(tmp_path):
    arrays = layouts.awq(*linear(64, 16, 24, 4))
    with pytest.raises(Exception, match=r"'a\.scales'.*64 inputs do not fall into 3 groups.*group_size"):
        open_checkpoint(folder(tmp_path / "m", of("a", arrays)), "awq")


@pytest.mark.parametrize(
    ("file", "config", "tensors"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "sym": False}, IN_GPTQ),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}, IN_AWQ),
    ],
)
def test_older_folders_have_the_config_in_a_file_of_its_own(tmp_path, file, config, tensors):
    path = folder(tmp_path / "m", of("a", tensors))
    (path / file).write_text(json.dumps(config))
    assert open_checkpoint(path).tensors["a.weight"].format.group_size == 32


def test_the_engines_field(goldens):
    from turbojax.assembly import open_model

    with pytest.raises(FieldError, match=r"model_format.*exl2.*awq, gptq"):
        EngineConfig(model_format="exl2")
    with pytest.raises(ConfigError, match=r"awq_gemm_g64/config\.json: is of format 'awq'.*'gptq'"):
        open_model(goldens / "awq_gemm_g64", EngineConfig(model_format="gptq"), lambda share: None)
    shares = []
    model = open_model(goldens / "awq_gemm_g64", EngineConfig(model_format="awq", dtype="float32"), shares.append)
    assert model.weights.segments[0].o.weight.bits == 4
    assert sum(shares) == pytest.approx(1)


def test_a_native_checkpoint_has_no_such_format(tmp_path, monkeypatch):
    from turbojax import assembly
    from turbojax.models import native
    from turbojax.models.random_model import random_model

    monkeypatch.setattr(assembly, "is_native", lambda path: True)
    monkeypatch.setattr(native, "load_native_model", lambda path, placement: random_model("tiny", "bf16", "float32"))
    with pytest.raises(FieldError, match=r"model_format.*'awq'.*native"):
        assembly.open_model(tmp_path, EngineConfig(model_format="awq"), lambda share: None)
