"""Pieces that nobody has taken yet: joined by answer, none lost, ends kept."""

import asyncio

import pytest

from tests.pipeline.harness import expected, make, wait_until_idle
from turbojax.configs import GenerationConfig
from turbojax.engine.response import Response
from turbojax.outbox import Outbox, merged


def piece(text, index=0, sample=0, **more):
    return Response(text, [ord(c) for c in text], index=index, sample_index=sample, **more)


def test_pieces_of_an_answer_become_one_and_its_end_stays():
    ends = {"finish_reason": "length", "num_generated_tokens": 3}
    found = merged([piece("a"), piece("x", 1), piece("b", logprobs=[{98: -1.0}]), piece("c", **ends), piece("y", 1, 1)])
    assert [(p.text, p.index, p.sample_index, p.finish_reason) for p in found] == [
        ("abc", 0, 0, "length"),
        ("x", 1, 0, None),
        ("y", 1, 1, None),
    ]
    assert found[0].token_ids == [97, 98, 99]
    assert found[0].logprobs == [{98: -1.0}]
    assert found[0].num_generated_tokens == 3


def test_an_error_stays_apart_from_the_text_before_it():
    failed = piece("", finish_reason="error", error="device lost")
    assert [(p.text, p.error) for p in merged([piece("a"), piece("b"), failed])] == [("ab", None), ("", "device lost")]


def test_what_waits_is_woken_and_what_is_there_does_not_wait():
    async def run():
        box = Outbox(asyncio.get_running_loop().call_soon)
        waiting = asyncio.ensure_future(box.take())
        await asyncio.sleep(0)
        assert not waiting.done()
        box.put(piece("a"))
        box.put(piece("b"))
        first = await asyncio.wait_for(waiting, 5)
        box.put(piece("c"))
        return first + await asyncio.wait_for(box.take(), 5)

    assert [p.text for p in asyncio.run(run())] == ["ab", "c"]


def test_what_comes_before_a_task_has_its_turn_is_one_piece():
    async def run():
        turns = []
        box = Outbox(turns.append)
        waiting = asyncio.ensure_future(box.take())
        await asyncio.sleep(0)
        box.put(piece("a"))
        await asyncio.sleep(0)
        assert not waiting.done()
        box.put(piece("b"))
        (turn,) = turns
        turn()
        return await asyncio.wait_for(waiting, 5)

    assert [p.text for p in asyncio.run(run())] == ["ab"]


def test_a_wait_that_is_cancelled_loses_nothing():
    async def run():
        box = Outbox(asyncio.get_running_loop().call_soon)
        waiting = asyncio.ensure_future(box.take())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        box.put(piece("a"))
        return await asyncio.wait_for(box.take(), 5)

    assert [p.text for p in asyncio.run(run())] == ["a"]


def test_a_slow_reader_gets_all_tokens_in_few_pieces():
    config = GenerationConfig(max_new_tokens=90, ignore_eos=True)

    async def run(pipe):
        pieces = []
        async for found in pipe.astream_infer([3, 1, 4], config):
            pieces.append(found)
            if len(pieces) == 1:
                while not pipe._scheduler.is_idle:  # everything is generated meanwhile
                    await asyncio.sleep(0.01)
        return pieces

    with make() as pipe:
        pieces = asyncio.run(asyncio.wait_for(run(pipe), 20))
        assert [t for p in pieces for t in p.token_ids] == expected([3, 1, 4], 90, ())
        assert len(pieces) <= 3
        assert pieces[-1].finish_reason == "length"
        assert wait_until_idle(pipe)
