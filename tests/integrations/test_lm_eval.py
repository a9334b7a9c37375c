"""The harness's three questions and chat templates, against transformers' recorded numbers; the harness is a stub.

Its base class and registry are what docs/model_guide.md of lm-evaluation-harness says.
`scripts/check_lm_eval.py` runs the real one.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from turbojax.api import Pipeline
from turbojax.assembly import assemble_model
from turbojax.configs import EngineConfig
from turbojax.errors import MissingExtraError, RequestError
from turbojax.models.model import load_model

EOS = 2


class ByteTokenizer:
    """A byte a token."""

    bos_id, eos_id, has_chat_template, chat_template = None, EOS, True, "{{ messages }}"

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode("latin-1"))

    def decode(self, token_ids, *, skip_special_tokens=True):
        return bytes(token_ids).decode("latin-1")

    def render_chat(self, messages, *, add_generation_prompt=True):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + (
            "<assistant>" if add_generation_prompt else ""
        )


def text_of(ids):
    return bytes(np.asarray(ids, np.uint8)).decode("latin-1")


class Hook:
    """Keeps what the harness would cache."""

    def __init__(self):
        self.kept = []

    def add_partial(self, attr, args, result):
        self.kept.append((attr, args, result))


class StubLM:
    """What the adapter needs of lm_eval.api.model.LM."""

    def __init__(self):
        self._rank, self._world_size, self._device, self.cache_hook = 0, 1, None, Hook()


@pytest.fixture(scope="module")
def adapter():
    """The adapter's module, imported over the stub."""
    names, registered = {}, {}
    model, registry = ModuleType("lm_eval.api.model"), ModuleType("lm_eval.api.registry")
    model.LM = StubLM
    registry.register_model = lambda name: lambda cls: registered.setdefault(name, cls)
    names |= {"lm_eval": ModuleType("lm_eval"), "lm_eval.api": ModuleType("lm_eval.api")}
    names |= {"lm_eval.api.model": model, "lm_eval.api.registry": registry}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in names.items():
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "turbojax.integrations.lm_eval", raising=False)
        module = importlib.import_module("turbojax.integrations.lm_eval")
        assert registered == {"turbojax": module.TurbojaxLM}
        yield module
    sys.modules.pop("turbojax.integrations.lm_eval", None)


@pytest.fixture(scope="module")
def recorded(goldens):
    folder = goldens / "llama_plain"
    return np.load(folder / "inputs.npz"), np.load(folder / "expected.npz")


@pytest.fixture(scope="module")
def lm(adapter, goldens):
    config = EngineConfig(
        dtype="float32", max_batch_size=2, cache_max_entry_count=40, cache_block_seq_len=16, session_len=64,
        max_prefill_token_num=64,
    )  # fmt: skip
    model = load_model(goldens / "llama_plain", dtype="float32")
    parts = assemble_model(model, config)
    pipe = Pipeline(
        parts.runner, parts.scheduler, ByteTokenizer(), vocab_size=model.spec.vocab_size, eos_ids=(EOS,)
    )  # fmt: skip
    with pipe:
        yield adapter.TurbojaxLM(pipe)


def asked(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


def test_a_continuation_is_worth_what_transformers_recorded(lm, recorded):
    inputs, expected = recorded
    ids, logprobs = inputs["p40_ids"], expected["p40_logprobs"]
    greedy = expected["p40_gen_ids"]
    requests = asked(
        (text_of(ids[:17]), text_of(ids[17:])),
        (text_of(ids), text_of(greedy[:8])),
        (text_of(ids[:39]), text_of(ids[39:])),
    )
    (total, is_greedy), (_, would_be), (last, _) = lm.loglikelihood(requests)
    assert total == pytest.approx(float(logprobs[16:].sum()), abs=5e-3)
    assert not is_greedy
    assert would_be
    assert last == pytest.approx(float(logprobs[-1]), abs=1e-3)
    assert [kept[0] for kept in lm.cache_hook.kept[-3:]] == ["loglikelihood"] * 3


def test_a_whole_text_starts_behind_the_end_token(lm, recorded):
    ids = recorded[0]["p40_ids"].tolist()
    [whole] = lm.loglikelihood_rolling(asked((text_of(ids),)))
    [(rest, _)] = lm.score([([EOS], ids)])
    assert whole == pytest.approx(rest, abs=1e-4)
    [(same, _)] = lm.loglikelihood(asked(("", text_of(ids))))
    assert same == pytest.approx(rest, abs=1e-4)


def test_long_texts_roll_so_that_each_token_counts_once_with_full_context(adapter):
    """The example in the harness's documentation, with a context of 4."""
    windows = list(adapter.rolling_windows(range(10), -1, 4))
    assert windows == [([-1], [0, 1, 2]), ([2], [3, 4, 5]), ([5], [6, 7, 8]), ([6, 7, 8], [9])]
    for length in range(1, 30):
        windows = list(adapter.rolling_windows(range(length), -1, 5))
        assert [token for _, after in windows for token in after] == list(range(length))
        assert all(len(before) >= 1 and len(before) + len(after) <= 5 for before, after in windows)
        assert all(before[-1] == after[0] - 1 for before, after in windows)


def test_generation_is_transformers_greedy_up_to_a_stop(lm, recorded):
    inputs, expected = recorded
    prompt, ids = text_of(inputs["p17_ids"]), expected["p17_gen_ids"][:8]
    stop = text_of(ids[4:5])
    first = ids.tolist().index(ids[4])
    whole, cut = lm.generate_until(
        asked(
            (prompt, {"until": [], "max_gen_toks": 8}), (prompt, {"until": stop, "max_gen_toks": 8, "do_sample": False})
        )
    )
    assert whole == text_of(ids)
    assert cut == text_of(ids[:first])


def test_contexts_that_do_not_fit_lose_their_beginning(lm, recorded):
    ids = recorded[0]["p40_ids"].tolist()
    [(long, _)], [(short, _)] = (
        lm.score([(context, ids[30:])]) for context in (ids * 2 + ids[:30], ids[-23:] + ids[:30])
    )
    assert long == pytest.approx(short, abs=1e-4)
    assert len(lm.generate_until(asked((text_of(ids * 3), {"max_gen_toks": 4})))) == 1
    with pytest.raises(RequestError, match="a continuation has 63 tokens; at most 62"):
        lm.score([([1], [1] * 63)])


def test_what_cannot_be_honoured_is_refused(lm, adapter):
    with pytest.raises(RequestError, match="generation_kwargs has num_beams"):
        lm.generate_until(asked(("a", {"num_beams": 4})))
    with pytest.raises(RequestError, match="adds no token"):
        lm.loglikelihood(asked(("a", "")))
    with pytest.raises(RequestError, match="device is 'cuda:0', and JAX runs on cpu"):
        adapter.TurbojaxLM(lm.pipe, device="cuda:0")
    with pytest.raises(RequestError, match="quant_policy"):
        adapter.TurbojaxLM(lm.pipe, quant_policy=8)
    with pytest.raises(RequestError, match="chat_template is 'tools'"):
        lm.chat_template("tools")
    sampled = lm.generation({"temperature": 0.5, "until": ["\n", ""], "max_tokens": 3})
    assert (sampled.do_sample, sampled.temperature, sampled.stop_words, sampled.max_new_tokens) == (
        True,
        0.5,
        ("\n",),
        3,
    )


def test_chats(lm):
    chat = [{"role": "user", "content": "hi"}]
    assert lm.apply_chat_template(chat) == "<user>hi<assistant>"
    assert lm.apply_chat_template(chat, add_generation_prompt=False) == "<user>hi"
    assert lm.chat_template(True) == "{{ messages }}"
    assert lm.chat_template(False) is None
    assert lm.tokenizer_name == "turbojax"


def test_without_the_harness_the_extra_is_named(monkeypatch):
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "turbojax.integrations.lm_eval", raising=False)
    with pytest.raises(MissingExtraError, match=r"turbojax\[eval\]"):
        importlib.import_module("turbojax.integrations.lm_eval")
