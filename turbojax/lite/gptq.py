"""GPTQ (arXiv 2210.17323): weights are rounded input by input, and those not rounded yet make up for the error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from checkpoints import AffineTensor
from turbojax.lite.grid import Grid, affine_tensor, fit

BLOCK = 128


@dataclass(frozen=True)
class GptqOptions:
    """How GPTQ goes about it.

    Attributes:
        act_order: inputs with the largest power first.
        static_groups: scales are fitted to the weights as they come, and groups stay runs of neighbouring inputs; else
            a group is fitted when its turn comes, and with act_order it is a run of inputs in that order.
        damping: share of the mean power that is added to every input's, so that the inverse exists.
    """

    act_order: bool = True
    static_groups: bool = True
    damping: float = 0.01


def inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """The upper U with inverse(hessian) = U.T @ U, float64.

    From one Cholesky factorisation of the reversed matrix: reversed, its lower factor's inverse is U transposed.
    """
    lower = np.linalg.cholesky(hessian[::-1, ::-1])
    return np.triu(np.linalg.inv(lower)[::-1, ::-1])


def order_of(hessian: np.ndarray, options: GptqOptions) -> np.ndarray:
    """The order in which inputs are rounded, int32 [K]."""
    if options.act_order:
        return np.argsort(-np.diag(hessian), kind="stable").astype(np.int32)
    return np.arange(len(hessian), dtype=np.int32)


def damped(gram: np.ndarray, damping: float) -> tuple[np.ndarray, np.ndarray]:
    """The Hessian in float64, and which inputs were always zero."""
    hessian = gram.astype(np.float64)
    dead = np.diag(hessian) <= 0
    hessian[dead, dead] = 1.0
    hessian[np.diag_indices_from(hessian)] += damping * float(np.mean(np.diag(hessian)))
    return hessian, dead


def gptq(w: np.ndarray, gram: np.ndarray, grid: Grid, options: GptqOptions) -> AffineTensor:
    """Rounds weights [N, K] so that their outputs over the calibration tokens change least.

    Args:
        w: the weights; what is computed has their dtype.
        gram: [K, K] of their input.
        grid: what they are rounded to.
        options: see `GptqOptions`.

    Returns:
        The codes; `perm` is set where act_order is on without static groups.
    """
    hessian, dead = damped(gram, options.damping)
    order = order_of(hessian, options)
    left = np.ascontiguousarray(np.where(dead[None], 0, w)[:, order])
    factor = inverse_factor(hessian[np.ix_(order, order)]).astype(w.dtype)
    groups = Groups(left if not options.static_groups else np.where(dead[None], 0, w), grid, order, options)
    codes = np.empty(w.shape, np.uint8)
    step = min(grid.group_size, BLOCK) if BLOCK % grid.group_size == 0 or grid.group_size > BLOCK else grid.group_size
    for start in range(0, w.shape[1], step):
        stop = min(start + step, w.shape[1])
        groups.reach(left, start)
        errors = round_block(left, codes, factor, groups, start, stop)
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    return groups.tensor(codes)


def round_block(
    left: np.ndarray, codes: np.ndarray, factor: np.ndarray, groups: Groups, start: int, stop: int
) -> np.ndarray:
    """Rounds inputs start .. stop one by one; the rest of the block makes up at once. Returns the errors [N, B]."""
    block, own = np.ascontiguousarray(left[:, start:stop].T), factor[start:stop, start:stop]
    errors = np.empty_like(block)
    for i in range(stop - start):
        scale, offset = groups.at(start + i)
        code = np.clip(np.round((block[i] - offset) / scale), 0, groups.grid.max_code)
        codes[:, start + i] = code
        errors[i] = (block[i] - (code * scale + offset)) / own[i, i]
        block[i + 1 :] -= own[i, i + 1 :, None] * errors[i][None]
    return errors.T


class Groups:
    """Scales and offsets of the groups, fitted ahead of the rounding or as it reaches them."""

    def __init__(self, w: np.ndarray, grid: Grid, order: np.ndarray, options: GptqOptions) -> None:
        """`w` [N, K] in the order of the file where groups are static, else in the order of rounding."""
        self.grid, self.order, self.options = grid, order, options
        self.scale, self.offset = fit(w, grid)

    def reach(self, left: np.ndarray, start: int) -> None:
        """Fits the group that begins at `start`, to weights that have made up for all errors so far."""
        size = self.grid.group_size
        if not self.options.static_groups and start % size == 0:
            scale, offset = fit(left[:, start : start + size], self.grid)
            self.scale[:, start // size], self.offset[:, start // size] = scale[:, 0], offset[:, 0]

    def at(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Scale and offset [N] of the input that is rounded at a position."""
        index = int(self.order[position]) if self.options.static_groups else position
        return self.scale[:, index // self.grid.group_size], self.offset[:, index // self.grid.group_size]

    def tensor(self, codes: np.ndarray) -> AffineTensor:
        """The result, from codes [N, K] in the order of rounding."""
        perm = None
        if self.options.static_groups:
            codes = codes[:, np.argsort(self.order)]
        elif self.options.act_order:
            perm = self.order
        return affine_tensor(codes, self.scale, self.offset, self.grid, perm)
