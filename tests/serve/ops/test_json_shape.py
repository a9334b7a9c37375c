"""The shape of a JSON text, against a walk over what a JSON reader makes of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbojax.serve.json_shape import Shape, at_most, exactly

texts = st.text(st.sampled_from('ab"\\[]{}, \n\u00e9'), max_size=8)
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def walked(value) -> Shape:
    """By the definition."""
    if not isinstance(value, list | dict):
        return Shape(0, 0)
    inner = [walked(one) for one in (value if isinstance(value, list) else value.values())]
    return Shape(1 + sum(one.num_containers for one in inner), 1 + max([one.depth for one in inner], default=0))


@settings(deadline=None)
@given(values, st.booleans(), st.sampled_from([None, 2]))
def test_the_shape_is_that_of_the_value(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    shape = walked(value)
    assert exactly(text) == shape
    assert all(most >= found for most, found in zip(at_most(text), shape, strict=True))


@pytest.mark.parametrize(
    "text",
    [b'"\\' * 1000, b"\\" * 1001, b'"' * 999, b"]" * 1000, b"\xff\xfe" * 100, b"", b'["' + b'\\"' * 1000],
)
def test_what_is_no_json_gives_numbers_all_the_same(text):
    shape = exactly(text)
    assert 0 <= shape.depth <= shape.num_containers <= at_most(text).num_containers


def test_however_long_and_deep():
    assert exactly(b"[" * 3_000_000) == (3_000_000, 3_000_000)
    assert exactly(b"[[" + b'"[",' * 500_000 + b"[]]]") == (3, 3)
