"""Actors that a test needs to go wrong once; Ray's workers import them from here."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from turbojax.integrations.ray_data import TurbojaxGenerator


def is_first(folder: str, name: str) -> bool:
    """Whether nobody on this machine has asked so before."""
    try:
        os.close(os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Dying(TurbojaxGenerator):
    """The first actor that gets its second batch is killed while the rows run, as if its node were lost."""

    def __init__(self, folder: str, *args, **kwargs) -> None:
        self._folder, self._num_batches = folder, 0
        super().__init__(*args, **kwargs)

    async def __call__(self, batch):
        self._num_batches += 1
        answers = asyncio.ensure_future(super().__call__(batch))
        await asyncio.sleep(0)
        if self._num_batches == 2 and is_first(self._folder, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return await answers


class Counting(TurbojaxGenerator):
    """Leaves a file for each row that it answers; fails the job once at the row of `fatal_id`, if there is one."""

    def __init__(self, folder: str, fatal_id: int | None, *args, **kwargs) -> None:
        self._folder, self._fatal_id = Path(folder), fatal_id
        super().__init__(*args, **kwargs)

    async def __call__(self, batch):
        ids = batch["id"].to_pylist()
        if self._fatal_id in ids:
            raise RuntimeError("the job is stopped here")
        answers = await super().__call__(batch)
        for number in ids:
            (self._folder / str(number)).touch()
        return answers
