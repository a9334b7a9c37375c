"""Files and batches over HTTP, as OpenAI's own client sees them."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.serve.batches.harness import jsonl, line, records
from tests.serve.harness import MODEL_NAME, fake_pipeline, serving_pipe
from turbojax.serve.settings import ServeConfig

WAIT_S = 30
ROOT = Path(__file__).parents[3]


@contextmanager
def serving_batches(folder, pipe, **config):
    settings = ServeConfig(server_port=0, batch_dir=str(folder), **config)
    with (
        serving_pipe(pipe, settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture
def client(tmp_path, fake_pipe):
    with serving_batches(tmp_path, fake_pipe) as client:
        yield client


def chat_line(custom_id, text="Hello", **body):
    return line(custom_id, model=MODEL_NAME, messages=[{"role": "user", "content": text}], max_tokens=4, **body)


def completion_line(custom_id, **body):
    return line(custom_id, url="/v1/completions", **{"model": MODEL_NAME, "prompt": "Hello", "max_tokens": 4} | body)


def begin(client, *lines, endpoint="/v1/chat/completions", **how):
    file = client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **how)


def ended(client, batch):
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        batch = client.batches.retrieve(batch.id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.02)
    pytest.fail(f"the batch is still {batch.status}")


def contents(client, file_id):
    return {record["custom_id"]: record for record in records(client.files.content(file_id).content)}


def test_chats_are_answered_as_their_route_answers_them(client):
    texts = {"a": "Hello", "b": "What is a page?", "c": "Who holds it?"}
    batch = ended(client, begin(client, *[chat_line(key, text, temperature=0) for key, text in texts.items()]))
    assert (batch.status, batch.error_file_id) == ("completed", None)
    found = contents(client, batch.output_file_id)
    assert found.keys() == texts.keys()
    for key, text in texts.items():
        answer = openai.types.chat.ChatCompletion.model_validate(found[key]["response"]["body"])
        direct = client.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": text}], max_tokens=4, temperature=0
        )
        assert answer.choices == direct.choices
        assert answer.usage == direct.usage


def test_errors_of_lines_are_those_of_their_route(client):
    bad = {
        "unknown field": ({"top_q": 1}, 400, "unknown_parameter"),
        "another model": ({"model": "gpt"}, 404, "model_not_found"),
        "streamed": ({"stream": True}, 400, None),
        "too long": ({"prompt": "x" * 1000}, 400, "context_length_exceeded"),
    }
    lines = [completion_line(key, **body) for key, (body, _, _) in bad.items()]
    batch = ended(client, begin(client, *lines, completion_line("good"), endpoint="/v1/completions"))
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 5, "completed": 1, "failed": 4}
    assert contents(client, batch.output_file_id).keys() == {"good"}
    found = contents(client, batch.error_file_id)
    told = {
        key: (one["response"]["status_code"], one["response"]["body"]["error"]["code"]) for key, one in found.items()
    }
    assert told == {key: (status, code) for key, (_, status, code) in bad.items()}


def test_a_file_that_holds_no_requests_fails_its_batch(client):
    batch = ended(client, begin(client, "{torn", line("a", url="/v1/embeddings")))
    assert batch.status == "failed"
    assert [(error.line, error.code) for error in batch.errors.data] == [(1, "invalid_json_line"), (2, "invalid_url")]


def test_files_are_kept_listed_and_deleted(client):
    made = [client.files.create(file=(f"{i}.jsonl", b"x" * i), purpose="batch") for i in range(3)]
    assert [(file.filename, file.bytes, file.status) for file in made][2] == ("2.jsonl", 2, "processed")
    listed = {file.id for file in client.files.list(limit=2)}  # the client asks for further pages
    assert listed == {file.id for file in made}
    assert client.files.retrieve(made[1].id) == made[1]
    assert client.files.content(made[2].id).content == b"xx"
    assert client.files.delete(made[1].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[1].id)
    assert list(client.files.list(purpose="batch_output")) == []
    kept = client.files.create(
        file=("k", b"k"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert kept.expires_at == kept.created_at + 3600


def test_batches_are_listed_and_cancelled(client):
    batches = [begin(client, chat_line("a"), metadata={"number": str(i)}) for i in range(3)]
    assert {batch.id for batch in client.batches.list(limit=2)} == {batch.id for batch in batches}
    batch = ended(client, batches[0])
    assert batch.metadata == {"number": "0"}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    for one in batches:
        ended(client, one)


def test_what_is_no_upload_is_refused_by_field(client):
    def post(**form):
        response = httpx.post(f"{client.base_url}files", **form, timeout=60)
        return response.status_code, response.json()["error"]["param"]

    good = {"file": ("in.jsonl", b"{}")}
    assert post(data={"purpose": "batch"}) == (400, "file")
    assert post(files=good, data={"purpose": "fine-tune"}) == (400, "purpose")
    assert post(files=good, data={"purpose": "batch", "size": "1"}) == (400, "size")
    assert post(files=good, data={"purpose": "batch", "expires_after[seconds]": "7"}) == (400, "expires_after")
    assert post(json={"purpose": "batch"}) == (400, "file")
    assert post(files=[("file", ("a", b"a")), ("file", ("b", b"b"))], data={"purpose": "batch"})[0] == 400
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n'
    assert post(content=body, headers={"Content-Type": "multipart/form-data; boundary=x"})[0] == 400


def test_no_name_of_a_request_is_a_path(client, tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "secret").write_text("")
    made = client.files.create(file=("../../escape.jsonl", b"x"), purpose="batch")
    assert made.filename in ("../../escape.jsonl", "escape.jsonl")
    assert not list(tmp_path.parent.glob("**/escape*"))
    for name in ("..%2Fsecret", "%2Fetc%2Fpasswd", "file-%00", "secret", f"{made.id}%2F..%2F..%2Fsecret"):
        for path in (f"files/{name}", f"files/{name}/content", f"batches/{name}"):
            assert httpx.get(f"{client.base_url}{path}", timeout=60).status_code == 404


def test_an_upload_has_a_size_limit(tmp_path, fake_pipe):
    with serving_batches(tmp_path, fake_pipe, max_upload_bytes=1000) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=("big.jsonl", b"x" * 2000), purpose="batch")
        assert caught.value.status_code == 413
        assert list((tmp_path / "files").iterdir()) == []


def test_without_a_folder_the_routes_say_so(fake_url):
    with openai.OpenAI(base_url=f"{fake_url}/v1", api_key="none", max_retries=5) as client:
        for call in (client.files.list, client.batches.list, lambda: client.files.retrieve("file-1")):
            with pytest.raises(openai.InternalServerError, match="--batch-dir") as caught:
                call()
            assert caught.value.status_code == 501


SERVER = """
import sys
from pathlib import Path
from tests.serve.harness import fake_pipeline, serving_pipe
from turbojax.serve.settings import ServeConfig

with fake_pipeline() as pipe, serving_pipe(pipe, ServeConfig(batch_dir=sys.argv[1], batch_concurrency=1)) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def test_a_server_that_was_killed_goes_on(tmp_path):
    num = 12
    lines = [chat_line(f"id-{i}", temperature=0, min_new_tokens=150, ignore_eos=True) for i in range(num)]
    for one in lines:
        one["body"]["max_tokens"] = 200
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip()
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
                batch = begin(client, *lines)
                while client.batches.retrieve(batch.id).request_counts.completed < 3:
                    time.sleep(0.01)
        finally:
            server.kill()
    (before,) = [path for path in (tmp_path / "files").glob("*.jsonl") if b"batch_req_" in path.read_bytes()]
    already = before.read_bytes()
    assert 3 <= already.count(b"\n") < num
    with before.open("ab") as file:
        file.write(b'{"id": "batch_req_torn')
    with fake_pipeline() as pipe, serving_batches(tmp_path, pipe) as client:
        batch = ended(client, batch)
        assert batch.request_counts.model_dump() == {"total": num, "completed": num, "failed": 0}
        data = client.files.content(batch.output_file_id).content
        assert data.startswith(already)
        assert sorted(record["custom_id"] for record in records(data)) == sorted(f"id-{i}" for i in range(num))


def test_requests_of_batches_come_after_those_that_somebody_waits_for(tmp_path, fake_pipe, monkeypatch):
    priorities = []
    stream = fake_pipe.astream_infer

    def watched(prompts, gen_config=None, **how):
        priorities.append(gen_config.priority)
        return stream(prompts, gen_config, **how)

    monkeypatch.setattr(fake_pipe, "astream_infer", watched)
    with serving_batches(tmp_path, fake_pipe) as client:
        ended(client, begin(client, chat_line("a"), chat_line("b", priority=3)))
        client.chat.completions.create(model=MODEL_NAME, messages=[{"role": "user", "content": "now"}])
    assert sorted(priorities) == [0, 3, 1000]


def test_the_document_knows_the_routes(fake_url):
    document = httpx.get(f"{fake_url}/openapi.json", timeout=60).json()
    form = document["paths"]["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert set(form["required"]) == {"file", "purpose"}
    assert "/v1/batches/{batch_id}/cancel" in document["paths"]
    assert json.dumps(document).count("501") > 5
