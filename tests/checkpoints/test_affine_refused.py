"""AWQ, GPTQ and compressed-tensors integers whose arrays or settings do not fit: what is wrong is named."""

import numpy as np
import pytest

from checkpoints import (
    CheckpointError,
    CorruptFileError,
    MissingTensorError,
    ShapeMismatchError,
    UnsupportedFormatError,
    open_checkpoint,
)
from tests.checkpoints import layouts
from tests.checkpoints.layouts import BF16, folder, of
from tests.checkpoints.samples import (
    ARRAYS,
    AWQ,
    AWQ_32,
    GPTQ_32,
    GROUP,
    IN_AWQ,
    IN_GPTQ,
    IN_PACKED,
    PACKED_32,
)

SHAPE, MISSING, UNSUPPORTED = ShapeMismatchError, MissingTensorError, UnsupportedFormatError


def changed(tensors, **changes):
    """Tensors with some replaced, or left out (None)."""
    return {name: t for name, t in (tensors | changes).items() if t is not None}


BROKEN = {  # tensors, config, the error and what it names
    "AWQ without scales": (changed(IN_AWQ, scales=None), AWQ_32, MISSING, r"'a\.scales'.*qweight"),
    "AWQ without zero points": (changed(IN_AWQ, qzeros=None), AWQ_32, MISSING, r"'a\.qzeros'"),
    "codes without a qweight": (changed(IN_AWQ, qweight=None), AWQ_32, MISSING, r"'a\.qweight'"),
    "AWQ read as GPTQ": (IN_AWQ, GPTQ_32, SHAPE, r"'a\.scales'.*\[2, 16\].*GPTQ"),
    "GPTQ read as AWQ": (changed(IN_GPTQ, g_idx=None), AWQ_32, SHAPE, r"'a\.scales'.*\[1, 128\].*AWQ"),
    "dense in AWQ": ({"weight": np.ones((4, 4), BF16)}, AWQ_32, UNSUPPORTED, r"no tensor.*\.qweight"),
    "dense and quantised": (
        IN_AWQ | {"weight": np.ones((16, 64), BF16)},
        AWQ_32,
        UNSUPPORTED,
        r"'a\.weight'.*beside a\.qweight",
    ),
    "AWQ groups": (IN_AWQ, AWQ | {"group_size": 64}, SHAPE, r"'a\.scales'.*\[2, 16\].*\[1, 16\].*size 64"),
    "AWQ words of 64 bits": (
        changed(IN_AWQ, qweight=np.ones((64, 2), np.int64)),
        AWQ_32,
        UNSUPPORTED,
        r"'a\.qweight'.*int64.*int32",
    ),
    "AWQ integer scales": (
        changed(IN_AWQ, scales=np.ones((2, 16), np.int32)),
        AWQ_32,
        UNSUPPORTED,
        r"'a\.scales'.*int32.*float16",
    ),
    "GPTQ of other bits": (IN_GPTQ, GPTQ_32 | {"bits": 8}, SHAPE, r"'a\.scales'.*\[1, 16\].*8 bits"),
    "GPTQ words that are not full": (
        changed(IN_GPTQ, qweight=IN_GPTQ["qweight"][:7]),
        GPTQ_32 | {"bits": 3},
        SHAPE,
        r"'a\.qweight'.*3 bits",
    ),
    "GPTQ without its order": (
        changed(IN_GPTQ, g_idx=None),
        GPTQ_32 | {"desc_act": True},
        MISSING,
        r"'a\.g_idx'.*desc_act",
    ),
    "GPTQ rows of uneven groups": (
        changed(IN_GPTQ, g_idx=np.minimum(GROUP * np.arange(64), 1).astype(np.int32) * (np.arange(64) > 40)),
        GPTQ_32,
        CorruptFileError,
        r"'a\.g_idx'.*groups of 32",
    ),
    "packed without scales": (changed(IN_PACKED, weight_scale=None), PACKED_32, MISSING, r"'a\.weight_scale'"),
    "packed without shape": (changed(IN_PACKED, weight_shape=None), PACKED_32, MISSING, r"'a\.weight_shape'"),
    "packed without codes": (changed(IN_PACKED, weight_packed=None), PACKED_32, MISSING, r"'a\.weight_packed'"),
    "packed without zero points": (
        changed(IN_PACKED, weight_zero_point=None),
        PACKED_32,
        MISSING,
        r"'a\.weight_zero_point'",
    ),
    "packed, zero points along K": (
        changed(IN_PACKED, weight_zero_point=np.ones((16, 1), np.int32)),
        PACKED_32,
        SHAPE,
        r"'a\.weight_zero_point'.*\[16, 1\].*\[2, 2\].*outputs",
    ),
    "packed with another shape": (
        changed(IN_PACKED, weight_shape=np.array([16, 72])),
        PACKED_32,
        SHAPE,
        r"'a\.weight_packed'.*\[16, 72\]",
    ),
    "packed, wrong groups": (IN_PACKED, layouts.pack_config(4, 16, False), SHAPE, r"'a\.weight_scale'.*\[16, 4\]"),
    "packed of other bits": (IN_PACKED, layouts.pack_config(8, 32, False), SHAPE, r"'a\.weight_packed'.*8 bits"),
    "codes that no config explains": (IN_AWQ, None, UNSUPPORTED, r"'a\.qweight'.*model_format"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_arrays_that_do_not_belong_together(tmp_path, case):
    tensors, config, error, names = BROKEN[case]
    with pytest.raises(error, match=names) as raised:
        open_checkpoint(folder(tmp_path / "m", of("a", tensors), config))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("tensors", "config", "leaf"),
    [(IN_AWQ, AWQ_32, "scales"), (IN_GPTQ, GPTQ_32, "scales"), (IN_PACKED, PACKED_32, "weight_scale")],
    ids=["awq", "gptq", "packed"],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_not_finite_are_found_before_codes_are_read(tmp_path, tensors, config, leaf, value):
    scale = np.array(tensors[leaf])
    scale[1, 1] = value
    checkpoint = open_checkpoint(folder(tmp_path / "m", of("a", tensors | {leaf: scale}), config))
    with pytest.raises(CorruptFileError, match=rf"model\.safetensors: tensor 'a\.{leaf}': 1 of its 32 values"):
        checkpoint.check()


@pytest.mark.parametrize("version", [1, 2])
def test_symmetric_gptq_read_as_the_other_version_is_found(tmp_path, version):
    codes, _, scale = ARRAYS
    tensors = layouts.gptq(codes, np.full(scale.shape, 8), scale, 4, group=GROUP, version=version)
    other = "gptq_v2" if version == 1 else "gptq"
    config = GPTQ_32 | {"sym": True, "checkpoint_format": other}
    with pytest.raises(CorruptFileError, match=rf"'a\.qzeros'.*sym.*{9 if version == 2 else 7}.*taken as {other}\)"):
        open_checkpoint(folder(tmp_path / "m", of("a", tensors), config)).check()


REFUSED = [
    (AWQ_32 | {"version": "gemv"}, "version is 'gemv'.*'gemm'"),
    (AWQ_32 | {"bits": 8}, "bits is 8"),
    (AWQ_32 | {"group_size": 0}, "group_size is 0"),
    (AWQ_32 | {"group_size": "128"}, "group_size is '128'"),
    (GPTQ_32 | {"bits": 5}, r"bits is 5.*2, 3, 4, 8"),
    (GPTQ_32 | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'.*'gptq_v2'"),
    (GPTQ_32 | {"is_marlin_format": True}, "is_marlin_format is True"),
    (GPTQ_32 | {"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
    (PACKED_32 | {"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'.*'pack-quantized'"),
]


@pytest.mark.parametrize(("config", "names"), REFUSED)
def test_settings_that_cannot_be_honoured(tmp_path, config, names):
    arrays = IN_PACKED if config["quant_method"] == "compressed-tensors" else IN_GPTQ
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config: .*{names}"):
        open_checkpoint(folder(tmp_path / "m", of("a", arrays), config))
