"""Whole runs on a two-layer model: through the engine, killed and continued, and refused before they start."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError, CheckpointFileError, UnsupportedFormatError, open_checkpoint
from tests.lite.harness import CALIBRATION, tiny_model
from turbojax import EngineConfig, GenerationConfig, pipeline
from turbojax.errors import CalibrationError, ConfigError, LiteError
from turbojax.lite import run as lite_run
from turbojax.lite.gptq import GptqOptions
from turbojax.lite.grid import Grid
from turbojax.lite.methods import Awq, Fp8, Gptq, Rtn, SmoothQuant
from turbojax.lite.run import Task, quantise
from turbojax.models.model import load_model
from turbojax.models.native import load_native_model
from turbojax.tokenizer import load_tokenizer

GPTQ = Gptq(Grid(4, 64))
ENGINE = EngineConfig(session_len=64, max_batch_size=1, cache_max_entry_count=4, compile_ahead=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def task(source, work_dir, method=GPTQ, format="gptq_v2", calibration=CALIBRATION):
    return Task(source, work_dir, method, format, calibration if method.needs_calibration else None)


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "lite_report.json"}


@pytest.mark.parametrize(
    ("method", "format"),
    [
        (GPTQ, "gptq_v2"),
        (Gptq(Grid(4, 32), GptqOptions(act_order=True, static_groups=True)), "compressed-tensors"),
        (SmoothQuant(), "smooth_quant"),
        (Fp8(has_blocks=True), "fp8"),
        (Rtn(Grid(4, 32, float_offset=True)), "native"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_was_written_loads(source, tmp_path, method, format):
    report = quantise(task(source, tmp_path / "out", method, format))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert len(report.linears) == 14
    assert 0 < max(linear.error for linear in report.linears) < 0.15
    if format != "native":  # whose tiles are mostly padding in linears this small
        assert report.bytes_after < 0.75 * report.bytes_before
    assert json.loads((tmp_path / "out" / "lite_report.json").read_text())["method"] == method.name
    assert f"{report.bytes_after / 1e6:.1f} MB after" in report.table()
    model = (load_native_model if format == "native" else load_model)(tmp_path / "out")
    assert model.spec.num_layers == 2
    assert load_tokenizer(tmp_path / "out").decode([40, 83]) == load_tokenizer(source).decode([40, 83])


@pytest.mark.slow
def test_the_engine_runs_what_was_written(source, tmp_path):
    quantise(task(source, tmp_path / "out", Awq(Grid(4, 64)), "awq"))
    with pipeline(str(tmp_path / "out"), backend_config=ENGINE) as pipe:
        response = pipe("It is", gen_config=GenerationConfig(max_new_tokens=3, ignore_eos=True), do_preprocess=False)
    assert (response.num_input_tokens, response.num_generated_tokens) == (5, 3)


def test_a_fold_changes_norms_and_the_product_stays_close(source, tmp_path):
    """The norm and the weights of the written checkpoint multiply to about what the source's do."""
    quantise(task(source, tmp_path / "out", Awq(Grid(4, 64)), "awq"))
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    names = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
    norm, w = (before.read(name).astype(np.float32) for name in names)
    new_norm, new_w = after.read(names[0]).astype(np.float32), after.read(names[1]).dequantize().T
    assert not np.allclose(new_norm, norm, rtol=0.05)
    error = np.linalg.norm(new_w * new_norm - w * norm) / np.linalg.norm(w * norm)
    assert error < 0.12


class Killed(BaseException):
    """As a signal would end it."""


@pytest.mark.parametrize("place", ["layer", "stream", "writing"])
def test_a_killed_run_leaves_no_checkpoint_and_goes_on(source, tmp_path, monkeypatch, place):
    quantise(task(source, tmp_path / "whole"))
    calls = []

    def killed(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patched:
        if place == "layer":
            real = lite_run.quantise_layer
            patched.setattr(lite_run, "quantise_layer", lambda *a: killed() if a[2] == 1 else real(*a))
        elif place == "stream":
            patched.setattr("turbojax.lite.work.save_array", killed)
        else:
            patched.setattr("checkpoints.exporters.folder.write_json", killed)
        with pytest.raises(Killed):
            quantise(task(source, tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "whole") == ["out.partial"]
    real = lite_run.quantise_layer
    monkeypatch.setattr(lite_run, "quantise_layer", lambda *a: calls.append(a[2]) or real(*a))
    quantise(task(source, tmp_path / "out"))
    assert calls == {"layer": [1], "stream": [0, 1], "writing": []}[place]
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_a_run_goes_on_with_its_own_settings_alone(source, tmp_path, monkeypatch):
    monkeypatch.setattr(lite_run, "write", lambda *a: (_ for _ in ()).throw(Killed))
    rtn = Rtn(Grid(4, 64))
    with pytest.raises(Killed):
        quantise(task(source, tmp_path / "out", rtn, "awq"))
    with pytest.raises(LiteError, match=r"out.partial: holds an unfinished run whose grid is .*64.*32"):
        quantise(task(source, tmp_path / "out", Rtn(Grid(4, 32)), "awq"))


def test_an_existing_folder_is_left_alone(source, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointFileError, match=r"out: exists already"):
        quantise(task(source, tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("method", "format", "error", "reason"),
    [
        (GPTQ, "gguf", ConfigError, r"lite.format is 'gguf'; accepted: awq, gptq"),
        (Awq(Grid(8, 64)), "awq", UnsupportedFormatError, r"layers.0.self_attn.q_proj.weight.*4 bits alone"),
        (Rtn(Grid(4, 32, float_offset=True)), "gptq", UnsupportedFormatError, r"no float offsets"),
        (SmoothQuant(), "awq", UnsupportedFormatError, r"4 bits alone"),
    ],
    ids=["format", "bits", "offset", "eight bits"],
)
def test_what_cannot_be_written_is_refused_first(source, tmp_path, method, format, error, reason):
    with pytest.raises(error, match=reason):
        quantise(task(source, tmp_path / "out", method, format))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rtn(Grid(3, 64)),
        lambda: Awq(Grid(4, 48)),
        lambda: Rtn(Grid(4, 64, symmetric=True, float_offset=True)),
        lambda: Gptq(Grid(4, 64), GptqOptions(damping=0.0)),
        lambda: SmoothQuant("int4"),
    ],
)
def test_settings_out_of_range(make):
    with pytest.raises(ConfigError, match=r"\w+\.\w+ is .*; accepted: "):
        make()


def broken(source, folder, change):
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_weight_that_is_not_finite_is_named(source, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors):
        tensors[name][3, 4] = np.nan

    with pytest.raises(LiteError, match=r"model.safetensors: tensor 'model.layers.1.mlp.up_proj.weight': 1 value"):
        quantise(task(broken(source, tmp_path / "in", spoil), tmp_path / "out", Rtn(Grid(4, 64)), "awq"))
    assert not (tmp_path / "out").exists()


def test_a_missing_tensor_is_named_before_any_layer(source, tmp_path):
    folder = broken(source, tmp_path / "in", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight': is missing"):
        quantise(task(folder, tmp_path / "out"))
    assert not (tmp_path / "out.partial").exists()


def test_calibration_needs_a_tokenizer(tmp_path):
    folder = tiny_model(tmp_path / "in", with_tokenizer=False)
    with pytest.raises(CalibrationError, match="no tokenizer"):
        quantise(task(folder, tmp_path / "out"))
    assert quantise(task(folder, tmp_path / "out", Rtn(Grid(4, 64)), "awq")).bytes_after > 0


def test_a_quantised_checkpoint_is_quantised_again_from_its_values(source, tmp_path):
    quantise(task(source, tmp_path / "first", Rtn(Grid(8, 32)), "compressed-tensors"))
    quantise(task(tmp_path / "first", tmp_path / "second", Rtn(Grid(4, 32)), "awq"))
    name = "model.layers.0.mlp.down_proj.weight"
    first, second = (open_checkpoint(tmp_path / run).read(name).dequantize() for run in ("first", "second"))
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "awq"
    assert 0.05 < np.linalg.norm(first - second) / np.linalg.norm(first) < 0.15
