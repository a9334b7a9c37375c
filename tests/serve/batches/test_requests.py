"""Lines of an input file: each is a request, or an error that says which field is wrong."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.batches.harness import CHAT, jsonl, line
from turbojax.serve.batches.requests import LineError, index_requests, parse_line, read_requests
from turbojax.serve.settings import ServeConfig

CONFIG = ServeConfig(max_body_bytes=200, max_batch_requests=3, max_json_depth=5)
ROOMY = ServeConfig()


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"{torn", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (jsonl({"method": "POST"}), "missing_required_parameter", "custom_id"),
        (jsonl(line(7)), "missing_required_parameter", "custom_id"),
        (jsonl(line("a") | {"priority": 3}), "unknown_parameter", "priority"),
        (jsonl(line("a") | {"method": "GET"}), "invalid_method", "method"),
        (jsonl(line("a", url="/v1/embeddings")), "invalid_url", "url"),
        (jsonl(line("a", url=["/v1/completions"])), "invalid_url", "url"),
        (jsonl(line("a") | {"body": []}), "missing_required_parameter", "body"),
        (jsonl(line("a", x="x" * 200)), "line_too_large", None),
        (jsonl(line("a", x=[[[[[1]]]]])), "body_too_deep", None),
    ],
)
def test_what_is_wrong_is_named(raw, code, param):
    with pytest.raises(LineError) as caught:
        parse_line(raw, CONFIG)
    assert (caught.value.code, caught.value.param) == (code, param)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
fields = st.sampled_from(["custom_id", "method", "url", "body", "x"])
values = json_values | st.sampled_from(["POST", CHAT])
likely = st.fixed_dictionaries(
    {"custom_id": st.text(max_size=3), "method": st.just("POST"), "url": st.just(CHAT), "body": json_values}
)


@given(likely | st.dictionaries(fields, values, max_size=5) | json_values)
@settings(max_examples=200, deadline=None)
def test_any_line_is_a_request_or_an_error(value):
    fits = isinstance(value, dict) and value.keys() == {"custom_id", "method", "url", "body"}
    fits = fits and value["method"] == "POST" and value["url"] == CHAT and isinstance(value["body"], dict)
    if fits and isinstance(value["custom_id"], str) and value["custom_id"]:
        assert parse_line(json.dumps(value).encode(), ROOMY, CHAT) == (value["custom_id"], CHAT, value["body"])
    else:
        with pytest.raises(LineError):
            parse_line(json.dumps(value).encode(), ROOMY, CHAT)


@given(st.lists(st.integers(0, 400), max_size=6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_lines_of_any_size_are_found_again_where_they_stand(tmp_path_factory, sizes, ends_in_newline):
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    lines = [line(f"{i}", x="x" * size) for i, size in enumerate(sizes)]
    data = b"\n".join(jsonl(one) for one in lines)  # blank lines between
    path.write_bytes(data if ends_in_newline else data.rstrip(b"\n"))
    fits = [len(jsonl(one)) - 1 <= CONFIG.max_body_bytes for one in lines]
    index = index_requests(path, CHAT, CONFIG)
    good = [one for one, is_good in zip(lines, fits, strict=True) if is_good]
    assert [entry.custom_id for entry in index.entries] == [one["custom_id"] for one in good[:3]]
    found = list(read_requests(path, index.entries, CONFIG))
    assert [request.body for request in found] == [one["body"] for one in good[:3]]
    too_large = [problem.line for problem in index.problems if problem.error.code == "line_too_large"]
    assert too_large == [2 * i + 1 for i, is_good in enumerate(fits) if not is_good]
    if not lines:
        assert [problem.error.code for problem in index.problems] == ["empty_file"]


def test_a_file_that_is_wrong_from_end_to_end_is_told_in_part(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x\n" * 100_000)
    assert len(index_requests(path, CHAT, CONFIG).problems) == 100
