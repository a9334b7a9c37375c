"""A server in a process of its own, on an engine without a device whose steps take a while.

    python -m tests.serve.ops.process '{"drain_s": 5}' 0.01

Prints its base url once it answers; ends with 0 if it answered all that it had taken, else 1.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tests.engine.fake import VOCAB, FakeRunner
from tests.serve.harness import CharTokenizer, service_on
from turbojax.api import Pipeline
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import SchedulerConfig
from turbojax.engine.scheduler import Scheduler
from turbojax.serve.app import create_app
from turbojax.serve.logs import logging_to
from turbojax.serve.server import run_server
from turbojax.serve.settings import ServeConfig


class PacedRunner(FakeRunner):
    step_s = 0.0

    def dispatch(self, plan: Any) -> Any:
        time.sleep(self.step_s)
        return super().dispatch(plan)


def main() -> None:
    config = ServeConfig(**({"server_port": 0} | json.loads(sys.argv[1])))
    runner = PacedRunner(8, 4)
    runner.step_s = float(sys.argv[2])
    scheduler = Scheduler(SchedulerConfig(8, 300, 64, runner.max_prefill_chunks), BlockPool(800, 4))
    with (
        logging_to(None, config),
        Pipeline(runner, scheduler, CharTokenizer(), vocab_size=VOCAB, eos_ids=(7,)) as pipe,
    ):
        done = run_server(create_app(service_on(pipe, config)), config, on_ready=lambda url: print(url, flush=True))
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
