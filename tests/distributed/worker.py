"""One process of several, as a program of its own: answers prompts on all of them and prints the token ids.

python -m tests.distributed.worker MODEL '{"engine": {...}, "cluster": {...}, "dies_at": null}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from turbojax.api import pipeline
from turbojax.configs import ClusterConfig, EngineConfig, GenerationConfig

PROMPTS = [[1, 2, 3], [4, 5], [6] * 40, [7, 8, 9, 10]]
GREEDY = GenerationConfig(max_new_tokens=12)


def die_at(step: int) -> None:
    """This process is killed when it is told of its so-many-th step."""
    from turbojax.runner import JaxRunner

    dispatch, numbers = JaxRunner.dispatch, iter(range(step))

    def deadly(self: JaxRunner, plan: object) -> object:
        if next(numbers, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return dispatch(self, plan)  # type: ignore[arg-type]

    JaxRunner.dispatch = deadly  # type: ignore[assignment, method-assign]


def main(model: str, options: str) -> None:
    told = json.loads(options)
    if told.get("dies_at") is not None:
        die_at(told["dies_at"])
    cluster = ClusterConfig(**told["cluster"]) if told.get("cluster") else None
    with pipeline(model, EngineConfig(**told["engine"], cluster=cluster)) as pipe:
        start_s = time.monotonic()
        responses = pipe(PROMPTS, GREEDY)
    found = {"token_ids": [r.token_ids for r in responses], "errors": [r.error for r in responses]}
    print(json.dumps(found | {"seconds": time.monotonic() - start_s}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
