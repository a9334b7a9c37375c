"""The commands, from their options to the checkpoint."""

import json

import pytest
from typer.testing import CliRunner

from tests.lite.harness import tiny_model
from turbojax.cli import app
from turbojax.errors import ConfigError
from turbojax.lite.gptq import GptqOptions
from turbojax.lite.grid import Grid
from turbojax.lite.methods import Awq, Fp8, Gptq, Rtn, SmoothQuant
from turbojax.lite.run import Task


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(app, "prepare_environment", lambda: None)  # the environment is the whole test run's
    return lambda *args: CliRunner().invoke(app.app, ["lite", *map(str, args)])


def test_a_command_writes_a_checkpoint_and_prints_what_it_cost(run, source, tmp_path):
    result = run("rtn", source, "--w-group-size", 64, "--work-dir", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "relative error of weights, %" in result.stdout
    assert result.stdout.count("\n") == 6  # two heads, two layers, the means, the sizes
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 64


def test_a_pipe_hears_how_far_a_run_is(run, source, tmp_path, monkeypatch):
    monkeypatch.setattr("turbojax.cli.lite_options.SECONDS_A_LINE", 0)
    result = run("rtn", source, "--w-group-size", 64, "--work-dir", tmp_path / "out")
    assert "layer 1 of 2 after" in result.stderr
    monkeypatch.setattr("turbojax.cli.lite_options.SECONDS_A_LINE", 3600)
    result = run("rtn", source, "--w-group-size", 64, "--work-dir", tmp_path / "other")
    assert " of 2 after" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "method", "format"),
    [
        (["auto_awq"], Awq(Grid(4, 128)), "awq"),
        (["auto_awq", "--w-sym", "--no-search-clip"], Awq(Grid(4, 128, True), search_clip=False), "awq"),
        (["auto_awq", "--w-bits", 8, "--format", "gptq"], Awq(Grid(8, 128, min_zero=1)), "gptq"),
        (["auto_gptq", "--w-group-size", 64], Gptq(Grid(4, 64, min_zero=1)), "gptq"),
        (
            ["auto_gptq", "--act-order", "--damping", 0.05, "--format", "gptq_v2"],
            Gptq(Grid(4, 128), GptqOptions(act_order=True, damping=0.05)),
            "gptq_v2",
        ),
        (["rtn", "--float-offset", "--format", "native"], Rtn(Grid(4, 128, float_offset=True)), "native"),
        (["smooth_quant", "--quant-dtype", "fp8"], SmoothQuant("float8_e4m3fn"), "compressed-tensors"),
        (["fp8"], Fp8(), "compressed-tensors"),
        (["fp8", "--blocks"], Fp8(has_blocks=True), "fp8"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_options_become_a_task(run, source, monkeypatch, arguments, method, format):
    tasks = []

    def quantise(task, progress):
        tasks.append(task)
        raise ConfigError("a", "test", "is", "over")

    monkeypatch.setattr("turbojax.lite.run.quantise", quantise)
    name, *rest = arguments
    calibration = ["--calib-samples", 8, "--calib-seqlen", 64] if method.needs_calibration else []
    result = run(name, source, "--work-dir", "out", *rest, *calibration)
    assert (result.exit_code, result.stderr) == (1, "error: a.test is 'is'; accepted: over\n")
    [task] = tasks
    assert isinstance(task, Task)
    assert (task.source, task.work_dir.name, task.method, task.format) == (source, "out", method, format)
    if method.needs_calibration:
        assert (task.calibration.calib_samples, task.calibration.calib_seqlen) == (8, 64)
    else:
        assert task.calibration is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["auto_awq", "--w-bits", 3], "auto_awq.w_bits is 3; accepted: 4 or 8"),
        (["rtn", "--w-group-size", 100], "rtn.w_group_size is 100; accepted: 32, 64, 128"),
        (["smooth_quant", "--quant-dtype", "int4"], "smooth_quant.quant_dtype is 'int4'; accepted: int8 or fp8"),
        (["auto_gptq", "--calib-samples", 0], "Calibration.calib_samples is 0; accepted: an integer from 1 on"),
        (["rtn", "--format", "exl2"], "lite.format is 'exl2'; accepted: awq,"),
        (["auto_awq", "--calib-dataset", "owner/name"], "pip install datasets"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_errors_are_one_line(run, source, tmp_path, arguments, reason):
    name, *rest = arguments
    result = run(name, source, "--work-dir", tmp_path / "out", *rest)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert reason in result.stderr
    assert not (tmp_path / "out").exists()
