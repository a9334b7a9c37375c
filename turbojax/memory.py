"""How much memory there is and how many KV pages it gives, before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from pallas_kernels.kv_cache import bytes_per_token
from pallas_kernels.paged_attention.scratch import MAX_COPY_BYTES
from turbojax.buckets import Buckets
from turbojax.errors import OutOfMemoryError
from turbojax.models.spec import LayerSpec, LinearSpec, ModelSpec
from turbojax.sharding import HERE, Placement

# A CPU shares its memory with everything else: without an explicit number of pages the pool takes at most this.
CPU_POOL_LIMIT_BYTES = 1 << 30
# Keys of the shortest ranges that decode attention cuts large batches into, with a float32 result for each. Small
# batches get shorter ones, but no more of them than a few thousand.
RANGE_LEN = 2048
# Scores of a head in a tile of the reference of prefill attention: 128 rows against 256 keys, five arrays of float32.
REFERENCE_SCORES = 128 * 256
# The number of pages is part of every compiled program's shape. Rounded to one of 64 sizes an octave, it stays the same
# where the free memory differs by a little, and so do the keys of the compilation cache; it costs 0.5 % of the pool on
# average.
SIZES_PER_OCTAVE = 64

MIB = 1 << 20
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class LayerBytes:
    """The pool of the layers of one precision."""

    k_bits: int
    v_bits: int
    num_layers: int
    bytes_per_token: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of weights, pool and workspace against what the device has free; of a mesh, those of each device.

    Attributes:
        weight_bytes: of the loaded weights.
        free_bytes: of the device after the weights.
        workspace_bytes: the largest temporary of any step.
        is_workspace_measured: it is the compiler's figure for the compiled steps, not an estimate.
        layers: what a token takes, by precision.
        num_pages: pages of the pool, the sink included.
        page_len: tokens of a page.
        slot_bytes: of what is kept of sequences beside keys and values: counts of tokens, hidden states of a step.
    """

    weight_bytes: int
    free_bytes: int
    workspace_bytes: int
    is_workspace_measured: bool
    layers: tuple[LayerBytes, ...]
    num_pages: int
    page_len: int
    slot_bytes: int = 0

    @property
    def page_bytes(self) -> int:
        """Of one page over all layers, scales included."""
        return sum(part.num_layers * part.bytes_per_token for part in self.layers) * self.page_len

    @property
    def pool_bytes(self) -> int:
        return self.page_bytes * self.num_pages

    @property
    def num_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_len

    @property
    def left_bytes(self) -> int:
        """Nobody's; negative where pool and workspace do not fit."""
        return self.free_bytes - self.pool_bytes - self.slot_bytes - self.workspace_bytes

    def limited(self, num_pages: int) -> MemoryPlan:
        """With a pool of at most so many pages: what every process has room for."""
        return replace(self, num_pages=min(self.num_pages, num_pages))

    def measured(self, workspace_bytes: int) -> MemoryPlan:
        """The same pool beside the workspace that the compiled steps need."""
        return replace(self, workspace_bytes=workspace_bytes, is_workspace_measured=True)

    def __str__(self) -> str:
        return (
            f"weights {self.weight_bytes / MIB:,.0f} MiB, KV pool {self.pool_bytes / MIB:,.0f} MiB "
            f"({self.num_pages} pages of {self.page_len} tokens, {self.num_tokens:,} tokens), "
            f"workspace {self.workspace_bytes / MIB:,.0f} MiB, left {self.left_bytes / MIB:,.0f} MiB"
        )

    def table(self) -> str:
        """A line a part, for people."""
        pool_note = f"{self.num_pages:,} pages of {self.page_len} tokens: {self.num_tokens:,} tokens"
        how = "as compiled" if self.is_workspace_measured else "estimated"
        rows = [("weights", self.weight_bytes, ""), ("KV pool", self.pool_bytes, pool_note)]
        for part in self.layers:
            num_bytes = part.num_layers * part.bytes_per_token * self.page_len * self.num_pages
            note = f"{part.num_layers} layers, {part.bytes_per_token:,} bytes a token and layer"
            rows.append((f"  K{part.k_bits} V{part.v_bits}", num_bytes, note))
        rows.append(("slots", self.slot_bytes, "counts of tokens, hidden states of a step"))
        rows.append(("workspace", self.workspace_bytes, f"largest temporary of a step, {how}"))
        rows.append(("left", self.left_bytes, f"of {self.free_bytes / MIB:,.0f} MiB free beside the weights"))
        return "\n".join(f"{name:<10} {num / MIB:>10,.0f} MiB  {note}".rstrip() for name, num, note in rows)


def layer_bytes(spec: ModelSpec) -> tuple[LayerBytes, ...]:
    """What a token takes in the pool: a token and kv head H * bits / 8, plus 4 for its scale and offset."""
    itemsize = jax.numpy.dtype(spec.dtype).itemsize
    counts: dict[tuple[int, int, int], int] = {}

    def of(layer: LayerSpec) -> tuple[int, int, int]:
        num = bytes_per_token(
            layer.num_kv_heads, layer.head_dim, k_bits=layer.k_bits, v_bits=layer.v_bits, itemsize=itemsize
        )
        return layer.k_bits, layer.v_bits, num

    for segment in spec.segments:
        counts[of(segment.layer)] = counts.get(of(segment.layer), 0) + segment.num_layers
    return tuple(LayerBytes(k, v, num_layers, num) for (k, v, num), num_layers in counts.items())


def free_device_bytes(device: jax.Device | None = None) -> int:
    """Bytes that can still be allocated on a device; of a CPU, the memory that the system calls available."""
    stats = (device or jax.devices()[0]).memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    try:  # what is free counts no cached files, such as the checkpoint that was just read, though they give way
        available = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(available.split()[1]) << 10
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def estimate_workspace(spec: ModelSpec, buckets: Buckets, max_len: int) -> int:
    """Bytes of the largest temporary of a step, before any step is compiled; meant to be too high rather than too low.

    It sums, for the largest split step: a few activations and the widest linear's input and output (a linear may leave
    float32), one dequantised weight, the partial results of decode attention, a tile's scores where attention runs as
    its reference, copies of quantised pages. Sampling holds five arrays of logits: raw, processed, and the sampler's.
    """
    itemsize = jax.numpy.dtype(spec.dtype).itemsize
    layers = [segment.layer for segment in spec.segments]
    linears = [linear for layer in layers for linear in layer.linears]
    num_decode = buckets.split_decode_slots[-1]

    def row_bytes(linear: LinearSpec) -> int:
        return linear.in_dim * itemsize + linear.out_dim * 4

    activations = buckets.max_rows * (4 * spec.embed_dim * itemsize + max(row_bytes(linear) for linear in linears))
    one_weight = 2 * max(linear.in_dim * linear.out_dim for linear in linears)
    logits = 5 * 4 * spec.vocab_size * num_decode
    num_heads, head_dim = max(layer.num_heads for layer in layers), max(layer.head_dim for layer in layers)
    partials = 4 * num_decode * num_heads * head_dim * -(-max_len // RANGE_LEN)
    is_quantised = any(min(layer.k_bits, layer.v_bits) < 16 for layer in layers)
    key_bytes = max(4 * layer.num_kv_heads * layer.head_dim for layer in layers)
    scores = 5 * 4 * num_heads * REFERENCE_SCORES
    copies = min(MAX_COPY_BYTES, key_bytes * max_len * buckets.max_chunks) if is_quantised else 0
    return one_weight + max(activations + partials + scores + copies, partials + logits)


def plan_memory(
    spec: ModelSpec, weight_bytes: int, workspace_bytes: int, *, page_len: int, max_batch_size: int, max_len: int,
    share: float | int, slot_bytes: int = 0, placement: Placement = HERE,
) -> MemoryPlan:  # fmt: skip
    """Sizes the pool; of a model in shards, what each device has of it.

    Args:
        spec: the model.
        weight_bytes: of its weights, already on the device.
        workspace_bytes: the largest temporary of a step.
        page_len: tokens of a page.
        max_batch_size, max_len: the pool never holds more than this many sequences of this length.
        share: a float is the part that the pool takes of what all else leaves free, an int its number of pages.
        slot_bytes: of the state beside the pool.
        placement: the devices; of those of this process the one with the least memory counts.

    Raises:
        OutOfMemoryError: not even one sequence of one page fits, with the numbers.
    """
    free = min(free_device_bytes(device) for device in placement.devices if is_own(device))
    plan = MemoryPlan(weight_bytes, free, workspace_bytes, False, layer_bytes(spec), 0, page_len, slot_bytes)
    if isinstance(share, int):
        num_pages = share
    else:
        budget = int(max(0, free - slot_bytes - workspace_bytes) * share)
        if jax.default_backend() == "cpu":
            budget = min(budget, CPU_POOL_LIMIT_BYTES) // placement.num_shards
        useful = max_batch_size * -(-max_len // page_len) + 1
        num_pages = min(rounded_down(budget // plan.page_bytes), useful)
    plan = replace(plan, num_pages=num_pages)
    if num_pages < 2 or plan.left_bytes < 0:
        raise OutOfMemoryError(refusal(plan))
    return plan


def is_own(device: jax.Device | None) -> bool:
    """Whether a device is of this process: only it knows how much is free."""
    return device is None or device.process_index == jax.process_index()


def refusal(plan: MemoryPlan) -> str:
    """Why a plan does not fit, and what to change."""
    return (
        f"a KV pool of {plan.num_pages} pages of {plan.page_bytes:,} bytes ({plan.pool_bytes:,}) does not fit: "
        f"{plan.free_bytes:,} bytes are free beside {plan.weight_bytes:,} bytes of weights, slots take "
        f"{plan.slot_bytes:,} of them, and steps need {plan.workspace_bytes:,} of them; lower max_prefill_token_num, "
        "max_batch_size or session_len, choose a smaller quant_policy, or change cache_max_entry_count"
    )


def rounded_down(num_pages: int) -> int:
    """The next lower multiple of a power of two, one of `SIZES_PER_OCTAVE` sizes between two powers of two."""
    unit = 1 << max(0, num_pages.bit_length() - SIZES_PER_OCTAVE.bit_length())
    return num_pages // unit * unit
