"""A golden model over some of the devices: logits behind every token of its recorded prompts and continuations.
Native checkpoints that divide."""

from __future__ import annotations

import json

import jax
import numpy as np

from tests.core.harness import all_logits, chunks, fresh
from turbojax.models.abstract import abstract_weights
from turbojax.models.families import architecture_of
from turbojax.models.model import Model, load_model
from turbojax.models.native import save_model
from turbojax.models.planning import plan_model
from turbojax.models.random_model import WEIGHT_FORMATS, described_checkpoint, random_weights
from turbojax.sharding import placements

PAGE_LEN = 16
EVEN = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
}  # fmt: skip


def write_native(folder, form):
    """A native checkpoint of random weights in a form of `WEIGHT_FORMATS`, whose halves are slices of it; the model."""
    arch = architecture_of(EVEN)
    checkpoint = described_checkpoint("even", EVEN, arch, WEIGHT_FORMATS[form])
    spec = plan_model(checkpoint, arch, "float32", lambda layer: (16, 16))
    model = Model(folder, spec, random_weights(abstract_weights(spec), seed=0), EVEN, {})
    save_model(model, folder)
    return model


def case_of(goldens, name):
    """What the manifest says of a golden checkpoint."""
    [case] = [c for c in json.loads((goldens / "manifest.json").read_text())["cases"] if c["name"] == name]
    return case


def load(folder, tp, **options):
    [placement] = placements(tp, 1)
    return load_model(folder, dtype="float32", placement=placement, **options)


def recorded(folder):
    """Token ids of the two prompts with what was generated behind them, and how long the prompts are."""
    inputs, expected = np.load(folder / "inputs.npz"), np.load(folder / "expected.npz")
    prompts = [(inputs[f"{p}_ids"], expected[f"{p}_gen_ids"]) for p in ("p17", "p40")]
    return [np.concatenate(pair) for pair in prompts], [len(ids) for ids, _ in prompts]


def logits_of(model, sequences):
    """float32 [T, V] of each sequence, all in one pass of the step that engines run."""
    spread = model.placement.spread
    state = jax.jit(spread(lambda: fresh(model.spec, num_slots=len(sequences), page_len=PAGE_LEN)))()
    batch = chunks(*((slot, ids, 0, True) for slot, ids in enumerate(sequences)), sink=len(sequences))
    step = spread(lambda weights, state, batch: all_logits(weights, state, batch, PAGE_LEN), 1)
    _, logits = jax.jit(step)(model.weights, state, batch)
    return np.split(np.asarray(logits), np.cumsum([len(ids) for ids in sequences])[:-1])


def generated(logits, length):
    """The likeliest token behind the prompt and behind each token that was recorded, but for the last."""
    return logits[length - 1 : -1].argmax(-1)
