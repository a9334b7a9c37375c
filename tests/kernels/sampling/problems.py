"""Random rows of logits and settings, and what they should give, in numpy and float64."""

import numpy as np

FIELDS = ("logits", "temperature", "top_k", "top_p", "min_p", "keys", "forbidden_ids")


def problem(seed, rows, vocab, spread=3.0, num_forbidden=3):
    """Arrays by name. Each row has settings of its own; integers among the logits make ties."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocab)) * spread
    logits[::4] = np.round(logits[::4])
    pick = lambda values, dtype: rng.choice(np.asarray(values, dtype), rows)
    return {
        "logits": logits.astype(np.float32),
        "temperature": pick([0.0, 0.4, 1.0, 1.7], np.float32),
        "top_k": pick([0, 1, 5, 50, vocab // 3, vocab - 1, vocab + 1], np.int32),
        "top_p": pick([1.0, 0.95, 0.5, 1e-3], np.float32),
        "min_p": pick([0.0, 0.0, 0.01, 0.3, 1.0], np.float32),
        "keys": rng.integers(0, 2**32, (rows, 2), dtype=np.uint32),
        "forbidden_ids": np.where(
            rng.random((rows, num_forbidden)) < 0.5, rng.integers(0, vocab, (rows, 1)), -1
        ).astype(np.int32),
    }


def kept_by_sorting(x, top_k, top_p, min_p):
    """The kept set of one row by sorting, ties at a threshold kept; and how near a decision of top-p was."""
    x = x.astype(np.float64)
    keep = np.ones(len(x), bool)
    if 0 < top_k < len(x):
        keep &= x >= np.sort(x)[::-1][top_k - 1]
    p = np.where(keep, np.exp(x - x.max()), 0)
    p /= p.sum()
    margin = 1.0
    if top_p < 1:
        above = np.array([p[x > value].sum() for value in x])  # the mass of what is likelier
        keep &= above < top_p
        margin = np.abs(above - top_p).min()
    with np.errstate(divide="ignore"):
        keep &= x >= x.max() + np.log(np.float64(min_p))
    return keep, margin


def hashed(key, index):
    """The hash of the noise, for Python's integers."""

    def mix(h):
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            h = (h ^ (h >> shift)) * factor & 0xFFFFFFFF
        return h

    return mix(mix((index * 0x9E3779B9 & 0xFFFFFFFF) ^ int(key[0])) ^ int(key[1]))


def token(row):
    """The token of one row of a problem, and whether rounding may decide otherwise."""
    x = row["logits"].astype(np.float64)
    forbidden = row["forbidden_ids"][row["forbidden_ids"] >= 0]
    x[forbidden] = -np.inf
    if row["temperature"] == 0:
        return int(np.argmax(x)), False
    x = x / np.float64(row["temperature"])
    keep, margin = kept_by_sorting(x, row["top_k"], np.float64(row["top_p"]), row["min_p"])
    bits = np.array([hashed(row["keys"], i) for i in range(len(x))], np.float64)
    score = np.where(keep, x - np.log(-np.log1p(-(bits + 0.5) / 2**32)), -np.inf)
    first, second = np.sort(score)[::-1][:2]
    return int(np.argmax(score)), margin < 1e-5 or first - second < 1e-4


def tokens(arrays):
    """What a whole problem should give, and which rows rounding may decide."""
    rows = [{name: arrays[name][i] for name in FIELDS} for i in range(len(arrays["logits"]))]
    found = [token(row) for row in rows]
    return np.array([t for t, _ in found]), np.array([near for _, near in found])
