"""Safetensors folders against a plain reading of their bytes, and files that are broken in every way."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError, ConfigError, CorruptFileError, UnsupportedFormatError, open_checkpoint

CONFIG = {"architectures": ["LlamaForCausalLM"]}


def folder(path, tensors, config=CONFIG):
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int32, np.int64])
def test_every_dtype_reads_as_it_was_written(tmp_path, dtype):
    tensors = {"a.weight": np.arange(12).reshape(3, 4).astype(dtype), "b.bias": np.arange(3).astype(dtype)}
    checkpoint = open_checkpoint(folder(tmp_path / "m", tensors))
    assert set(checkpoint.tensors) == set(tensors)
    for name, want in tensors.items():
        got = checkpoint.read(name)
        assert got.dtype == dtype
        assert checkpoint.tensors[name].shape == want.shape
        np.testing.assert_array_equal(got, want)


def test_float8_reads_from_the_raw_bytes(tmp_path):
    values = np.arange(-8, 8, dtype=np.float32).reshape(4, 4).astype(ml_dtypes.float8_e4m3fn)
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [0, 16]}}).encode()
    path = folder(tmp_path / "m", {"x": np.zeros(1, np.float32)})
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    got = open_checkpoint(path).read("w")
    np.testing.assert_array_equal(got.astype(np.float32), values.astype(np.float32))


@pytest.mark.parametrize("case", ["llama_plain", "qwen2_bias_tied", "qwen3_qknorm"])
def test_goldens_read_as_safetensors_reads_them(goldens, case):
    checkpoint, want = open_checkpoint(goldens / case), {}
    for file in sorted((goldens / case).glob("*.safetensors")):
        want |= load_file(file)
    assert set(checkpoint.tensors) == set(want)
    for name, tensor in want.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)
    assert checkpoint.config == json.loads((goldens / case / "config.json").read_text())


def test_opening_reads_no_tensor_data(tmp_path):
    path = folder(tmp_path / "m", {"w": np.ones((4, 4), np.float32)})
    file = path / "model.safetensors"
    checkpoint = open_checkpoint(path)
    data = bytearray(file.read_bytes())
    data[-64:] = np.full(16, 2, np.float32).tobytes()
    with file.open("r+b") as handle:
        handle.write(data)
    np.testing.assert_array_equal(checkpoint.read("w"), np.full((4, 4), 2, np.float32))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = folder(tmp_path_factory.mktemp("st") / "m", {n: rng.normal(size=(8, 8)).astype(np.float32) for n in "abc"})
    return path, (path / "model.safetensors").read_bytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(whole, share):
    path, data = whole
    (path / "model.safetensors").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}}, "w"),
        ({"w": {"dtype": "F32", "shape": [-2, 2], "data_offsets": [0, 16]}}, "w"),
        ({"w": {"dtype": "F99", "shape": [2, 2], "data_offsets": [0, 16]}}, "F99"),
        ({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]}}, "w"),
        ({"w": {"dtype": "F32", "shape": [2, 2]}}, "w"),
        ([], "header"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, header, names):
    path = folder(tmp_path / "m", {"x": np.zeros(1, np.float32)})
    raw = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(16))
    with pytest.raises(CheckpointError, match=names):
        open_checkpoint(path)


def test_a_huge_header_length_allocates_nothing(tmp_path):
    path = folder(tmp_path / "m", {"x": np.zeros(1, np.float32)})
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(CorruptFileError):
        open_checkpoint(path)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path / "empty")
    path = folder(tmp_path / "m", {"x": np.zeros(1, np.float32)})
    (path / "config.json").write_text("{broken")
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_checkpoint(path)
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(UnsupportedFormatError, match=r"file\.txt"):
        open_checkpoint(tmp_path / "file.txt")


def test_an_index_that_names_a_missing_shard_is_refused(tmp_path):
    path = folder(tmp_path / "m", {"x": np.zeros(1, np.float32)})
    (path / "model.safetensors").unlink()
    index = {"weight_map": {"x": "model-00001-of-00001.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model-00001-of-00001"):
        open_checkpoint(path)


def test_an_unsupported_quantisation_names_itself(tmp_path):
    path = folder(
        tmp_path / "m", {"x": np.zeros(1, np.float32)}, CONFIG | {"quantization_config": {"quant_method": "quip"}}
    )
    with pytest.raises(UnsupportedFormatError, match="quip"):
        open_checkpoint(path)


def test_pages_that_were_read_are_given_back(tmp_path):
    """Resident pages of mapped files, as the system counts them; what was read stays valid."""
    value = np.random.default_rng(0).normal(size=(2048, 1024)).astype(np.float32)
    checkpoint = open_checkpoint(folder(tmp_path / "m", {"w": value}))
    tensor = checkpoint.read("w")
    np.testing.assert_array_equal(tensor, value)
    held = resident_file_bytes()
    checkpoint.release()
    assert held - resident_file_bytes() > 0.9 * value.nbytes
    np.testing.assert_array_equal(tensor, value)


def resident_file_bytes():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("the system does not say what memory a process holds")
    [line] = [line for line in status.read_text().splitlines() if line.startswith("RssFile")]
    return int(line.split()[1]) * 1024
