"""Pieces that cross from a thread into an event loop: in order, each once, few wake-ups."""

import asyncio
import functools
import gc
import threading
import weakref

import pytest

from turbojax.postbox import CALLS_A_TURN, Postbox


def test_what_threads_post_arrives_once_and_in_order():
    num_threads, num_pieces = 4, 2000

    async def run():
        postbox, boxes = Postbox.here(), [asyncio.Queue() for _ in range(num_threads)]
        assert Postbox.here() is postbox

        def post(box):
            for i in range(num_pieces):
                postbox.post(box.put_nowait, i)

        threads = [threading.Thread(target=post, args=(box,)) for box in boxes]
        for thread in threads:
            thread.start()
        found = [[await asyncio.wait_for(box.get(), 10) for _ in range(num_pieces)] for box in boxes]
        for thread in threads:
            thread.join()
        return found

    assert asyncio.run(run()) == [list(range(num_pieces))] * num_threads


def test_pieces_that_come_together_wake_the_loop_once(monkeypatch):
    async def run():
        loop, postbox, box, num_wakes = asyncio.get_running_loop(), Postbox.here(), [], 0
        wake = loop.call_soon_threadsafe

        def counted(*args):
            nonlocal num_wakes
            num_wakes += 1
            return wake(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        for i in range(64):
            postbox.post(box.append, i)
        await asyncio.sleep(0)
        assert box == list(range(64))
        postbox.post(box.append, 64)
        await asyncio.sleep(0)
        assert box[-1] == 64
        return num_wakes

    assert asyncio.run(run()) == 2


def test_calls_are_a_few_a_turn_and_in_order():
    async def run():
        postbox, box, num_turns = Postbox.here(), [], 0
        for i in range(3 * CALLS_A_TURN):
            postbox.soon(functools.partial(box.append, i))
        postbox.soon(lambda: postbox.soon(functools.partial(box.append, -1)))
        while not box or box[-1] != -1:
            num_before = len(box)
            await asyncio.sleep(0)
            num_turns += 1
            assert len(box) <= num_before + CALLS_A_TURN  # others of the loop have their turns between
        return box, num_turns

    assert asyncio.run(run()) == ([*range(3 * CALLS_A_TURN), -1], 5)


def test_a_closed_loop_refuses_and_is_not_kept():
    async def make():
        return Postbox.here(), weakref.ref(asyncio.get_running_loop())

    postbox, loop = asyncio.run(make())
    with pytest.raises(RuntimeError, match="closed"):
        postbox.post(print, 1)
    gc.collect()
    assert loop() is None
