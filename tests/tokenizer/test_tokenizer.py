"""Tokenizers against the recorded ids of the real model, and the kinds that a GGUF file may describe."""

import json
from pathlib import Path

import gguf
import pytest

from turbojax.errors import InvalidPromptError, TokenizerError
from turbojax.tokenizer import load_tokenizer

EXPECTED = Path(__file__).parents[3] / "shared" / "smollm2" / "expected.json"


@pytest.fixture(scope="module")
def expected():
    if not EXPECTED.is_file():
        pytest.skip(f"the recorded outputs are not at {EXPECTED}")
    return json.loads(EXPECTED.read_text())


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(smollm2)


def test_ids_and_text_equal_the_recorded_ones(tokenizer, expected):
    for case in expected["tokenizer"]["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_chats_equal_the_recorded_ones(tokenizer, expected):
    chats = [p for p in expected["prompts"] if "messages" in p]
    assert len(chats) >= 5
    for prompt in chats:
        assert tokenizer.apply_chat_template(prompt["messages"]) == prompt["input_ids"], prompt["id"]


def test_special_tokens_are_left_out_of_the_text(tokenizer):
    ids = tokenizer.encode("<|im_start|>user")
    assert tokenizer.decode(ids) == "user"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user"
    assert tokenizer.eos_id == 2


def test_messages_that_the_template_refuses_name_the_reason(tokenizer):
    with pytest.raises(InvalidPromptError, match="chat template refuses"):
        tokenizer.apply_chat_template([{"content": "no role"}])


def test_a_folder_without_a_tokenizer_serves_token_ids(goldens):
    assert load_tokenizer(goldens / "llama_plain") is None


def write(path, tokens, *, model="gpt2", pre=None, merges=(), kinds=None, scores=None, add_eos=None):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    if pre:
        writer.add_tokenizer_pre(pre)
    if merges:
        writer.add_token_merges(list(merges))
    if kinds:
        writer.add_token_types(kinds)
    if scores:
        writer.add_token_scores(scores)
    writer.add_bos_token_id(0)
    writer.add_unk_token_id(1)
    if add_eos is not None:
        writer.add_eos_token_id(1)
        writer.add_add_eos_token(add_eos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a12", ["a", "1", "2"]),
        ("qwen2", "12", ["1", "2"]),
        ("llama-bpe", "12", ["12"]),
        ("gpt-2", "12", ["12"]),
    ],
)
def test_pre_tokenizers_split_digits_as_their_models_do(tmp_path, pre, text, pieces):
    tokens = ["<s>", "<unk>", "a", "1", "2", "12"]
    tokenizer = load_tokenizer(write(tmp_path / "t.gguf", tokens, pre=pre, merges=["1 2"], kinds=[3, 3, 1, 1, 1, 1]))
    assert tokenizer.encode(text, add_special_tokens=False) == [tokens.index(p) for p in pieces]


def test_llama3_texts_start_with_the_start_token(tmp_path):
    """Llama 3 files leave tokenizer.ggml.add_bos_token out, and want it."""
    tokenizer = load_tokenizer(write(tmp_path / "t.gguf", ["<s>", "<unk>", "a"], pre="llama-bpe", kinds=[3, 3, 1]))
    assert tokenizer.encode("a") == [0, 2]


def test_a_file_without_tokens_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="tokens is missing"):
        load_tokenizer(write(tmp_path / "t.gguf", []))


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path):
    tokens = ["<s>", "<unk>", "<0xC3>", "<0xA9>", "▁", "a", "b", "ab", "▁a", "▁ab"]
    kinds, scores = [3, 2, 6, 6, 1, 1, 1, 1, 1, 1], [0.0] * 4 + [-9.0, -8.0, -7.0, -1.0, -2.0, -3.0]
    tokenizer = load_tokenizer(write(tmp_path / "t.gguf", tokens, model="llama", kinds=kinds, scores=scores))
    assert tokenizer.encode("ab") == [0, tokens.index("▁ab")]
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert ids == [4, 2, 3]
    assert tokenizer.decode(ids) == "é"


@pytest.mark.parametrize(("change", "names"), [({"model": "rwkv"}, "rwkv"), ({"pre": "tekken"}, "tekken")])
def test_unknown_kinds_are_refused_by_name(tmp_path, change, names):
    with pytest.raises(TokenizerError, match=names):
        load_tokenizer(write(tmp_path / "t.gguf", ["<s>", "<unk>"], **change))


def test_a_broken_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_a_file_that_asks_for_it_gets_the_end_token(tmp_path):
    texts = {}
    for add_eos in (False, True):
        path = write(
            tmp_path / f"{add_eos}.gguf", ["<s>", "</s>", "a"], pre="llama-bpe", kinds=[3, 3, 1], add_eos=add_eos
        )
        texts[add_eos] = load_tokenizer(path).encode("a")
    assert texts == {False: [0, 2], True: [0, 2, 1]}


def test_a_merge_that_names_no_token_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match=r"t\.gguf: tokenizer\.ggml\.merges"):
        load_tokenizer(write(tmp_path / "t.gguf", ["<s>", "<unk>", "a"], merges=["a b"]))


def test_a_saved_tokenizer_reads_back(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again, chat = load_tokenizer(tmp_path), [{"role": "user", "content": "Grüße, 2 + 2?"}]
    assert again.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)
    assert again.eos_id == tokenizer.eos_id
