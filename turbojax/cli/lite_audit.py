"""`turbojax lite perplexity`, `audit` and `calibrate`: what a precision costs, measured on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turbojax.cli import options
from turbojax.cli.console import say

Model = Annotated[
    str | None,
    typer.Argument(help="A folder, a .gguf file or a Hugging Face repo id; default: SmolLM2-135M-Instruct."),
]
Text = Annotated[
    Path | None,
    typer.Option("--text", exists=True, dir_okay=False, help="A UTF-8 text to measure on; default: a built-in one."),
]
WindowLen = Annotated[int, typer.Option("--window-len", min=2, help="Tokens of a window; each is run alone.")]
NumWindows = Annotated[
    int | None, typer.Option("--num-windows", min=1, help="Most windows, from the text's beginning; default: all.")
]
KBits = Annotated[int | None, typer.Option("--k-bits", help="Bits of K where they differ: 16, 8 or 4.")]
VBits = Annotated[int | None, typer.Option("--v-bits", help="Bits of V where they differ: 16, 8 or 4.")]


def perplexity(
    model: Model = None,
    text: Text = None,
    window_len: WindowLen = 1024,
    num_windows: NumWindows = None,
    dtype: options.Dtype = None,
    quant_policy: options.QuantPolicy = None,
    k_bits: KBits = None,
    v_bits: VBits = None,
) -> None:
    """Perplexity of a model on a text, with the engine's own steps.

    The text is cut into windows that do not overlap; each is run alone from position 0, without a start token, and all
    its tokens but the first are scored.
    """
    from turbojax.lite.perplexity import measure_perplexity

    config = options.engine_config(dtype=dtype, quant_policy=quant_policy, k_bits=k_bits, v_bits=v_bits)
    found = measure_perplexity(model, text, config, window_len=window_len, num_windows=num_windows, say=say)
    say(f"{found.nll:.5f} nats a token over {found.num_scored_tokens} tokens; perplexity:")
    typer.echo(f"{found.perplexity:.4f}")
