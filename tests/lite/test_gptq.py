"""GPTQ held against the algorithm as its paper states it, without Cholesky, blocks or lazy updates, in float64."""

import numpy as np
import pytest

from turbojax.lite.awq import search_clip, search_scale
from turbojax.lite.gptq import GptqOptions, gptq, inverse_factor
from turbojax.lite.grid import Grid, rounded, snapped
from turbojax.lite.statistics import InputStats, output_error, relative_error

OPTIONS = [GptqOptions(act_order, static) for act_order in (False, True) for static in (False, True)]


def problem(seed, N=12, K=96, T=400):
    """Weights, and the Gram matrix of inputs that hang together and differ in size."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((K, K)) * np.exp(rng.normal(0, 1, K))[:, None]
    x = rng.standard_normal((T, K)) @ (mix * 0.3 + np.diag(np.exp(rng.normal(0, 1, K))))
    return rng.standard_normal((N, K)), x.T @ x / T, x


def grid_of(w, grid):
    """Scale and zero point of each row of some weights."""
    top, low, high = 2**grid.bits - 1, np.minimum(w.min(1), 0), np.maximum(w.max(1), 0)
    if grid.symmetric:
        high = np.maximum(-w.min(1), w.max(1))
        low = -high
    scale = ((high - low) / top).astype(np.float16).astype(np.float64)
    zero = np.full(len(w), 2 ** (grid.bits - 1)) if grid.symmetric else np.round(-low / scale)
    return scale, zero


def by_the_paper(w, gram, grid, options):
    """Rounded weights [N, K]: each input in turn, and the inverse of the Hessian loses it."""
    K, top = len(gram), 2**grid.bits - 1
    hessian = gram + options.damping * np.mean(np.diag(gram)) * np.eye(K)
    order = np.argsort(-np.diag(hessian), kind="stable") if options.act_order else np.arange(K)
    inverse, left, done = np.linalg.inv(hessian), w.copy(), np.empty_like(w)
    for position, k in enumerate(order):
        if options.static_groups:
            start = k // grid.group_size * grid.group_size
            scale, zero = grid_of(w[:, start : start + grid.group_size], grid)
        elif position % grid.group_size == 0:
            scale, zero = grid_of(left[:, order[position : position + grid.group_size]], grid)
        done[:, k] = (np.clip(np.round(left[:, k] / scale) + zero, 0, top) - zero) * scale
        error = (left[:, k] - done[:, k]) / inverse[k, k]
        left -= error[:, None] * inverse[k][None]
        inverse = inverse - np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return done


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(4, 64, symmetric=True), Grid(8, 32)], ids=str)
def test_it_is_the_algorithm_of_the_paper(grid, options):
    w, gram, _ = problem(seed=grid.bits + grid.group_size)
    got = gptq(w, gram, grid, options)
    got.check()
    want = by_the_paper(w, gram, grid, options)
    off = np.abs(got.dequantize().T - want) > 1e-5
    assert off.mean() < 0.01, off.mean()  # a tie may fall the other way, and what follows in its row


def test_act_order_alone_permutes():
    w, gram, _ = problem(0)
    perms = [gptq(w, gram, Grid(4, 32), options).perm for options in OPTIONS]
    assert [perm is not None for perm in perms] == [False, False, True, False]
    np.testing.assert_array_equal(perms[2], np.argsort(-np.diag(gram), kind="stable"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_outputs_come_out_better_than_from_rounding(options, seed):
    w, gram, _ = problem(seed)
    error = gptq(w, gram, Grid(4, 32), options).dequantize().T - w
    assert output_error(error, gram) < 0.9 * output_error(snapped(w, Grid(4, 32)) - w, gram)


def test_inputs_that_are_always_zero():
    w, gram, _ = problem(1)
    gram[5], gram[:, 5] = 0, 0
    got = gptq(w, gram, Grid(4, 32), GptqOptions()).dequantize().T
    assert (got[:, 5] == 0).all()
    assert np.isfinite(got).all()


def test_the_factor_of_the_inverse():
    _, gram, _ = problem(2)
    hessian = gram + 0.01 * np.mean(np.diag(gram)) * np.eye(len(gram))
    factor = inverse_factor(hessian)
    np.testing.assert_array_equal(factor, np.triu(factor))
    np.testing.assert_allclose(factor.T @ factor @ hessian, np.eye(len(gram)), atol=1e-8)


def stats_of(gram, x):
    one = lambda a: a.astype(np.float32)
    return InputStats(one(gram), one(np.abs(x).mean(0)), one(np.abs(x).max(0)), one(x[::4]))


@pytest.mark.parametrize("heads", [None, (2, 3, 16)])
@pytest.mark.parametrize("seed", range(4))
def test_awq_is_never_worse_than_rounding_on_its_own_objective(seed, heads):
    w, gram, x = problem(seed)
    w, stats, grid = w.astype(np.float32), stats_of(gram, x), Grid(4, 64)
    plain = output_error(snapped(w, grid) - w, gram)
    scale = search_scale(w, stats, grid, heads)
    assert (scale > 0).all()
    if heads is not None:
        by_head = scale.reshape(heads)
        assert (by_head == by_head[:, :1]).all()
    scaled = output_error(snapped(w * scale, grid) / scale - w, gram)
    shrink = search_clip(w * scale, stats.scaled(scale).gram, grid)
    clipped = output_error(rounded(w * scale, grid, shrink).dequantize().T / scale - w, gram)
    assert scaled <= plain * (1 + 1e-4)
    assert clipped <= scaled * (1 + 1e-4)
    assert clipped < 0.97 * plain  # inputs differ in size, so there is something to win


def test_the_error_from_the_gram_matrix_is_that_of_the_outputs():
    w, gram, x = problem(3)
    got = snapped(w, Grid(4, 32))
    want = np.linalg.norm(x @ (got - w).T) / np.linalg.norm(x @ w.T)
    assert relative_error(w, got, gram) == pytest.approx(want)
    assert relative_error(w, got, None) == pytest.approx(np.linalg.norm(got - w) / np.linalg.norm(w))
