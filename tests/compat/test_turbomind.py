"""LMDeploy's calls on an engine without a device: what streams, what sessions remember, what ends them."""

import asyncio
import threading

import numpy as np
import pytest

from tests.engine.fake import VOCAB, GatedRunner
from tests.pipeline.harness import EOS, LETTERS, expected, make, wait_until_idle
from turbojax import api
from turbojax.api import Pipeline
from turbojax.compat import GenerationConfig, Tokenizer, TurbomindEngineConfig, pipeline, turbomind
from turbojax.compat.messages import EngineOutput, ResponseType
from turbojax.compat.sessions import SessionError
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.scheduler import Scheduler, SchedulerConfig
from turbojax.errors import ConfigError, InvalidPromptError, MissingTokenizerError, PromptTooLongError

CONFIG = TurbomindEngineConfig(model_name="letters", quant_policy=8)
GEN = GenerationConfig(max_new_tokens=12)
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def engine(monkeypatch):
    """Loads a fake: what the engine is asked to be is noted."""
    pipe, asked = make(), []

    def load(model, config):
        asked.append((model, config))
        return pipe

    monkeypatch.setattr(api, "pipeline", load)
    with pipe:
        yield asked
        assert wait_until_idle(pipe), "something leaked"
        assert pipe._scheduler.pool.num_free_pages() == 59


@pytest.fixture
def mind(engine):
    return turbomind.TurboMind.from_pretrained("folder", engine_config=CONFIG)


def gated():
    """An engine whose steps wait for its gate, and has no end-of-sequence token."""
    runner = GatedRunner(2, 4)
    config = SchedulerConfig(2, 1000, 16, runner.max_prefill_chunks)
    pipe = Pipeline(runner, Scheduler(config, BlockPool(600, 4)), LETTERS, vocab_size=VOCAB, eos_ids=())
    return pipe, runner.gate


def tokens(outputs):
    return [token for output in outputs for token in output.token_ids]


def answer(ids, num_new):
    """What a request gives, less the token that ends it."""
    found = expected(ids, num_new)
    return found[:-1] if found[-1] == EOS else found


def test_the_config_reaches_the_engine(engine, mind):
    ((model, config),) = engine
    assert (model, config.quant_policy, mind.model_name) == ("folder", 8, "letters")
    assert mind.session_len == 100


@pytest.mark.parametrize("prompt", [PROMPT, [2, 7, 1], [9]])
def test_a_stream_gives_the_tokens_of_the_model(mind, prompt):
    outputs = list(mind.create_instance().stream_infer(1, prompt, GEN))
    assert tokens(outputs) == answer(prompt, 12)
    assert [o.status for o in outputs[:-1]] == [ResponseType.SUCCESS] * (len(outputs) - 1)
    assert outputs[-1].status is ResponseType.FINISH
    counts = np.cumsum([len(o.token_ids) for o in outputs])
    assert [o.num_token for o in outputs] == counts.tolist()
    assert all(o.token_id is o.token_ids for o in outputs)


def test_a_stop_token_stays_only_where_it_was_asked_for(mind):
    stop = answer(PROMPT, 12)[4]
    for keeps in (False, True):
        config = GenerationConfig(max_new_tokens=12, stop_token_ids=[stop], include_stop_str_in_output=keeps)
        found = tokens(mind.create_instance().stream_infer(1, PROMPT, config))
        first = answer(PROMPT, 12).index(stop)
        assert found == answer(PROMPT, 12)[: first + keeps]


@pytest.mark.parametrize(("field", "argument"), [(False, None), (True, False), (None, False)])
def test_without_streaming_all_comes_at_the_end(mind, field, argument):
    config = GenerationConfig(max_new_tokens=12, stream=field, logprobs=2)
    (output,) = mind.create_instance().stream_infer(1, PROMPT, config, stream_output=argument)
    assert output.status is ResponseType.FINISH
    assert output.token_ids == answer(PROMPT, 12)
    assert len(output.logprobs) == len(output.token_ids)


def test_a_session_goes_on_where_it_was(mind):
    instance = mind.create_instance()
    first = tokens(instance.stream_infer(5, PROMPT, GEN))
    second = tokens(instance.stream_infer(5, [2, 2], GEN, sequence_start=False))
    assert second == answer([*PROMPT, *first, 2, 2], 12)
    third = tokens(instance.stream_infer(5, [8], GEN, sequence_start=False, step=len(PROMPT)))
    assert third == answer([*PROMPT, 8], 12)
    again = tokens(instance.stream_infer(5, [2, 2], GEN, sequence_end=True))
    assert again == answer([2, 2], 12)
    with pytest.raises(SessionError, match="session 5 is not there"):
        next(instance.stream_infer(5, [1], GEN, sequence_start=False))


def test_end_forgets_and_what_is_not_there_has_ended(mind):
    instance = mind.create_instance()
    tokens(instance.stream_infer(1, PROMPT, GEN))
    instance.end(1), instance.end(1), instance.cancel(1)
    with pytest.raises(SessionError, match="session 1 is not there"):
        next(instance.stream_infer(1, [1], GEN, sequence_start=False))


def test_a_session_runs_one_request_at_a_time_and_is_as_it_was_when_one_cannot_start(mind):
    instance = mind.create_instance()
    stream = instance.stream_infer(1, PROMPT, GenerationConfig(max_new_tokens=90, ignore_eos=True))
    heard = next(stream).token_ids
    with pytest.raises(SessionError, match="still runs"):
        next(instance.stream_infer(1, [1], GEN))
    stream.close()
    known = [*PROMPT, *heard]
    with pytest.raises(PromptTooLongError):
        next(instance.stream_infer(1, [1] * 200, GEN, sequence_start=False))
    with pytest.raises(SessionError, match=rf"step 99, accepted: 0 .. {len(known)}"):
        next(instance.stream_infer(1, [1], GEN, sequence_start=False, step=99))
    assert tokens(instance.stream_infer(1, [2], GEN, sequence_start=False)) == answer([*known, 2], 12)


@pytest.mark.parametrize("ids", [[], [[1, 2]], "text", [0.5]])
def test_input_ids_are_token_ids_of_one_sequence(mind, ids):
    with pytest.raises(InvalidPromptError, match="token ids of one sequence"):
        next(mind.create_instance().stream_infer(1, ids, GEN))


@pytest.mark.parametrize("is_async", [False, True])
def test_cancel_from_another_thread_ends_a_stream_and_its_tokens_stay(monkeypatch, is_async):
    pipe, gate = gated()
    monkeypatch.setattr(api, "pipeline", lambda *_: pipe)
    with turbomind.TurboMind("folder") as mind:
        instance, long = mind.create_instance(), GenerationConfig(max_new_tokens=900, do_sample=False)
        outputs: list[EngineOutput] = []

        def hear(output):
            outputs.append(output)
            if len(outputs) == 2:
                gate.clear()  # no token comes until the request is gone
                threading.Thread(target=lambda: (instance.cancel(3), gate.set())).start()

        async def run():
            async for output in instance.async_stream_infer(3, PROMPT, long):
                hear(output)

        if is_async:
            asyncio.run(run())
        else:
            for output in instance.stream_infer(3, PROMPT, long):
                hear(output)
        assert outputs[-1].status is ResponseType.CANCEL
        assert all(o.status is ResponseType.SUCCESS for o in outputs[:-1])
        heard = tokens(outputs)
        assert 2 <= len(heard) < 900
        assert heard == expected(PROMPT, len(heard), ())
        rest = tokens(instance.stream_infer(3, [6], GenerationConfig(max_new_tokens=5), sequence_start=False))
        assert rest == expected([*PROMPT, *heard, 6], 5, ())
        assert wait_until_idle(pipe)


def test_async_twins(mind):
    instance = mind.create_instance()

    async def one(session_id, prompt):
        return tokens([o async for o in instance.async_stream_infer(session_id, prompt, GEN)])

    async def run():
        found = await asyncio.gather(*[one(i, [i, 2]) for i in range(8)])
        await instance.async_cancel(3)
        await instance.async_end(3)
        return found

    assert asyncio.run(run()) == [answer([i, 2], 12) for i in range(8)]


def test_a_device_that_fails_is_a_status_with_its_reason(mind):
    runner = mind.pipe._loop._stepper._runner
    stream = mind.create_instance().stream_infer(1, PROMPT, GenerationConfig(max_new_tokens=90, ignore_eos=True))
    next(stream)
    runner.fails = True
    *_, last = stream
    assert last.status is ResponseType.INTERNAL_ENGINE_ERROR
    assert "device lost" in last.error


def test_the_tokenizer_takes_one_token_or_many(mind):
    tokenizer = mind.tokenizer
    assert tokenizer.decode(tokenizer.encode("CAB")) == "CAB"
    assert tokenizer.decode(2) == "C"
    assert tokenizer.decode([2, 0, 1], offset=1) == "AB"


def test_a_model_without_a_tokenizer_says_so(monkeypatch, tmp_path):
    with make(tokenizer=None) as pipe:
        monkeypatch.setattr(api, "pipeline", lambda *_: pipe)
        for made in (turbomind.TurboMind("folder"), pipeline("folder")):
            with pytest.raises(MissingTokenizerError, match="no tokenizer"):
                _ = made.tokenizer
    with pytest.raises(MissingTokenizerError, match=str(tmp_path)):
        Tokenizer(tmp_path)


def test_a_pipeline_answers_by_lmdeploys_names(engine):
    pipe = pipeline("folder", CONFIG)
    (first, second), one = pipe([PROMPT, [9]], gen_config=GEN), pipe("DBE", gen_config=[GEN])
    assert first.token_ids == expected(PROMPT, 12)
    assert (first.generate_token_len, first.input_token_len, second.index) == (len(first.token_ids), 5, 1)
    assert one.text == pipe.tokenizer.decode(answer([0, 3, 1, 4], 12))
    pieces = list(pipe.stream_infer(PROMPT, gen_config=GEN))
    assert "".join(p.text for p in pieces) == first.text
    session = pipe.chat(PROMPT, gen_config=GEN)
    assert session.response.text == session.history[0][1] == first.text
    streamed = pipe.chat(PROMPT, gen_config=GEN, stream_response=True)
    assert "".join(p.text for p in streamed) == session.response.text


def test_a_pipeline_refuses_what_its_call_cannot_do(engine):
    pipe = pipeline("folder", log_level="ERROR")
    with pytest.raises(ConfigError, match="stream is True; accepted: None or False here"):
        pipe("A", gen_config=GenerationConfig(stream=True))
    with pytest.raises(ConfigError, match="stream is False; accepted: None or True here"):
        pipe.stream_infer("A", gen_config=GenerationConfig(stream=False))
    with pytest.raises(ConfigError, match="log_level is 'LOUD'"):
        pipeline("folder", log_level="LOUD")
