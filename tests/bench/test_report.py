"""Rows, the JSON file that runs add to, and the tables."""

import json
from io import StringIO

import pytest
from rich.console import Console

from turbojax.bench.errors import BenchError
from turbojax.bench.report import ResultFile, length_name, make_row, number, print_kernels, print_latencies, print_rows

HEADER = {"versions": {"jax": "0.11"}, "date": "2026-11-30", "command": "turbojax bench decode"}


def test_the_share_of_a_rate_and_of_a_time():
    assert make_row("a", 50.0, "tok/s", 200.0)["share"] == 0.25
    assert make_row("a", 200.0, "ms", 50.0)["share"] == 0.25
    assert make_row("a", 0.9, "ratio", 1.0)["share"] == 0.9
    row = make_row("a", 3.0, "tok/s", None, note=1, missing=None)
    assert row == {"case": "a", "value": 3.0, "unit": "tok/s", "floor": None, "share": None, "note": 1}


def test_rows_of_the_same_case_are_replaced_and_others_stay(tmp_path):
    path = tmp_path / "engine.json"
    ResultFile(path, "H200").update([make_row("a", 1.0, "tok/s", 2.0), make_row("b", 3.123456, "tok/s", 4.0)], HEADER)
    later = HEADER | {"date": "2026-12-01", "command": "another"}
    ResultFile(path, "H200").update([make_row("a", 1.5, "tok/s", 2.0), make_row("c", 1.0, "ms", 1.0)], later)
    content = json.loads(path.read_text())
    assert content.keys() == {"device", "versions", "date", "command", "rows"}
    assert (content["device"], content["date"]) == ("H200", "2026-12-01")
    assert [(row["case"], row["value"], row["command"]) for row in content["rows"]] == [
        ("a", 1.5, "another"), ("b", 3.1235, "turbojax bench decode"), ("c", 1.0, "another"),
    ]  # fmt: skip
    assert all(row.keys() >= {"case", "value", "unit", "floor", "share", "date"} for row in content["rows"])


def test_results_of_another_device_are_not_mixed(tmp_path):
    path = tmp_path / "engine.json"
    ResultFile(path, "H200").update([make_row("a", 1.0, "tok/s", 2.0)], HEADER)
    with pytest.raises(BenchError, match="results of H200, and this is cpu"):
        ResultFile(path, "cpu")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"device": "cpu", "rows": [1]}'])
def test_another_file_is_left_alone(tmp_path, content):
    path = tmp_path / "engine.json"
    path.write_text(content)
    with pytest.raises(BenchError, match="no file of benchmark results"):
        ResultFile(path, "cpu")
    assert path.read_text() == content


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(BenchError, match="cannot write"):
        ResultFile(tmp_path / "none" / "a.json", "cpu").update([], HEADER)


def test_lengths_and_numbers_are_short():
    assert [length_name(n) for n in (1024, 16384, 1000, 1)] == ["1k", "16k", "1000", "1"]
    assert [number(x) for x in (12345.6, 12.345, 0.01234, 1.0, None)] == ["12,346", "12.3", "0.0123", "1", "-"]


def test_the_tables_show_every_row():
    console = Console(width=120, record=True, file=StringIO())
    print_rows([make_row("decode b1 1k kv8", 560.0, "tok/s", 891.0, step_ms=1.786)], console)
    print_latencies({"ttft_ms": {"mean": 1.0, "p50": 2.0, "p95": 3.0, "p99": 4.0}}, console)
    print_kernels([("gemm", 2e-6, 3), ("softmax", 1e-6, 1)], 4e-6, console)
    text = console.export_text()
    assert "decode b1 1k kv8    560  tok/s    891  0.629     1.79" in text
    assert "TTFT     1    2    3    4" in text
    assert "gemm         2.0  0.500" in text
    assert "all          4.0      1" in text
