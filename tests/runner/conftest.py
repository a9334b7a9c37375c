"""The small model of the runner's tests, with what it must generate."""

import numpy as np
import pytest


@pytest.fixture(scope="module")
def model(goldens):
    return goldens / "llama_plain"


@pytest.fixture(scope="module")
def golden(model):
    """Prompts and their recorded greedy continuations."""
    inputs, expected = np.load(model / "inputs.npz"), np.load(model / "expected.npz")
    prompts = [inputs[f"{p}_ids"].tolist() for p in ("p17", "p40")]
    prompts += [row[:n].tolist() for row, n in zip(inputs["batch_ids"], inputs["batch_lens"], strict=True)]
    tokens = [expected[f"{p}_gen_ids"].tolist() for p in ("p17", "p40")] + expected["batch_gen_ids"].tolist()
    return prompts, tokens
