"""`turbojax generate --input --output`: what is written, when, and how a stopped run goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbojax.cli.bulk_files import Job, LineError, ResultFile, parse_line
from turbojax.configs import GenerationConfig


def write_lines(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def records(path):
    return {r["line"]: r for r in map(json.loads, path.read_text().splitlines())}


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def bulk(run, files, *more):
    return run("generate", "--input", files[0], "--output", files[1], *more)


def test_every_kind_of_prompt_and_its_parameters(run, pipes, files):
    write_lines(
        files[0],
        {"id": "x", "prompt": "a b c"},
        {"messages": [{"role": "user", "content": "d e"}], "max_new_tokens": 1},
        "",
        {"token_ids": [5, 6], "temperature": 0.5},
    )
    result = bulk(run, files, "--top-k", "3")
    assert result.exit_code == 0
    assert result.stdout == ""
    got = records(files[1])
    assert {n: r["text"] for n, r in got.items()} == {1: "A B C", 2: "D", 4: "5 6"}
    assert got[1] == {
        "line": 1, "id": "x", "text": "A B C", "token_ids": [0, 1, 2], "finish_reason": "stop",
        "num_input_tokens": 3, "num_generated_tokens": 3,
    }  # fmt: skip
    gen_of = {str(prompt): gen for prompt, gen, _ in pipes[0].calls}
    assert gen_of["[5, 6]"].temperature == 0.5
    assert {gen.top_k for gen in gen_of.values()} == {3}


def test_samples_and_log_probabilities_are_in_the_record(run, pipes, files):
    write_lines(files[0], {"prompt": "a b", "n": 2, "do_sample": True}, {"prompt": "a b", "logprobs": 0})
    assert bulk(run, files).exit_code == 0
    got = records(files[1])
    assert [sample["text"] for sample in got[1]["samples"]] == ["A B", "A B"]
    assert got[1]["num_generated_tokens"] == 4
    assert got[2]["logprobs"] == [{"0": -1.0}, {"1": -1.0}]
    assert "prompt_logprobs" not in got[2]


def test_bad_lines_are_reported_and_the_rest_goes_on(run, files):
    write_lines(
        files[0],
        {"prompt": "good"},
        "{torn",
        "[1]",
        {"id": 7, "text": "no prompt"},
        {"prompt": "a", "token_ids": [1]},
        {"prompt": "a", "top_q": 1, "output_logits": "all"},
        {"prompt": "a", "top_p": 3},
        {"prompt": 3},
        {"messages": []},
        {"token_ids": [True]},
        {"prompt": "raise"},
        {"prompt": "fail"},
        {"prompt": "also good"},
    )
    with files[0].open("ab") as file:
        file.write(b'{"prompt": "\xff"}\n')
    result = bulk(run, files)
    assert result.exit_code == 1
    got = records(files[1])
    assert sorted(got) == list(range(1, 15))
    assert {n for n, r in got.items() if "error" not in r} == {1, 13}
    assert got[4]["id"] == 7
    reasons = {6: "top_q", 7: "top_p", 11: "session_len", 12: "out of pages", 14: "utf-8"}
    for line, reason in reasons.items():
        assert reason in got[line]["error"]
        assert f"line {line}: " in result.stderr
    assert "12 lines failed" in result.stderr


def test_started_again_it_runs_what_is_missing(run, pipes, files):
    write_lines(files[0], *({"prompt": f"p{i}"} for i in range(1, 6)))
    whole = json.dumps({"line": 2, "id": None, "text": "kept"}) + "\n"
    files[1].write_text(whole + '{"line": 3, "id": null, "te')
    assert bulk(run, files).exit_code == 0
    assert {prompt for prompt, _, _ in pipes[0].calls} == {"p1", "p3", "p4", "p5"}
    assert {n: r["text"] for n, r in records(files[1]).items()} == {1: "P1", 2: "kept", 3: "P3", 4: "P4", 5: "P5"}
    done = bulk(run, files)
    assert done.exit_code == 0
    assert "all 5 lines are finished" in done.stderr
    assert len(pipes) == 1


def test_failed_lines_are_tried_again_and_leave_no_second_record(run, pipes, files):
    write_lines(files[0], {"prompt": "p1"}, {"prompt": "now good"}, {"prompt": "p3"}, {"prompt": "p4"})
    written = [{"line": 3, "text": "kept"}, {"line": 2, "error": "too long"}, {"line": 1, "text": "kept too"}]
    write_lines(files[1], *written)
    with files[1].open("a") as file:
        file.write('{"line": 4, "te')
    assert bulk(run, files).exit_code == 0
    assert {prompt for prompt, _, _ in pipes[0].calls} == {"now good", "p4"}
    lines = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert lines[:2] == [written[0], written[2]]
    assert {r["line"]: r["text"] for r in lines[2:]} == {2: "NOW GOOD", 4: "P4"}
    assert list(files[1].parent.glob("*.tmp")) == []


def test_an_engine_that_always_fails_ends_the_run(run, files):
    write_lines(files[0], *({"prompt": "fail"} for _ in range(100)))
    result = bulk(run, files, "--max-batch-size", "4")
    assert result.exit_code == 1
    assert "fails again and again, the last time with: out of pages" in result.stderr
    assert len(files[1].read_text().splitlines()) == 9


def test_an_engine_that_is_lost_ends_the_run_with_one_line_and_fails_no_further_line(run, files):
    write_lines(files[0], {"prompt": "a"}, {"prompt": "lost"}, *[{"prompt": "lost"}] * 9)
    result = bulk(run, files, "--max-batch-size", "1")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: the device is lost: no device"
    assert set(records(files[1])) <= {1}


def test_a_foreign_output_file_is_refused_untouched(run, pipes, files):
    write_lines(files[0], {"prompt": "a"})
    files[1].write_text('{"my": "data"}\ntorn')
    result = bulk(run, files)
    assert result.exit_code == 1
    assert f"{files[1]}, line 1 is no result" in result.stderr.replace("\n", "")
    assert files[1].read_text() == '{"my": "data"}\ntorn'
    assert pipes == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full, a disk that is always full")
def test_a_full_disk_is_one_line(run, files):
    write_lines(files[0], {"prompt": "a"})
    result = run("generate", "--input", files[0], "--output", "/dev/full")
    assert result.exit_code == 1
    assert "error: cannot write /dev/full: No space left on device" in result.stderr


def test_an_output_folder_that_is_missing_is_one_line(run, pipes, files, tmp_path):
    write_lines(files[0], {"prompt": "a"})
    result = run("generate", "--input", files[0], "--output", tmp_path / "none" / "out.jsonl")
    assert result.exit_code == 1
    assert "No such file or directory" in result.stderr
    assert pipes == []


def test_no_more_than_twice_the_batch_is_in_flight(run, pipes, files, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    from turbojax.cli import bulk as module

    sizes = []
    monkeypatch.setattr(module, "ThreadPoolExecutor", lambda n, **k: sizes.append(n) or ThreadPoolExecutor(n, **k))
    write_lines(files[0], *({"prompt": f"p{i}"} for i in range(50)))
    assert bulk(run, files, "--max-batch-size", "2").exit_code == 0
    assert sizes == [4]
    assert len(records(files[1])) == 50


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_loses_nothing_that_was_finished(files):
    write_lines(files[0], *({"prompt": "slow" if i % 3 == 0 else f"p{i}"} for i in range(1, 13)))
    code = (
        "from tests.cli.fake import opener\nfrom turbojax.cli import main, session\n"
        "session.open_pipeline = opener([])\nmain()"
    )
    command = [sys.executable, "-c", code, "generate", "--input", str(files[0]), "--output", str(files[1])]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 60
    while not files[1].exists() or files[1].read_bytes().count(b"\n") < 8:  # all but the four slow ones
        assert time.monotonic() < deadline, "no results"
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "8 of 12 lines are finished" in stderr
    assert "Traceback" not in stderr
    assert sorted(records(files[1])) == [1, 2, 4, 5, 7, 8, 10, 11]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from(["id", "prompt", "messages", "token_ids", "top_p", "stop_words", "max_new_tokens", "x"])


@given(st.dictionaries(keys, json_values, max_size=4) | json_values)
@settings(max_examples=300, deadline=None)
def test_any_line_is_a_job_or_an_error_never_an_exception(value):
    parsed = parse_line(3, json.dumps(value).encode(), GenerationConfig())
    assert isinstance(parsed, Job | LineError)
    assert parsed.line == 3


@given(texts=st.lists(st.text(), min_size=1, max_size=5), num_cut_bytes=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_a_file_torn_anywhere_in_its_last_line_resumes(tmp_path_factory, texts, num_cut_bytes):
    path = tmp_path_factory.mktemp("torn") / "out.jsonl"
    with ResultFile(path) as results:
        for line, text in enumerate(texts, start=1):
            results.append({"line": line, "text": text})
    whole = path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    path.write_bytes(whole[: max(last, len(whole) - num_cut_bytes)])
    with ResultFile(path) as results:
        assert results.finished == set(range(1, len(texts)))
        results.append({"line": len(texts), "text": texts[-1]})
    assert [json.loads(line)["text"] for line in path.read_bytes().splitlines()] == texts
