"""A whole run: checks first, then layer after layer into a work folder, then the checkpoint in one piece."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints import CheckpointFileError, is_native
from checkpoints.exporters import LAYOUTS, export_folder, staged
from checkpoints.exporters.folder import check_layout
from turbojax.errors import ConfigError, LiteError
from turbojax.lite.calibration import Calibration, calibration_ids
from turbojax.lite.floats import FloatLayer, FloatModel
from turbojax.lite.forward import advance, observe
from turbojax.lite.methods import Method, QuantisedLayer, floats_of
from turbojax.lite.report import FILE, Report
from turbojax.lite.work import WorkFolder, result_checkpoint
from turbojax.tokenizer import Tokenizer, load_tokenizer

NATIVE = "native"
FORMATS = (*LAYOUTS, NATIVE)
HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# What a folder of a model holds beside weights and config; code of its own kind goes along with what names it.
COPIED = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json",
          "chat_template*", "*.tiktoken", "*.py")  # fmt: skip

Progress = Callable[[str, int, int], None]
"""Hears what is under way, how much of it is done and how much there is."""


@dataclass(frozen=True)
class Task:
    """What to make of what.

    Attributes:
        source: a folder or a .gguf file.
        work_dir: the checkpoint to write; beside it, `<name>.partial` holds a run under way.
        method: how weights are rounded.
        format: one of FORMATS.
        calibration: the tokens; None where the method needs none.
        model_format: what the source must be; None finds out.
    """

    source: Path
    work_dir: Path
    method: Method
    format: str
    calibration: Calibration | None = None
    model_format: str | None = None

    def settings(self) -> dict[str, Any]:
        """What a run that goes on must share with the one before."""
        calibration = {} if self.calibration is None else asdict(self.calibration)
        calibration.pop("batch_size", None)
        method = {"method": self.method.name, **asdict(self.method)}  # type: ignore[call-overload]
        return {"source": str(self.source.absolute()), **fingerprint(self.source), **method} | {
            name: str(value) if isinstance(value, Path) else value for name, value in calibration.items()
        }


def fingerprint(source: Path) -> dict[str, Any]:
    """What tells that the source's files are still the same: their number, bytes and newest time of change."""
    files = sorted(source.glob("*")) if source.is_dir() else [source]
    stats = [file.stat() for file in files if file.is_file()]
    newest = max((s.st_mtime_ns for s in stats), default=0)
    return {"source_bytes": sum(s.st_size for s in stats), "source_time": newest}


def quantise(task: Task, progress: Progress | None = None) -> Report:
    """Runs a task; run again after it was killed, it goes on with the first unfinished layer.

    Raises:
        CheckpointError, ModelConfigError: the source cannot be read, or the format cannot hold the result.
        CalibrationError: the calibration text is missing or too short.
        LiteError: the work folder holds another run, or the source is none to quantise.
    """
    start, say = time.perf_counter(), progress or (lambda what, done, total: None)
    if task.work_dir.exists():
        raise CheckpointFileError(task.work_dir, "exists already", hint="choose another --work-dir, or remove it")
    model = open_source(task)
    tokenizer = load_tokenizer(task.source)
    ids = None
    if task.calibration is not None:
        ids = calibration_ids(task.calibration, tokenizer, model.arch.vocab_size)
    work = WorkFolder(task.work_dir.with_name(task.work_dir.name + ".partial"), task.settings())
    hidden = None
    if ids is not None and work.num_done < model.num_layers:
        hidden = work.stream() if work.num_done else model.embed(ids)
    for index in range(work.num_done, model.num_layers):
        say("layer", index, model.num_layers)
        layer, hidden = quantise_layer(task, model, index, hidden)
        work.finish_layer(index, layer, hidden)
        model.checkpoint.release()
    say("layer", model.num_layers, model.num_layers)
    report = write(task, model, work, tokenizer, start, say)
    work.remove()
    return report


def open_source(task: Task) -> FloatModel:
    """The source, checked against what will be asked of it.

    Raises:
        ConfigError: there is no such format.
        LiteError: the source is a native checkpoint.
        UnsupportedFormatError: the format cannot hold a linear; names it.
    """
    if task.format not in FORMATS:
        raise ConfigError("lite", "format", task.format, ", ".join(FORMATS))
    if task.method.needs_calibration != (task.calibration is not None):
        needs = "tokens" if task.method.needs_calibration else "None"
        raise ConfigError("lite", "calibration", task.calibration, f"{needs} for {task.method.name}")
    if is_native(task.source):
        raise LiteError(f"{task.source}: is a native checkpoint; give the folder or file that it was made from")
    model = FloatModel(task.source, task.model_format)
    if task.format != NATIVE:
        names = [name for index in range(model.num_layers) for name in model.weight_names(index)]
        check_layout(model.checkpoint, LAYOUTS[task.format], task.method.scheme, names)
    return model


def quantise_layer(
    task: Task, model: FloatModel, index: int, hidden: np.ndarray | None
) -> tuple[QuantisedLayer, np.ndarray | None]:
    """One layer, and the stream behind it as the quantised layer leaves it.

    What comes next is calibrated on what it will read, which is the rounded layers' output.
    """
    layer = model.layer(index)
    check_finite(model, layer)
    if hidden is None or task.calibration is None:
        return task.method.quantise(model, layer, {}), None
    batch_size = task.calibration.batch_size
    stats = observe(model, layer, hidden, batch_size)
    for name, found in stats.items():
        if not np.isfinite(found.gram).all():
            raise LiteError(f"{task.source}: the input of {name} in layer {index} is not finite on calibration tokens")
    quantised = task.method.quantise(model, layer, stats)
    others = layer.others | quantised.others
    weights = {name: floats_of(codes) for name, codes in quantised.codes.items()}
    return quantised, advance(model, FloatLayer(index, weights, others), hidden, batch_size)


def check_finite(model: FloatModel, layer: FloatLayer) -> None:
    """Raises LiteError for weights that are not finite; names file and tensor."""
    for name, w in (layer.weights | layer.others).items():
        if not np.isfinite(w).all():
            info = model.checkpoint.tensors[name]
            raise LiteError(f"{info.file}: tensor {name!r}: {int((~np.isfinite(w)).sum())} values are not finite")


def write(
    task: Task, model: FloatModel, work: WorkFolder, tokenizer: Tokenizer | None, start: float, say: Progress
) -> Report:
    """The finished layers as the checkpoint that was asked for, with its tokenizer and the report."""
    with staged(task.work_dir) as folder:
        if task.format == NATIVE:
            from turbojax.lite.native import write_native

            say("writing", 0, 1)
            write_native(result_checkpoint(model, work, None), folder)
        else:
            dtype = dense_dtype(model)
            checkpoint = result_checkpoint(model, work, HALVES[dtype])
            checkpoint.config |= {"torch_dtype": dtype}
            count = iter(range(1, 1 + len(checkpoint.tensors)))
            total = len(checkpoint.tensors)
            export_folder(
                checkpoint, LAYOUTS[task.format], task.method.scheme, folder,
                progress=lambda _: say("writing", next(count), total),
            )  # fmt: skip
        copy_tokenizer(task.source, tokenizer, folder)
        report = Report(
            method=task.method.name,
            path=task.work_dir,
            measure="outputs" if task.calibration is not None else "weights",
            linears=work.linears(),
            bytes_before=sum(info.num_bytes for info in model.checkpoint.tensors.values()),
            bytes_after=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
            seconds=time.perf_counter() - start,
            settings=task.settings() | {"source": task.source.name},
        )
        (folder / FILE).write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    return report


def dense_dtype(model: FloatModel) -> str:
    """The 16-bit dtype of what stays dense: the source's own, float16 where it has none."""
    config = model.checkpoint.config
    stated = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return stated if stated in HALVES else "float16"


def copy_tokenizer(source: Path, tokenizer: Tokenizer | None, folder: Path) -> None:
    """The source's files as they are; from a GGUF, a tokenizer.json and its config."""
    if source.is_dir():
        for file in sorted({file for pattern in COPIED for file in source.glob(pattern) if file.is_file()}):
            shutil.copyfile(file, folder / file.name)
    elif tokenizer is not None:
        tokenizer.save(folder)
