"""Native checkpoints: a loaded pytree in Orbax's layout, restored straight into shardings. Alone here imports jax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from checkpoints import is_native
from checkpoints.errors import CheckpointFileError, ConfigError, CorruptFileError

FORMAT = "turbojax-native-3"


def save_native(path: Path, tree: Any, meta: dict[str, Any]) -> None:
    """Writes a pytree of arrays and its description; a write that breaks off leaves no checkpoint behind.

    Args:
        path: a folder that does not exist yet.
        tree: jax or numpy arrays in dicts, lists, tuples or dataclasses.
        meta: JSON; what `read_meta` gives back.

    Raises:
        CheckpointFileError: the folder exists, or cannot be written.
    """
    if path.exists():
        raise CheckpointFileError(path, "exists already", hint="choose another folder, or remove it")
    context = ocp.Context()
    context.array.saving.use_compression = False  # 0.8 GB of codes: no smaller, 1.33 s to load for 0.86
    try:
        with context:
            ocp.save(path.absolute(), tree, custom_metadata={"format": FORMAT, "meta": meta})
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise CheckpointFileError(path, reason, hint="check free space and permissions") from error


def read_meta(path: Path) -> dict[str, Any]:
    """The description that was saved with a native checkpoint.

    Raises:
        ConfigError: it is a checkpoint of something else.
    """
    if not is_native(path):
        raise ConfigError(path, "is no native checkpoint", hint="open it with checkpoints.open_checkpoint")
    found = ocp.metadata(path.absolute()).custom_metadata or {}
    if found.get("format") != FORMAT:
        reason = f"is an Orbax checkpoint of format {found.get('format')!r}, {FORMAT!r} is expected"
        raise ConfigError(path, reason, hint="save it with this version")
    return found["meta"]


def restore_native(path: Path, abstract_tree: Any) -> Any:
    """Restores a pytree; each device reads its own part.

    Args:
        path: the folder.
        abstract_tree: the tree as jax.ShapeDtypeStruct leaves; those with a sharding are restored into it. An array
            that was saved in another dtype is cast.

    Raises:
        CorruptFileError: the files do not hold this tree.
    """
    try:
        return ocp.load(path.absolute(), abstract_tree)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CorruptFileError(path, reason, hint="save the checkpoint again") from error
