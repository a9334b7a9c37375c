"""The command as users start it, on real models: against transformers' own greedy tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def turbojax(*args, cache):
    """Runs the command in a process of its own."""
    command = [sys.executable, "-m", "turbojax", *map(str, args)]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_bulk_gives_the_reference_tokens_and_goes_on(goldens, tmp_path):
    golden = goldens / "llama_plain"
    inputs, expected = (dict(np.load(golden / name)) for name in ("inputs.npz", "expected.npz"))
    prompts = [inputs["p17_ids"], inputs["p40_ids"]]
    prompts += [ids[:n] for ids, n in zip(inputs["batch_ids"], inputs["batch_lens"], strict=True)]
    wanted = [expected["p17_gen_ids"], expected["p40_gen_ids"], *expected["batch_gen_ids"]]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"token_ids": ids.tolist(), "max_new_tokens": 16, "ignore_eos": True}) for ids in prompts]
    source.write_text("\n".join([*lines, '{"token_ids": [99999]}', json.dumps({"token_ids": [1] * 9999})]))
    arguments = ("generate", "--input", source, "--output", target, "--model", golden, "--dtype", "float32")

    done = turbojax(*arguments, cache=tmp_path)
    assert done.returncode == 1, done.stderr  # two lines cannot be run
    records = {r["line"]: r for r in map(json.loads, target.read_text().splitlines())}
    assert [records[i]["token_ids"] for i in range(1, 6)] == [ids.tolist() for ids in wanted]
    assert {records[i]["finish_reason"] for i in range(1, 6)} == {"length"}
    assert "99999" in records[6]["error"]
    assert "9999 prompt tokens" in records[7]["error"]

    source.write_text("\n".join(lines))
    kept = target.read_bytes().splitlines()[:5]
    target.write_bytes(b"\n".join(kept[:3]) + b"\n" + kept[3][:20])
    assert turbojax(*arguments, cache=tmp_path).returncode == 0
    again = {r["line"]: r for r in map(json.loads, target.read_text().splitlines())}
    assert again == {i: records[i] for i in range(1, 6)}


@pytest.mark.slow
def test_the_default_model_answers_on_standard_output(smollm2, goldens, tmp_path):
    from turbojax.tokenizer import load_tokenizer

    prompts = json.loads((goldens.parent / "smollm2" / "expected.json").read_text())["prompts"]
    chat = next(prompt for prompt in prompts if prompt["id"] == "chat_english")
    arguments = ("generate", chat["messages"][0]["content"], "--max-new-tokens", "8", "--dtype", "float32")
    done = turbojax(*arguments, "--session-len", "256", "--max-batch-size", "2", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == load_tokenizer(smollm2).decode(chat["greedy"]["ids"][:8])
    assert "44 prompt tokens" in done.stderr
    assert "KV pool" in done.stderr


@pytest.mark.parametrize("name", ["broken_truncated_safetensors", "broken_missing_tensor", "broken_no_architectures"])
def test_a_broken_checkpoint_is_one_line(goldens, name, tmp_path):
    done = turbojax("generate", "hi", "--model", goldens / name, cache=tmp_path)
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_model_that_does_not_exist_is_one_line(tmp_path):
    done = turbojax("generate", "hi", "--model", tmp_path / "none.gguf", cache=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/none.gguf: no such folder or file")


def test_check_env_names_versions_devices_and_kernels():
    done = turbojax("check_env", cache="/nonexistent")
    assert done.returncode == 0, done.stderr
    import jax

    assert jax.__version__ in done.stdout
    for title in ("versions", "devices", "kernels", "files"):
        assert f"{title}\n" in done.stdout
    assert "cpu 0" in done.stdout
    assert "reference" in done.stdout
