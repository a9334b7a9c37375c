"""What a serving command says while it starts: lines for readers, or those of the log with --log-json."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import typer

from checkpoints.errors import CheckpointError
from turbojax.cli.console import say, shown_log
from turbojax.errors import TurbojaxError
from turbojax.serve.settings import ServeConfig

log = logging.getLogger(__name__)

Tell = Callable[[str], object]


@contextmanager
def starting(config: ServeConfig) -> Iterator[Tell]:
    """Around all of a command; gives what tells a line. With JSON, an error that ends it is a line as well.

    Raises:
        typer.Exit: 1, with JSON, in place of an error that has been logged.
    """
    if not config.log_json:
        yield say
        return
    from turbojax.serve.logs import logging_to

    with logging_to(None, config):
        try:
            yield log.info
        except (TurbojaxError, CheckpointError, OSError) as error:
            log.error("%s", error)
            raise typer.Exit(1) from error


def loading(config: ServeConfig) -> AbstractContextManager[None]:
    """Around the loading of a model: shows what is logged, where `starting` does not yet."""
    return nullcontext() if config.log_json else shown_log()


def serving(config: ServeConfig) -> AbstractContextManager[None]:
    """Around serving: from here on text has times and levels too."""
    from turbojax.serve.logs import logging_to

    return nullcontext() if config.log_json else logging_to(None, config)
