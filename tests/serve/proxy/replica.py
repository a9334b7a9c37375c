"""A server on the tiny model, in a process of its own, so that it can be killed.

    python -m tests.serve.proxy.replica FOLDER

Prints its base url once it answers; ends with 0 if it answered all that it had taken, else 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.serve.harness import open_tiny, service_on
from turbojax.serve.app import create_app
from turbojax.serve.server import run_server
from turbojax.serve.settings import ServeConfig


def main() -> None:
    config = ServeConfig(server_port=0)
    with open_tiny(Path(sys.argv[1])) as pipe:
        app = create_app(service_on(pipe, config))
        answered_all = run_server(app, config, on_ready=lambda url: print(url, flush=True))
    sys.exit(0 if answered_all else 1)


if __name__ == "__main__":
    main()
