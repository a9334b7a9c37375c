"""Models from arrays in memory under Hugging Face names, and their parameters given back under the same names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import (
    AffineFormat,
    AffineTensor,
    Checkpoint,
    DenseFormat,
    EightBitFormat,
    EightBitTensor,
    LogicalTensor,
    Tensor,
    TensorFormat,
    TensorInfo,
)
from pallas_kernels.affine_linear import PackedAffine
from turbojax.core.weights import Linear
from turbojax.errors import InteropError
from turbojax.integrations.qarray import from_qarray, is_qarray
from turbojax.models.families import Architecture, Source, architecture_of
from turbojax.models.model import Model, model_of
from turbojax.models.placing import places
from turbojax.models.planning import bias_of, blocks_of_rows
from turbojax.models.spec import GroupedAffine, LinearSpec, Storage

if TYPE_CHECKING:
    import qwix

Param: TypeAlias = "np.ndarray | jax.Array | AffineTensor | EightBitTensor | qwix.QArray"

ACCEPTED = "an array of floats, AffineTensor with codes of 4 or 8 bits, EightBitTensor, qwix.QArray"
BITS = (4, 8)
IN_MEMORY = "<params>"  # what errors call parameters that no file holds


@dataclass(frozen=True)
class Part:
    """One part of a layer, on its way back to a tensor.

    Attributes:
        fields: its arrays; N leads in all of them but `perm`.
        rows: those of the tensor that it is; None: all.
        storage: of a weight.
    """

    fields: dict[str, np.ndarray]
    rows: tuple[int, ...] | None = None
    storage: Storage | None = None


def from_params(
    config: Mapping[str, Any],
    tensors: Mapping[str, Param],
    *,
    dtype: str = "auto",
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
) -> Model:
    """A model from its parameters, for `turbojax.pipeline` and the pure steps alike.

    Args:
        config: as config.json has it.
        tensors: by Hugging Face name. A linear's weight is [N, K]: a dense array, an AffineTensor, an EightBitTensor,
            or a qwix.QArray of that shape. Names that the architecture does not have are left alone.
        dtype: see `load_model`.
        generation_config: as generation_config.json has it.
        tokenizer: the folder or .gguf file whose tokenizer goes with the model; None serves token ids.

    Raises:
        ModelConfigError: the config names an unknown architecture or something that cannot be honoured.
        CheckpointError: a tensor is missing or has the wrong shape.
        InteropError: a tensor is none of numbers, or a QArray of a kind that has no counterpart here.
    """
    path = Path(IN_MEMORY if tokenizer is None else tokenizer)
    names = tensor_names(architecture_of(config))
    found = [logical_tensor(name, tensors[name], path) for name in names if name in tensors]
    return model_of(Checkpoint(path, dict(config), dict(generation_config or {}), found), dtype=dtype)


def tensor_names(arch: Architecture) -> list[str]:
    """Every tensor that a checkpoint of this architecture may hold, each once."""
    sources = [*arch.sources.values(), *(bias_of(arch.sources[part]) for part in arch.biased)]
    layers = lambda source: range(arch.num_layers if "{i}" in source.name else 1)  # noqa: E731
    return list(dict.fromkeys(source.at(layer) for source in sources for layer in layers(source)))


def logical_tensor(name: str, param: Any, path: Path) -> LogicalTensor:
    """A parameter as a checkpoint shows it. What is on a device is copied when it is read.

    Raises:
        InteropError: it is none of numbers.
    """
    tensor = from_qarray(param.T, name) if is_qarray(param) else param
    form = format_of(tensor)
    if form is None:
        of = f" of {param.dtype}" if hasattr(param, "dtype") else ""
        raise InteropError(f"parameter '{name}' is a {type(param).__name__}{of}; accepted: {ACCEPTED}")
    shape = tensor.shape[::-1] if isinstance(tensor, AffineTensor) else tuple(tensor.shape)
    info = TensorInfo(name, shape, form, path, num_bytes=0)
    read = lambda: np.asarray(tensor) if isinstance(form, DenseFormat) else tensor  # noqa: E731
    return LogicalTensor(info, read, lambda: check_codes(name, tensor))


def format_of(tensor: Any) -> TensorFormat | None:
    """None: it is of no kind that a checkpoint has."""
    if isinstance(tensor, AffineTensor) and tensor.bits in BITS:
        return AffineFormat(tensor.bits, tensor.group_size, tensor.offset is not None, tensor.perm is not None)
    if isinstance(tensor, EightBitTensor):
        return EightBitFormat(str(tensor.codes.dtype), tensor.has_blocks)
    if isinstance(tensor, np.ndarray | jax.Array) and jnp.issubdtype(tensor.dtype, jnp.floating):
        return DenseFormat(str(tensor.dtype))
    return None


def check_codes(name: str, tensor: Any) -> None:
    """Raises InteropError where scales are not finite or codes out of range."""
    try:
        if isinstance(tensor, AffineTensor):
            tensor.check()
        elif isinstance(tensor, EightBitTensor) and not np.isfinite(tensor.scale).all():
            raise ValueError("scale holds values that are not finite")
    except ValueError as error:
        raise InteropError(f"parameter '{name}': {error}") from error


def to_params(model: Model) -> dict[str, Tensor]:
    """The parameters of a model under Hugging Face names, on the host: what `from_params` takes.

    Dense ones have the model's dtype (norms float32), those in codes are AffineTensor or EightBitTensor; linears are
    [N, K], and apart or fused as the family's checkpoints have them.

    Raises:
        InteropError: the weights are packed for kernels.
    """
    gathered: dict[str, list[Part]] = {}
    for name, part in parts_of(model, architecture_of(model.config)):
        gathered.setdefault(name, []).append(part)
    return {name: tensor_of(parts) for name, parts in gathered.items()}


def parts_of(model: Model, arch: Architecture) -> Iterator[tuple[str, Part]]:
    """Every part of every layer, with the name of the tensor that it belongs to."""
    weights, sources = model.weights, arch.sources
    yield from linear_parts(arch, ["embedding"], weights.embedding, model.spec.embedding)
    for segment, spec in zip(weights.segments, model.spec.segments, strict=True):
        layer, first = spec.layer, spec.first_layer
        groups = (
            (["q", "k", "v"], segment.qkv, layer.qkv, layer.num_kv_heads),
            (["o"], (segment.o,), (layer.o,), 1),
            (["gate", "up"], segment.gate_up, layer.gate_up, layer.down.in_dim // layer.gate_up_tile),
            (["down"], (segment.down,), (layer.down,), 1),
        )
        for parts, linears, specs, num_runs in groups:
            if len(linears) == 1:
                yield from linear_parts(arch, parts, linears[0], specs[0], first, num_runs)
                continue
            for part, linear, linear_spec in zip(parts, linears, specs, strict=True):
                yield from linear_parts(arch, [part], linear, linear_spec, first)
        for part in ("attn_norm", "q_norm", "k_norm", "post_attn_norm", "ffw_norm", "post_ffw_norm"):
            norm = getattr(segment, part)
            for i, value in enumerate([] if norm is None else np.asarray(norm)):
                yield sources[part].at(first + i), Part({"dense": value})
    yield sources["final_norm"].name, Part({"dense": np.asarray(weights.final_norm)[0]})
    if weights.head is not None and model.spec.head is not None:
        yield from linear_parts(arch, ["head"], weights.head, model.spec.head)


def linear_parts(
    arch: Architecture, parts: Sequence[str], linear: Linear, spec: LinearSpec, first_layer: int = 0, num_runs: int = 1
) -> Iterator[tuple[str, Part]]:
    """Weight and bias of each part of one stacked linear; undoes `loading.Reader.linear`."""
    sources = [arch.sources[part] for part in parts]
    sizes = [arch.out_dims.get(part, spec.out_dim) for part in parts]
    stacks = stacks_of(linear, sources[0])
    for i in range(len(next(iter(stacks.values())))):
        pieces = split({name: stack[i] for name, stack in stacks.items()}, sizes, num_runs)
        for source, fields in zip(sources, pieces, strict=True):
            if "bias" in fields:
                yield bias_of(source).at(first_layer + i), Part({"dense": fields.pop("bias")}, source.rows)
            yield source.at(first_layer + i), Part(fields, source.rows, spec.storage)


def stacks_of(linear: Linear, source: Source) -> dict[str, np.ndarray]:
    """The arrays [L, ...] of a linear on the host, by name; a dense weight is `dense`."""
    weight = linear.weight
    if isinstance(weight, PackedAffine):
        raise InteropError(f"parameter '{source.name}' is packed for kernels; load the model with pack=False")
    if isinstance(weight, jax.Array | np.ndarray):
        found: dict[str, Any] = {"dense": weight}
    else:
        found = {name: getattr(weight, name, None) for name in ("codes", "scale", "offset", "perm")}
    return {name: np.asarray(x) for name, x in (found | {"bias": linear.bias}).items() if x is not None}


def split(fields: dict[str, np.ndarray], sizes: Sequence[int], num_runs: int) -> list[dict[str, np.ndarray]]:
    """The parts of one layer of a fused linear; scales of blocks have a row for each 128 of its rows."""
    if len(sizes) == 1:
        return [fields]
    out: list[dict[str, np.ndarray]] = [{} for _ in sizes]
    for name, array in fields.items():
        lens = [size * len(array) // sum(sizes) for size in sizes]
        for part, view in zip(out, places(array, lens, num_runs), strict=True):
            part[name] = view.reshape(-1, *array.shape[1:])
    return out


def tensor_of(parts: Sequence[Part]) -> Tensor:
    """A tensor as a checkpoint would give it, from the parts that are its rows."""
    fields, storage = parts[0].fields, parts[0].storage
    if parts[0].rows is not None:
        fields = {name: array if name == "perm" else merged(name, parts) for name, array in fields.items()}
    if "dense" in fields:
        return fields["dense"]
    if not isinstance(storage, GroupedAffine):
        return EightBitTensor(fields["codes"], fields["scale"])
    offset = fields["offset"].T if "offset" in fields else None
    codes, scale, perm = fields["codes"].T, fields["scale"].T, fields.get("perm")
    return AffineTensor(codes, scale, offset, storage.bits, storage.group_size, perm)


def merged(name: str, parts: Sequence[Part]) -> np.ndarray:
    """One field of a tensor, each part's at its rows."""
    arrays = [part.fields[name] for part in parts]
    out = np.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    for array, part in zip(arrays, parts, strict=True):
        assert part.rows is not None
        rows = part.rows if len(array) == len(part.rows) else blocks_of_rows(part.rows)
        out[np.asarray(rows)] = array
    return out
