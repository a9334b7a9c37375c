"""The native form of a quantised model, which alone holds float offsets: codes as the engine's kernels read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from checkpoints import Checkpoint
from turbojax.models.families import architecture_of
from turbojax.models.loading import load_weights
from turbojax.models.model import resolve_dtype
from turbojax.models.native import write_weights
from turbojax.models.planning import plan_model


def write_native(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes canonical codes and dense tensors as a native checkpoint.

    Args:
        checkpoint: of a whole model.
        folder: an empty folder, which the checkpoint takes the place of.
    """
    arch = architecture_of(checkpoint.config)
    dtype = resolve_dtype("auto", checkpoint.config)
    spec = plan_model(checkpoint, arch, dtype, lambda layer: (16, 16))
    weights = load_weights(checkpoint, arch, spec, place=np.asarray)
    folder.rmdir()
    write_weights(folder, weights, checkpoint.config, checkpoint.generation_config)
