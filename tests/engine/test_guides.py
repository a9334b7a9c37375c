"""Guides: bad words against a search of the text, grammars against what they stand for."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from turbojax.engine.bad_words import BadWords, Vocabulary
from turbojax.engine.guides import AllOf, as_mask
from turbojax.errors import ConfigError, GuideError, MissingExtraError
from turbojax.tokenizer import Tokenizer as Fast
from turbojax.tokenizer import load_tokenizer
from turbojax.vocabulary import vocabulary_of

EOS = 2


def allowed_ids(mask, vocab_size):
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return set(np.flatnonzero(bits).tolist())


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_a_mask_has_bit_i_of_word_j_for_token_32_j_plus_i(allowed):
    mask = as_mask(np.array(allowed))
    assert mask.dtype == np.uint32
    assert [bool(mask[i // 32] >> (i % 32) & 1) for i in range(len(allowed))] == allowed


@given(
    st.lists(st.text("abé", max_size=3).map(str.encode), min_size=1, max_size=12),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_a_token_may_come_unless_it_completes_a_bad_word(tokens, words, data):
    vocab_size = len(tokens) + 3  # the model's vocabulary is larger than the tokenizer's
    guide, said = BadWords(words, Vocabulary(tokens), vocab_size), b""
    for _ in range(6):
        may = allowed_ids(guide.mask(), vocab_size)
        expected = {i for i, t in enumerate(tokens) if not any(w.encode() in said + t for w in words)}
        assert may == expected | set(range(len(tokens), vocab_size))
        if not expected:
            break
        token = data.draw(st.sampled_from(sorted(expected)))
        guide.advance([token])
        said += tokens[token]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return vocabulary_of(tokenizer, skip_special_tokens=True)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    pytest.importorskip("llguidance")
    from turbojax.guided import GuideCompiler

    return GuideCompiler(tokenizer, tokenizer.vocab_size, [EOS])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20))
def test_the_bytes_of_tokens_make_the_text(tokenizer, vocabulary, text):
    ids = tokenizer.encode(text)
    assert b"".join(vocabulary.token_bytes[i] for i in ids).decode(errors="replace") == tokenizer.decode(ids)


def test_special_tokens_are_text_only_where_they_are_shown(tokenizer):
    for skip in (True, False):
        text = vocabulary_of(tokenizer, skip_special_tokens=skip).token_bytes[EOS].decode()
        assert text == tokenizer.decode([EOS], skip_special_tokens=skip)


@pytest.fixture(scope="module")
def sentencepiece():
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "ab"]
    inner = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("a", "b")], byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])

    return Fast(SimpleNamespace(backend_tokenizer=inner))


@pytest.mark.parametrize("text", [" a", "ab é a"])
def test_the_bytes_of_sentencepiece_tokens_make_the_text(sentencepiece, text):
    vocabulary = vocabulary_of(sentencepiece, skip_special_tokens=True)
    ids = sentencepiece.backend.encode(text).ids
    assert b"".join(vocabulary.token_bytes[i] for i in ids).decode() == text


def test_a_choice_of_sentencepiece_tokens_is_one_of_its_texts(sentencepiece):
    pytest.importorskip("llguidance")
    from turbojax.guided import GuideCompiler

    vocab_size = sentencepiece.backend.get_vocab_size() + 6  # padded, as models are
    compiler, said = GuideCompiler(sentencepiece, vocab_size, [EOS]), set()
    for seed in range(20):
        ids = answer(compiler.guide({"type": "choice", "choice": ["ab é", "b a"]}), vocab_size, seed)
        said.add(sentencepiece.backend.decode(ids))
    assert said == {"ab é", "b a"}


def answer(guide, vocab_size, seed, max_tokens=400):
    """Tokens of a model that does not care for the format; None if it does not come to an end."""
    rng, ids = np.random.default_rng(seed), []
    while not guide.is_finished and len(ids) < max_tokens:
        may = np.array(sorted(allowed_ids(guide.mask(), vocab_size)))
        token = int(rng.choice(may))
        if EOS in may and rng.random() < 0.3:
            token = EOS
        if token == EOS:
            return ids
        ids.append(token)
        guide.advance([token])
    return ids if guide.is_finished else None


leaves = st.sampled_from([
    {"type": "integer", "minimum": -5, "maximum": 120}, {"type": "boolean"}, {"type": "null"},
    {"type": "string", "maxLength": 4}, {"enum": ["red", "a \"b\" \\", 3]}, {"const": {"x": [1]}},
])  # fmt: skip


def array_of(items, most):
    return {"type": "array", "items": items, "maxItems": most}


def object_of(fields):
    return {"type": "object", "properties": fields, "required": sorted(fields), "additionalProperties": False}


def containers(inner):
    objects = st.dictionaries(st.sampled_from(["a", "b c", "é"]), inner, max_size=3).map(object_of)
    return st.builds(array_of, inner, st.integers(0, 3)) | objects


schemas = st.recursive(leaves, containers, max_leaves=4)


def satisfies(value, schema):
    """An independent reading of the schemas above."""
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return value == schema["const"]
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return type(value) is bool
        case "null":
            return value is None
        case "string":
            return type(value) is str and len(value) <= schema["maxLength"]
        case "array":
            return len(value) <= schema["maxItems"] and all(satisfies(v, schema["items"]) for v in value)
        case "object":
            fields = schema["properties"]
            return value.keys() == fields.keys() and all(satisfies(value[k], fields[k]) for k in fields)


@settings(max_examples=30, deadline=None)
@given(schemas, st.integers(0, 2**32))
def test_whatever_the_model_says_a_schema_is_satisfied(tokenizer, compiler, schema, seed):
    guide = compiler.guide({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    ids = answer(guide, tokenizer.vocab_size, seed)
    assert ids is not None, "the white space of JSON is bounded"
    text = tokenizer.decode(ids)
    assert satisfies(json.loads(text), schema)
    assert re.search(r"\s\s|[\t\r]", re.sub(r'"(\\.|[^"\\])*"', '""', text)) is None


LAYOUTS = {
    "compact": '{"a":[1,2]}', "spaced": '{"a": [1, 2]}', "lines": '{\n"a":\n[\n1,\n2\n]\n}',
    "two spaces": '{"a":  [1, 2]}', "indented": '{\n  "a": [1, 2]}', "empty lines": '{\n\n"a": [1, 2]}',
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "layouts"),
    [({}, ["compact", "spaced", "lines"]), ({"x-guidance": {"whitespace_pattern": r"[ \n]{0,9}"}}, list(LAYOUTS))],
)
def test_one_blank_may_stand_between_two_tokens_of_json_unless_the_schema_allows_more(
    tokenizer, compiler, more, layouts
):
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}} | more

    def takes(text):
        guide = compiler.guide({"type": "json_schema", "json_schema": schema})
        try:
            guide.advance(tokenizer.encode(text, add_special_tokens=False))
        except GuideError:
            return False
        return guide.is_finished

    assert [name for name, text in LAYOUTS.items() if takes(text)] == layouts


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([r"call me [A-Za-z]{1,10}", r"([0-9]{3}-){2}[0-9]{4}", r"yes|no|é+", r"[^\n]{2,9}\."]),
    st.integers(0, 2**32),
)
def test_whatever_the_model_says_a_pattern_is_matched(tokenizer, compiler, pattern, seed):
    ids = answer(compiler.guide({"type": "regex_schema", "regex_schema": pattern}), tokenizer.vocab_size, seed)
    assert ids is None or re.fullmatch(pattern, tokenizer.decode(ids))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4), st.integers(0, 2**32))
def test_a_choice_is_one_of_its_texts(tokenizer, compiler, texts, seed):
    assume(all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts))  # its vocabulary lacks some bytes
    ids = answer(compiler.guide({"type": "choice", "choice": texts}), tokenizer.vocab_size, seed)
    assert tokenizer.decode(ids) in texts


def test_a_grammar_and_bad_words_bound_an_answer_together(tokenizer, vocabulary, compiler):
    for seed in range(10):
        grammar = compiler.guide({"type": "grammar", "grammar": 'start: "cat" | "dog" | "doe"'})
        guide = AllOf([grammar, BadWords(["c", "og"], vocabulary, tokenizer.vocab_size)])
        assert tokenizer.decode(answer(guide, tokenizer.vocab_size, seed)) == "doe"


def test_a_place_that_no_token_leads_out_of_is_an_error(tokenizer, vocabulary, compiler):
    guide = AllOf([
        compiler.guide({"type": "choice", "choice": ["cat"]}), BadWords(["c"], vocabulary, tokenizer.vocab_size)
    ])  # fmt: skip
    with pytest.raises(GuideError, match="no token"):
        guide.mask()
    with pytest.raises(GuideError, match="do not follow the response format"):
        guide.advance(tokenizer.encode("dog"))


@pytest.mark.parametrize(
    ("response_format", "reason"),
    [
        ({"type": "regex_schema", "regex_schema": "(ab"}, "unclosed group"),
        ({"type": "grammar", "grammar": "start: foo"}, "unknown name"),
        ({"type": "json_schema", "json_schema": {"type": "nonsense"}}, "Invalid type"),
        ({"type": "json_schema", "json_schema": {"not": {"type": "string"}}}, "Unimplemented keys"),
        ({"type": "json_schema", "json_schema": "{"}, "Expecting"),
        ({"type": "json_schema", "json_schema": "[1]"}, "a JSON schema is an object"),
        ({"type": "json_schema", "json_schema": {"enum": {1, 2}}}, "set is not JSON serializable"),
    ],
)
def test_what_does_not_compile_is_named_with_the_reason(compiler, response_format, reason):
    with pytest.raises(ConfigError, match=rf"response_format is .*{reason}"):
        compiler.guide(response_format)


def test_guides_of_one_format_do_not_share_their_place(tokenizer, compiler):
    first, second = (compiler.guide({"type": "choice", "choice": ["a"]}) for _ in range(2))
    first.advance(tokenizer.encode("a"))
    assert (first.is_finished, second.is_finished) == (True, False)


def test_a_tokenizer_of_hugging_face_files_guides_like_that_of_the_gguf_file(tokenizer, tmp_path):
    pytest.importorskip("llguidance")
    from turbojax.guided import GuideCompiler

    tokenizer.save(tmp_path)
    loaded, masks = load_tokenizer(tmp_path), []
    for one in (tokenizer, loaded):
        guide = GuideCompiler(one, one.vocab_size, [EOS]).guide({"type": "regex_schema", "regex_schema": "[a-c]+é"})
        guide.advance(one.encode("ab"))
        masks.append(guide.mask())
    assert (masks[0] == masks[1]).all()
    words = [vocabulary_of(one, skip_special_tokens=False).token_bytes for one in (tokenizer, loaded)]
    assert words[0] == words[1]


def test_a_package_that_is_missing_is_named(tokenizer, monkeypatch):
    from turbojax import guided

    monkeypatch.setattr(guided.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"turbojax\[guided\]"):
        guided.GuideCompiler(tokenizer, tokenizer.vocab_size, [EOS])
