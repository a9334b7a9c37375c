"""The scanner of JSON agrees with Python's reader about what JSON is, and where it ends."""

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from turbojax.serve.bounds import MAX_JSON_DEPTH
from turbojax.serve.parsing.json_scanner import JsonScanner

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
PARTS = [
    '"', "\\", "u00e9", "u0", "{", "}", "[", "]", ":", ",", "1", "-", ".5", "e+2", "0", "true", "null", "a", " ", "\n",
    '"a":', '"k"', "\x01", "é",
]  # fmt: skip


def scan(text, cuts=()):
    """(where the value ends, None) or (where it goes wrong, problem); None for a text that is not all there."""
    scanner, at = JsonScanner(), 0
    for end in [*sorted(cuts), len(text)]:
        at = scanner.read(text[:end], at)
        if scanner.is_done or scanner.problem is not None:
            return at, scanner.problem
    return None


@settings(deadline=None)
@given(values, st.sampled_from([None, 1]), st.sampled_from(["", "}", "]", ",1", "x", ' "']), st.booleans())
def test_it_stops_where_a_value_ends(value, indent, behind, is_ascii):
    written = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    is_word = written[-1].isalnum()
    if is_word and behind in ("", "x"):
        behind = " "  # only what follows tells that a number has ended
    assert scan(written + behind) == (len(written), None)


@settings(deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
@example("[1, 2,]")
@example('{"a": 1,}')
@example("[01]")
@example('["\\x"]')
@example("[1 2]")
@example("[}")
def test_it_takes_what_python_takes(text):
    text = text.lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        end = None
    result = scan(text + " ")
    if end is not None and (result is None or result[1] is None):
        assert result == (end, None)
    elif end is not None:
        # Python reads "1" of "1a" and "1.": a beginning that is a number; the scanner wants the whole word.
        assert text[:1] in "-0123456789tn"
        assert text[end : end + 1] not in ("", " ", "\n", ",", "]", "}", ":", '"', "[", "{")
    else:
        assert result is None or result[1] is not None


@settings(deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.data())
def test_cuts_change_nothing(text, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert scan(text, cuts) == scan(text)
    assert scan(text, range(len(text))) == scan(text)


def test_depth_is_bounded_and_costs_no_stack():
    deepest = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert scan(deepest) == (len(deepest), None)
    at, problem = scan("[" * 1_000_000)
    assert at == MAX_JSON_DEPTH
    assert str(MAX_JSON_DEPTH) in problem
