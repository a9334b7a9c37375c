"""The kernels in the interpreter against numpy and the reference; their corners; bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sampling import sample_tokens
from pallas_kernels.sampling.api import kernel_sample
from pallas_kernels.sampling.tiles import SampleConfig
from tests.kernels.attention.cases import quick
from tests.kernels.sampling.problems import FIELDS, problem, tokens

ROWS, VOCAB = 24, 1000  # one shape, so that the interpreted kernels compile once
INTERPRETED = quick(functools.partial(kernel_sample, config=SampleConfig(128, 1, 1), interpret=True))


def run(arrays):
    found = INTERPRETED(*(jnp.asarray(arrays[name]) for name in FIELDS))
    return np.asarray(found.tokens), np.asarray(found.finite)


@pytest.mark.parametrize(("seed", "spread"), [(0, 3.0), (1, 0.1), (2, 20.0), (3, 3.0), (4, 1.0), (5, 6.0)])
def test_tokens_are_those_of_numpy(seed, spread):
    arrays = problem(seed, ROWS, VOCAB, spread)
    found, finite = run(arrays)
    expected, near = tokens(arrays)
    assert near.mean() < 0.1
    np.testing.assert_array_equal(found[~near], expected[~near])
    assert finite.all()


@pytest.mark.parametrize("top_k", [1, 2, 7, 100, 127, 128, 500, 999])
@pytest.mark.parametrize("kind", ["steps", "far", "zeros", "sparse"])
def test_top_k_keeps_the_k_largest_and_their_ties(kind, top_k):
    """At a high temperature, where what is not kept would be drawn; half of the rows with top-p over it."""
    arrays = problem(top_k, ROWS, VOCAB)
    rng = np.random.default_rng(top_k)
    arrays["logits"] = {
        "steps": rng.permuted(np.tile(np.repeat(np.arange(100), 10), (ROWS, 1)), axis=1),
        "far": np.exp2(rng.uniform(-120, 120, (ROWS, VOCAB))) * rng.choice([-1, 1], (ROWS, VOCAB)),
        "zeros": np.where(rng.random((ROWS, VOCAB)) < 0.5, 0.0, -0.0),
        "sparse": np.where(rng.random((ROWS, VOCAB)) < 0.05, rng.normal(size=(ROWS, VOCAB)), -np.inf),
    }[kind].astype(np.float32)
    temperature = {"steps": 100.0, "far": 1e30, "zeros": 1.0, "sparse": 2.0}[kind]
    off = {"top_p": 1.0, "min_p": 0.0, "temperature": temperature, "forbidden_ids": -1}
    arrays |= {name: np.full_like(arrays[name], value) for name, value in off.items()}
    arrays["top_k"][:] = top_k
    arrays["top_p"][::2] = 0.99
    found, _ = run(arrays)
    expected, near = tokens(arrays)
    np.testing.assert_array_equal(found[~near], expected[~near])


def test_top_p_is_over_the_mass_of_exactly_what_top_k_keeps():
    """Rows whose first draw top-k keeps, where a rougher bound would end the search for the k-th."""
    for seed in range(10):
        arrays = problem(seed, ROWS, VOCAB, spread=0.5)
        settings = {"temperature": 1.0, "top_k": 300, "top_p": 0.5, "min_p": 0.0}
        arrays |= {name: np.full_like(arrays[name], value) for name, value in settings.items()}
        found, _ = run(arrays)
        expected, near = tokens(arrays)
        np.testing.assert_array_equal(found[~near], expected[~near])


def test_a_row_depends_on_itself_alone():
    arrays = problem(0, ROWS, VOCAB)
    together, _ = run(arrays)
    order = np.random.default_rng(1).permutation(ROWS)
    shuffled, _ = run({name: arrays[name][order] for name in FIELDS})
    np.testing.assert_array_equal(shuffled, together[order])
    others = problem(7, ROWS, VOCAB)
    for name in FIELDS:
        others[name][5] = arrays[name][5]
    assert run(others)[0][5] == together[5]


def test_forbidden_tokens_are_never_drawn_and_leave_other_rows_alone():
    arrays = problem(0, ROWS, VOCAB)
    arrays["logits"][:, [3, 500, 999]] = 50.0
    arrays["forbidden_ids"][:] = [3, 999, -1]
    arrays["forbidden_ids"][::2] = -1
    found, _ = run(arrays)
    assert (found[1::2] == 500).all()
    assert np.isin(found[::2], [3, 500, 999]).all()


def test_rows_that_are_not_finite_are_flagged_and_end():
    arrays = problem(0, ROWS, VOCAB)
    arrays["temperature"][:16], arrays["forbidden_ids"][:] = 1.0, -1
    for row, bad in enumerate([np.nan, np.inf] * 10):
        arrays["logits"][row, row * 37 % VOCAB] = bad
    arrays["logits"][20], arrays["logits"][21] = np.nan, -np.inf
    arrays["min_p"][10:14], arrays["min_p"][14:18], arrays["top_p"][18:20] = np.nan, 2.0, np.nan
    found, finite = run(arrays)
    np.testing.assert_array_equal(finite, np.arange(ROWS) >= 22)
    assert ((found >= 0) & (found < VOCAB)).all()
    reference = jax.jit(sample_tokens)(*(jnp.asarray(arrays[name]) for name in FIELDS))
    np.testing.assert_array_equal(reference.finite, finite)
    np.testing.assert_array_equal(np.asarray(reference.tokens)[22:], found[22:])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logits", np.zeros((2, 8), np.float16), r"logits: float16 \(2, 8\), accepted: float32 \[M, V\]"),
        ("top_k", np.zeros(2, np.float32), r"top_k: float32 \(2,\), accepted: int32 \(2,\)"),
        ("keys", np.zeros((2, 4), np.uint32), r"keys: uint32 \(2, 4\), accepted: uint32 \(2, 2\)"),
        ("forbidden_ids", np.zeros(2, np.int32), r"forbidden_ids: int32 \(2,\), accepted: int32 \[M, S\]"),
    ],
)
def test_bad_arguments_are_named(name, value, message):
    arrays = problem(0, 2, 8) | {name: value}
    with pytest.raises(ValueError, match=message):
        sample_tokens(**{field: jnp.asarray(arrays[field]) for field in FIELDS})
