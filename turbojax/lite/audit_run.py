"""An audit from end to end: opens the model, measures the candidates, proposes a policy, and writes it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import is_native
from turbojax.assembly import open_model, progress_bar
from turbojax.configs import EngineConfig
from turbojax.core.weights import Weights
from turbojax.errors import LiteError
from turbojax.kv_policy import KVPolicy, file_of, write_k_scale, write_kv_policy
from turbojax.lite.audit import Audit, at_layer, kv_bytes_per_token, uniform
from turbojax.lite.audit_policy import Layers, descent, propose
from turbojax.lite.audit_report import AuditReport, Row
from turbojax.lite.audit_weights import bits_of, linear_bytes, linear_specs, rounded_layer, rounded_weights
from turbojax.lite.evaluate import cut_windows
from turbojax.lite.evaluate_text import token_ids_of
from turbojax.lite.grid import Grid
from turbojax.lite.rotation import k_scale_of
from turbojax.program_cache import use_compilation_cache

Say = Callable[[str], None]

KV_CANDIDATES = ((8, 8), (8, 4), (4, 8), (4, 4))
SIDES = ("K", "V")
CALIBRATION = 512, 8  # tokens of a window, and windows, that the scale of keys is found on


@dataclass(frozen=True)
class AuditTask:
    """What is asked for.

    Attributes:
        model: its path.
        text: a UTF-8 file; None is the built-in text.
        window_len, num_windows: see `cut_windows`.
        num_layer_windows: the first windows alone, for what is measured layer by layer.
        per_layer: measure every layer alone; its weights in a copy of the model in float32.
        w_bits: of the rounded weights; None takes 8 and 4 where the model has more.
        w_group_size: inputs under one scale of the rounded weights.
        kv_hadamard: keys of 4 bits are turned, in what is measured by layer and in what is proposed.
        calib_data: a UTF-8 text that the scale of turned keys is found on; None is the built-in one.
        budget: KL from float32, in nats, that a proposed policy stays within; None proposes nothing.
    """

    model: Path
    text: Path | None = None
    window_len: int = 1024
    num_windows: int | None = 4
    num_layer_windows: int = 1
    per_layer: bool = True
    w_bits: tuple[int, ...] | None = None
    w_group_size: int = 128
    kv_hadamard: bool = True
    calib_data: Path | None = None
    budget: float | None = None


def run_audit(task: AuditTask, say: Say) -> AuditReport:
    """Measures what a task asks for.

    Raises:
        TurbojaxError, CheckpointError: model or text cannot be used.
    """
    use_compilation_cache()
    windows = cut_windows(token_ids_of(task.model, task.text), task.window_len, task.num_windows)
    config = EngineConfig(dtype="float32", quant_policy=0, kv_hadamard=False)
    with progress_bar(f"loading {task.model.name}", total=1) as advance:
        model = open_model(task.model, config, advance)
    jax.block_until_ready(model.weights)
    settings = {
        "model": task.model.name, "text": str(task.text or "built-in"), "windows": list(windows.shape),
        "layer_windows": task.num_layer_windows, "w_group_size": task.w_group_size,
    }  # fmt: skip
    k_scale = k_scale_of(model.weights, cut_windows(token_ids_of(task.model, task.calib_data), *CALIBRATION))
    report = AuditReport(settings, k_scale=k_scale)
    with progress_bar("the float32 model", total=len(windows)) as advance:
        audit = Audit(model.weights, windows, k_scale, lambda: advance(1))
    rows = _Rows(audit, task)
    for measure, title, count in rows.plan():
        say(f"{title}: {count} candidates")
        with progress_bar(title, total=count) as advance:
            for row in measure:
                report.rows.append(row)
                advance(1)
    if task.budget is not None:
        say(f"looking for the fewest bits within {task.budget:g} nats")
        path = descent(rows.sensitivity, audit.spec.num_layers, rows.kv_bytes)
        report.proposal = propose(path, task.budget, audit.measure, hadamard=task.kv_hadamard)
    return report


class _Rows:
    """Makes the rows of a report; remembers what each layer alone costs."""

    def __init__(self, audit: Audit, task: AuditTask) -> None:
        self.audit, self.task, self.spec = audit, task, audit.spec
        self.sensitivity: dict[tuple[int, int, int], float] = {}

    def kv_bytes(self, layers: Layers) -> int:
        return kv_bytes_per_token(self.spec, KVPolicy(layers))

    def plan(self) -> Iterator[tuple[Iterator[Row], str, int]]:
        """Rows to measure, what they are, and how many."""
        num_kv = 1 + len(KV_CANDIDATES) + sum(k == 4 for k, _ in KV_CANDIDATES)
        yield self.of_kv(), "keys and values of all layers", num_kv
        bits = self.weight_bits()
        yield self.of_weights(bits), "weights of all layers", len(bits)
        if self.task.per_layer or self.task.budget is not None:
            yield self.of_layers(), "keys and values of one layer", 4 * self.spec.num_layers
        if self.task.per_layer and bits:
            yield self.of_weight_layers(bits), "weights of one layer", len(bits) * self.spec.num_layers

    def weight_bits(self) -> tuple[int, ...]:
        """Of the candidates: fewer than the largest that the model has."""
        if self.task.w_bits is not None:
            return self.task.w_bits
        most = max((bits_of(part) for part, _ in linear_specs(self.spec)), default=0)
        return tuple(bits for bits in (8, 4) if bits < most)

    def row(self, name: str, policy: KVPolicy, grid: Grid | None = None, layer: int | None = None) -> Row:
        """Measures one candidate; the layer's bits where it is for one layer."""
        weights = self.weights(grid, layer)
        windows = None if layer is None else self.task.num_layer_windows
        measured = self.audit.measure(policy, weights, num_windows=windows, greedy=layer is None)
        k_bits, v_bits = policy.layers[layer or 0]
        return Row(
            name, layer, k_bits, v_bits, None if grid is None else grid.bits, policy.hadamard and k_bits == 4,
            self.kv_bytes(policy.layers), linear_bytes(self.spec, grid, layer), measured,
        )  # fmt: skip

    def weights(self, grid: Grid | None, layer: int | None) -> Weights | None:
        """The loaded ones (None), or with the linears of all layers, or of one, on a grid."""
        if grid is None:
            return None
        of = self.audit.weights
        return rounded_weights(of, grid) if layer is None else rounded_layer(of, grid, jnp.int32(layer))

    def grid(self, bits: int) -> Grid:
        return Grid(bits, self.task.w_group_size, float_offset=True)

    def of_kv(self) -> Iterator[Row]:
        yield self.row("float32", uniform(self.spec, 16, 16))
        for k_bits, v_bits in KV_CANDIDATES:
            yield self.row(f"K{k_bits} V{v_bits}", uniform(self.spec, k_bits, v_bits))
            if k_bits == 4:
                turned = uniform(self.spec, k_bits, v_bits, hadamard=True)
                yield self.row(f"K{k_bits} V{v_bits} Hadamard", turned)

    def of_weights(self, all_bits: tuple[int, ...]) -> Iterator[Row]:
        for bits in all_bits:
            name = f"W{bits} g{self.task.w_group_size} RTN"
            yield self.row(name, uniform(self.spec, 16, 16), self.grid(bits))

    def of_weight_layers(self, all_bits: tuple[int, ...]) -> Iterator[Row]:
        for layer in range(self.spec.num_layers):
            for bits in all_bits:
                yield self.row(f"W{bits}", uniform(self.spec, 16, 16), self.grid(bits), layer)

    def of_layers(self) -> Iterator[Row]:
        for layer in range(self.spec.num_layers):
            for side, bits in ((side, bits) for side in (0, 1) for bits in (8, 4)):
                k_bits, v_bits = (bits, 16) if side == 0 else (16, bits)
                policy = at_layer(self.spec, layer, k_bits, v_bits, hadamard=self.task.kv_hadamard)
                row = self.row(f"{SIDES[side]}{bits}", policy, layer=layer)
                self.sensitivity[layer, side, bits] = row.measured.kl
                yield row


def check_target(model: Path, work_dir: Path | None) -> None:
    """Raises LiteError, before the long work, where a policy could not be written in the end."""
    if work_dir is not None and work_dir.exists():
        raise LiteError(f"{work_dir}: exists; give a folder that does not, or --write to change the checkpoint itself")
    if is_native(model):
        raise LiteError(
            f"{model}: is a native checkpoint, which takes no policy; calibrate the checkpoint that it was saved from, "
            "and save it again: what was found goes with it"
        )
    if model.is_dir() and not file_of(model).is_file():
        raise LiteError(f"{model}: has no config.json to write a policy to; give the folder that it came from")


def write_kv(model: Path, policy: KVPolicy, k_scale: np.ndarray | None) -> Path:
    """The scale first: a policy that is there finds it."""
    if k_scale is not None and policy.hadamard and any(k == 4 for k, _ in policy.layers):
        write_k_scale(model, k_scale)
    return write_kv_policy(model, policy)


def save_policy(model: Path, policy: KVPolicy, k_scale: np.ndarray | None, work_dir: Path | None) -> Path:
    """Writes a policy into a checkpoint, or into a copy of it that comes to be whole or not at all.

    Args:
        model: the checkpoint.
        policy: see `write_kv_policy`.
        k_scale: of its keys; kept where the policy turns some.
        work_dir: the copy's folder; None changes the checkpoint itself.

    Returns:
        The file that says the policy.

    Raises:
        LiteError: see `check_target`.
        OSError: it cannot be written.
    """
    check_target(model, work_dir)
    if work_dir is None:
        return write_kv(model, policy, k_scale)
    work_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work_dir.parent, prefix=work_dir.name + ".") as temporary:
        copy = Path(temporary) / "copy"
        if model.is_dir():
            shutil.copytree(model, copy)
            written = write_kv(copy, policy, k_scale)
        else:
            copy.mkdir()
            written = write_kv(Path(shutil.copy2(model, copy / model.name)), policy, k_scale)
        copy.rename(work_dir)
    return work_dir / written.name
