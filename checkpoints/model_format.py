"""Which format a checkpoint is: what its config says, held against what the user says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints.errors import ConfigError, UnsupportedFormatError

UNQUANTISED = "hf"
# Methods whose tensors explain themselves, so that a folder without a quantisation config may be said to be one.
_SELF_EXPLAINING = ("awq", "gptq", "fp8", "smooth_quant", "mxfp4")
_METHODS = (*_SELF_EXPLAINING, "compressed-tensors")
MODEL_FORMATS = (UNQUANTISED, *_METHODS, "gguf")


def resolve(config_file: Path, quantization: dict[str, Any] | None, model_format: str | None) -> dict[str, Any] | None:
    """The quantisation config to follow; None is unquantised.

    Args:
        config_file: named in errors.
        quantization: what the checkpoint says.
        model_format: what the user says, one of MODEL_FORMATS; None leaves it to the checkpoint. Where
            that does not say it, the user's word counts.

    Raises:
        UnsupportedFormatError: the method is unknown.
        ConfigError: the two contradict each other.
    """
    if quantization is not None and model_format and "quant_method" not in quantization:
        quantization = quantization | {"quant_method": model_format}
    found = UNQUANTISED if quantization is None else str(quantization.get("quant_method", "unnamed")).lower()
    if found not in MODEL_FORMATS:
        hint = f"supported: unquantised safetensors, GGUF, {', '.join(_METHODS)}"
        raise UnsupportedFormatError(config_file, f"quantization method {found!r} is not supported", hint=hint)
    if model_format in (None, found):
        return quantization
    if quantization is None and model_format in _SELF_EXPLAINING:
        return {"quant_method": model_format}
    says = "names no quantization method" if quantization is None else f"is of format {found!r}"
    reason = f"{says}, and model_format says {model_format!r}"
    raise ConfigError(config_file, reason, hint=f"leave model_format out, or give {found!r}")
