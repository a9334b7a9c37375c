"""Batches in the background: every request has one line in the end, whatever happens meanwhile."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.batches.harness import Clock, FakeAnswers, begin, ended, errors, line, output, running, until
from turbojax.errors import EngineFailedError
from turbojax.serve.batches import runner as runner_module
from turbojax.serve.batches.disk import BatchFolderError, Folder, check_folder
from turbojax.serve.openai_errors import ApiError


def lines_of(*texts):
    return [line(f"id-{i}", text=text) for i, text in enumerate(texts)]


def test_answers_and_errors_come_in_files_of_their_own(tmp_path):
    async def check():
        async with running(tmp_path, FakeAnswers()) as runner:
            batch = await ended(runner, begin(runner, *lines_of("a", "bad b", "c"), metadata={"who": "me"}))
            assert batch.status == "completed"
            assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
            found = {record["custom_id"]: record for record in output(runner, batch)}
            assert {key: record["response"]["body"]["text"] for key, record in found.items()} == {
                "id-0": "a",
                "id-2": "c",
            }
            assert found["id-0"]["error"] is None
            assert found["id-0"]["response"]["status_code"] == 200
            (error,) = errors(runner, batch)
            assert (error["custom_id"], error["response"]["status_code"]) == ("id-1", 400)
            assert runner.files.get(batch.output_file_id).purpose == "batch_output"
            assert batch.metadata == {"who": "me"}
            times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
            assert times == [1_000_000] * 4
            assert batch.expires_at == 1_000_000 + 24 * 3600

    asyncio.run(check())


def test_a_batch_without_errors_has_no_error_file(tmp_path):
    async def check():
        async with running(tmp_path, FakeAnswers()) as runner:
            good = await ended(runner, begin(runner, *lines_of("a")))
            bad = await ended(runner, begin(runner, *lines_of("bad a")))
            assert (good.error_file_id, bad.output_file_id) == (None, None)
            assert len(list((tmp_path / "files").glob("*.jsonl"))) == 4

    asyncio.run(check())


def test_requests_of_all_batches_together_are_few_at_a_time(tmp_path):
    async def check():
        answers = FakeAnswers()
        async with running(tmp_path, answers, num_in_flight=3) as runner:
            batches = [begin(runner, *lines_of(*[f"{name}{i}" for i in range(20)])) for name in "ab"]
            assert [(await ended(runner, batch)).status for batch in batches] == ["completed"] * 2
        assert answers.most_at_once == 3
        assert set(answers.num_answered.values()) == {1}

    asyncio.run(check())


def test_who_finds_no_room_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "BUSY_POLL_S", 0.001)

    async def check():
        answers = FakeAnswers()
        answers.num_busy = 7
        async with running(tmp_path, answers) as runner:
            batch = await ended(runner, begin(runner, *lines_of("a", "b")))
            assert batch.request_counts.completed == 2
        assert answers.num_started == 9

    asyncio.run(check())


def test_what_is_no_request_fails_the_batch_before_it_begins(tmp_path):
    async def check():
        answers = FakeAnswers()
        async with running(tmp_path, answers) as runner:
            batch = await ended(
                runner, begin(runner, line("a", text="a"), "{torn", line("a", text="b"), line("", text="c"))
            )
            assert batch.status == "failed"
            told = [(error.line, error.code, error.param) for error in batch.errors.data]
            assert told == [
                (2, "invalid_json_line", None),
                (3, "duplicate_custom_id", "custom_id"),
                (4, "missing_required_parameter", "custom_id"),
            ]
            assert (await ended(runner, begin(runner))).errors.data[0].code == "empty_file"
            other = begin(runner, line("a", url="/v1/completions", prompt="a"))
            assert (await ended(runner, other)).errors.data[0].code == "invalid_url"
        assert answers.num_started == 0

    asyncio.run(check())


def test_a_cancelled_batch_keeps_what_was_answered(tmp_path):
    async def check():
        answers = FakeAnswers()
        async with running(tmp_path, answers, num_in_flight=1) as runner:
            batch = begin(runner, *lines_of("a", "wait b", "c"))
            await until(lambda: answers.num_started == 2, "the second request did not start")
            assert runner.get(batch.id).request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 0}
            assert runner.cancel(batch.id).status == "cancelling"
            batch = await ended(runner, batch)
            assert (batch.status, batch.cancelled_at) == ("cancelled", 1_000_000)
            assert [record["custom_id"] for record in output(runner, batch)] == ["id-0"]
            assert {record["custom_id"]: record["error"]["code"] for record in errors(runner, batch)} == {
                "id-1": "batch_cancelled",
                "id-2": "batch_cancelled",
            }
            with pytest.raises(ApiError, match="Cannot cancel a batch with status 'cancelled'") as caught:
                runner.cancel(batch.id)
            assert caught.value.status == 409
        assert answers.num_answered == {"a": 1}

    asyncio.run(check())


def test_a_batch_whose_time_is_over_expires(tmp_path):
    async def check():
        answers, clock = FakeAnswers(), Clock()
        async with running(tmp_path, answers, num_in_flight=1, clock=clock) as runner:
            batch = begin(runner, *lines_of("a", "wait b", "c"), completion_window="1h")
            await until(lambda: answers.num_started == 2, "the second request did not start")
        clock.now += 3600
        async with running(tmp_path, answers, clock=clock) as runner:
            batch = await ended(runner, batch)
            assert (batch.status, batch.expired_at) == ("expired", 1_003_600)
            assert batch.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
            assert {record["error"]["code"] for record in errors(runner, batch)} == {"batch_expired"}
        assert answers.num_answered == {"a": 1}

    asyncio.run(check())


def test_a_batch_expires_while_it_runs(tmp_path):
    async def check():
        answers, clock = FakeAnswers(), Clock()
        async with running(tmp_path, answers, clock=clock) as runner:
            batch = begin(runner, *lines_of("a", "wait b"), completion_window="1h")
            clock.now += 3600 - 0.2  # seconds that the loop really waits
            batch = await ended(runner, batch)
            assert batch.status == "expired"
            assert batch.request_counts.completed + batch.request_counts.failed == 2
            assert "id-1" in {record["custom_id"] for record in errors(runner, batch)}

    asyncio.run(check())


def test_a_batch_goes_on_where_the_server_stopped(tmp_path):
    texts = ["a", "bad b", "wait c", "d"]

    async def first():
        answers = FakeAnswers()
        async with running(tmp_path, answers, num_in_flight=1) as runner:
            batch = begin(runner, *lines_of(*texts))
            await until(lambda: answers.num_started == 3, "the third request did not start")
            return batch.id

    async def second(batch_id):
        answers = FakeAnswers()
        answers.gate.set()
        async with running(tmp_path, answers) as runner:
            batch = await ended(runner, runner.batches.get(batch_id).batch)
            assert batch.status == "completed"
            assert batch.request_counts.model_dump() == {"total": 4, "completed": 3, "failed": 1}
            assert sorted(record["custom_id"] for record in output(runner, batch)) == ["id-0", "id-2", "id-3"]
        assert answers.num_answered == {"wait c": 1, "d": 1}

    batch_id = asyncio.run(first())
    asyncio.run(second(batch_id))


@settings(max_examples=25, deadline=None)
@given(
    num_done=st.integers(0, 5),
    num_bad=st.integers(0, 2),
    torn=st.binary(max_size=30).filter(lambda tail: b"\n" not in tail),
    status=st.sampled_from(["validating", "in_progress", "finalizing", "cancelling"]),
)
def test_it_goes_on_from_any_state_that_a_crash_leaves(tmp_path_factory, num_done, num_bad, torn, status):
    path = tmp_path_factory.mktemp("crash")
    texts = [f"wait {i}" for i in range(6)]

    async def first():
        async with running(path, FakeAnswers()) as runner:
            return begin(runner, *lines_of(*texts)).id

    def crash(batch_id):
        """What was on disk when the machine stopped."""
        place = path / "batches" / f"{batch_id}.json"
        state = json.loads(place.read_text())
        state["batch"]["status"] = status
        place.write_text(json.dumps(state))
        place.with_name(place.name + ".part").write_text('{"batch": {"id"')
        answered = [json.dumps({"custom_id": f"id-{i}", "response": {}, "error": None}) for i in range(num_done)]
        cut = max(0, num_done - num_bad)
        (path / "files" / f"{state['output_id']}.jsonl").write_bytes(
            "".join(f"{a}\n" for a in answered[:cut]).encode() + torn
        )
        (path / "files" / f"{state['error_id']}.jsonl").write_text("".join(f"{a}\n" for a in answered[cut:]))
        (path / "files" / f"file-{'0' * 32}.jsonl").write_text("nobody's")

    async def second(batch_id):
        answers = FakeAnswers()
        answers.gate.set()
        async with running(path, answers) as runner:
            batch = await ended(runner, runner.batches.get(batch_id).batch)
            found = [record["custom_id"] for record in output(runner, batch) + errors(runner, batch)]
            assert sorted(found) == [f"id-{i}" for i in range(6)]
            assert batch.request_counts.completed + batch.request_counts.failed == 6
            is_answered = status in ("validating", "in_progress")
            assert answers.num_answered == (dict.fromkeys(texts[num_done:], 1) if is_answered else {})
            assert batch.status == {"cancelling": "cancelled"}.get(status, "completed")
            assert len(list((path / "files").glob("*.jsonl"))) == 1 + bool(batch.output_file_id) + bool(
                batch.error_file_id
            )

    batch_id = asyncio.run(first())
    crash(batch_id)
    asyncio.run(second(batch_id))


def test_an_engine_that_fails_leaves_its_batches_as_they_are(tmp_path, caplog):
    async def first():
        answers = FakeAnswers()
        answers.error = EngineFailedError("the device is lost")
        async with running(tmp_path, answers) as runner:
            batch = begin(runner, *lines_of("a", "b"))
            await until(lambda: "stands still: the device is lost" in caplog.text, "nothing was said")
            assert runner.get(batch.id).status == "in_progress"
            return batch.id

    async def second(batch_id):
        async with running(tmp_path, FakeAnswers()) as runner:
            batch = await ended(runner, runner.batches.get(batch_id).batch)
            assert batch.request_counts.completed == 2

    asyncio.run(second(asyncio.run(first())))


def test_a_result_file_that_is_damaged_ends_its_batch(tmp_path):
    async def check():
        answers = FakeAnswers()
        async with running(tmp_path, answers) as runner:
            batch = begin(runner, *lines_of("wait a"))
            await until(lambda: answers.num_started, "nothing started")
            path = runner.files.content(runner.batches.get(batch.id).output_id)
        path.write_bytes(b"\0\0\n")
        async with running(tmp_path, answers) as runner:
            batch = await ended(runner, batch)
            assert (batch.status, batch.errors.data[0].code) == ("failed", "results_damaged")

    asyncio.run(check())


def test_only_files_for_batches_begin_one_and_there_is_an_end_to_how_many(tmp_path, monkeypatch):
    monkeypatch.setattr("turbojax.serve.batches.batches.MAX_UNFINISHED", 2)

    async def check():
        async with running(tmp_path, FakeAnswers()) as runner:
            done = await ended(runner, begin(runner, *lines_of("a")))
            for file_id, status in ((done.output_file_id, 400), ("file-" + "0" * 32, 404), ("../../etc/passwd", 404)):
                with pytest.raises(ApiError) as caught:
                    begin(runner, input_file_id=file_id)
                assert caught.value.status == status
            for _ in range(2):
                begin(runner, *lines_of("wait"))
            with pytest.raises(ApiError) as caught:
                begin(runner, *lines_of("wait"))
            assert caught.value.status == 429

    asyncio.run(check())


def test_a_folder_has_one_server(tmp_path):
    async def check():
        async with running(tmp_path, FakeAnswers()):
            with pytest.raises(BatchFolderError, match="in use by another server"):
                Folder(tmp_path)
        check_folder(str(tmp_path))
        check_folder(None)

    asyncio.run(check())
    (tmp_path / "a file").write_text("")
    with pytest.raises(BatchFolderError, match="cannot be written"):
        check_folder(str(tmp_path / "a file"))
