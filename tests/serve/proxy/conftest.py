"""Replicas for a test."""

from __future__ import annotations

import pytest

from tests.serve.proxy import fake_node


@pytest.fixture
def node():
    with fake_node.nodes(1) as (one,):
        yield one


@pytest.fixture
def two():
    with fake_node.nodes(2) as both:
        yield both
