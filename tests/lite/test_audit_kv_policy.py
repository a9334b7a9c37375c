"""A checkpoint's own precision of the KV cache: engines that leave it open take it, and broken ones are refused."""

import dataclasses
import json
import shutil

import pytest

from turbojax.assembly import open_model
from turbojax.configs import EngineConfig
from turbojax.errors import LiteError, ModelConfigError
from turbojax.kv_policy import KVPolicy, read_kv_policy, with_kv_policy, write_kv_policy
from turbojax.lite.audit_run import check_target

POLICY = KVPolicy(((4, 8), (8, 16)), hadamard=True)


@pytest.fixture
def folder(goldens, tmp_path):
    return shutil.copytree(goldens / "llama_plain", tmp_path / "model", copy_function=shutil.copyfile)


def bits_of(model):
    return [(s.layer.k_bits, s.layer.v_bits, s.layer.k_hadamard) for s in model.spec.segments]


def opened(folder, **fields):
    return bits_of(open_model(folder, EngineConfig(dtype="float32", **fields), lambda share: None))


def test_an_engine_that_leaves_the_kv_cache_open_takes_the_checkpoints_policy(folder):
    before = json.loads((folder / "config.json").read_text())
    assert write_kv_policy(folder, POLICY) == folder / "config.json"
    after = json.loads((folder / "config.json").read_text())
    assert after.pop("turbojax") == {"kv_policy": [[4, 8], [8, 16]], "kv_hadamard": True}
    assert after == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert opened(folder) == [(4, 8, True), (8, 16, False)]
    assert opened(folder, kv_hadamard=False) == [(4, 8, False), (8, 16, False)]
    for fields, wanted in (({"quant_policy": 0}, (16, 16)), ({"k_bits": 8}, (8, 16)), ({"quant_policy": 4}, (4, 4))):
        assert opened(folder, **fields) == [(*wanted, False)]


def test_a_saved_native_checkpoint_keeps_the_policy(folder, tmp_path):
    from turbojax.models.native import save_model

    write_kv_policy(folder, KVPolicy(((4, 4), (4, 4)), hadamard=True))
    model = open_model(folder, EngineConfig(dtype="float32"), lambda share: None)
    save_model(model, tmp_path / "native")
    assert opened(tmp_path / "native") == [(4, 4, True)]
    assert opened(tmp_path / "native", quant_policy=8) == [(8, 8, False)]


def test_a_native_checkpoint_keeps_the_policy_that_was_beside_a_file(folder, tmp_path, monkeypatch):
    from turbojax.models import native

    model = open_model(folder, EngineConfig(dtype="float32"), lambda share: None)
    of_file = dataclasses.replace(model, path=tmp_path / "model.gguf")
    write_kv_policy(of_file.path, POLICY)
    monkeypatch.setattr(native, "load_tokenizer", lambda path: None)
    native.save_model(of_file, tmp_path / "native")
    assert opened(tmp_path / "native") == [(4, 8, True), (8, 16, False)]


def test_a_native_checkpoint_is_not_calibrated_in_place(folder, tmp_path):
    from turbojax.models.native import save_model

    save_model(open_model(folder, EngineConfig(dtype="float32"), lambda share: None), tmp_path / "native")
    for work_dir in (None, tmp_path / "copy"):
        with pytest.raises(LiteError, match=r"native: is a native checkpoint.*calibrate the checkpoint"):
            check_target(tmp_path / "native", work_dir)


def test_a_file_has_a_side_car(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    assert read_kv_policy(path) is None
    assert write_kv_policy(path, POLICY).name == "model.gguf.turbojax.json"
    assert read_kv_policy(path) == POLICY
    config = with_kv_policy(EngineConfig(), read_kv_policy(path))
    assert (config.kv_policy, config.kv_hadamard) == (POLICY.layers, True)


@pytest.mark.parametrize(
    "entry",
    [
        {"kv_policy": [[4, 8]]},
        {"kv_policy": [[4, 8], [8, 3]]},
        {"kv_policy": [4, 8]},
        {"kv_policy": []},
        {"kv_hadamard": True},
        {"kv_policy": [[4, 8], [8, 8]], "kv_hadamard": "yes"},
        [[4, 8], [8, 8]],
    ],
    ids=str,
)
def test_a_broken_policy_is_named(folder, entry):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"turbojax": entry}))
    with pytest.raises(ModelConfigError, match=r"config\.json: .*kv_policy"):
        opened(folder)


def test_a_folder_without_config_takes_no_policy(tmp_path):
    with pytest.raises(ModelConfigError, match=r"no config\.json"):
        write_kv_policy(tmp_path, POLICY)
