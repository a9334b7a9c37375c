"""Threads take short turns while a server runs, and the ones before once the last server has ended."""

import sys

import pytest

from tests.serve import harness
from turbojax.serve.app import create_app
from turbojax.serve.server import background_server
from turbojax.serve.short_turns import TURN_S, short_turns


@pytest.fixture(autouse=True)
def before():
    interval_s = sys.getswitchinterval()
    yield interval_s
    assert sys.getswitchinterval() == interval_s


def test_a_server_shortens_turns_until_it_ends(before, fake_pipe):
    assert before > TURN_S
    with background_server(create_app(harness.service_on(fake_pipe))):
        assert sys.getswitchinterval() == pytest.approx(TURN_S, rel=0.01)


def test_the_last_one_out_restores_them(before):
    first, second = short_turns(), short_turns()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(TURN_S, rel=0.01)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == before


def test_shorter_ones_stay_as_they_are(before):
    sys.setswitchinterval(TURN_S / 2)
    try:
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(TURN_S / 2, rel=0.01)
    finally:
        sys.setswitchinterval(before)
