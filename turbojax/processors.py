"""Changes of logits that a program brings: functions in jax, registered by name in `EngineConfig.logits_processors`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LogitsProcessor:
    """A function of a row of logits, traced once when the engine compiles its steps.

        function(logits, times, in_prompt, *params) -> logits

    It runs behind penalties and bias and before bad tokens, masks and temperature, on single rows (it is vmapped over
    those of a batch), on rows of requests that did not name it too, whose results are not used: so it must not fail on
    any. A request names it (`logits_processor`) and brings its parameters.

    Attributes:
        function: pure, of jax arrays: logits float32 [V], times int32 [V] (how often the output has each token),
            in_prompt bool [V], and for each shape of `param_shapes` an array of float32. Gives float32 [V].
        param_shapes: of the parameters that a request gives; () is a number.
    """

    function: Callable[..., Any]
    param_shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def num_params(self) -> int:
        """Numbers in all parameters together."""
        return sum(math.prod(shape) for shape in self.param_shapes)
