"""What the command line sets before jax is imported."""

import os
import subprocess
import sys
from pathlib import Path

from turbojax.cli.environment import prepare_environment

ROOT = Path(__file__).parents[2]


def test_jax_takes_the_settings_and_the_user_overrides_them(tmp_path):
    code = (
        "from turbojax.cli.environment import prepare_environment\n"
        "prepare_environment()\n"
        "import jax, os\n"
        "print(jax.config.jax_compilation_cache_dir)\n"
        "print(jax.config.jax_persistent_cache_min_compile_time_secs)\n"
        "print(jax.config.jax_persistent_cache_min_entry_size_bytes)\n"
        "print(os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'])"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}

    def run(**more):
        command = [sys.executable, "-c", code]
        more["TURBOJAX_CACHE"] = str(tmp_path)
        return subprocess.check_output(command, cwd=ROOT, env=env | more, text=True).split()

    assert run() == [str(tmp_path / "xla"), "0.0", "-1", "0.92"]
    own = run(JAX_COMPILATION_CACHE_DIR="/elsewhere", XLA_PYTHON_CLIENT_MEM_FRACTION="0.5")
    assert own == ["/elsewhere", "0.0", "-1", "0.5"]


def test_nothing_that_is_set_is_changed(monkeypatch):
    monkeypatch.setattr(os, "environ", {"JAX_COMPILATION_CACHE_DIR": "a", "TURBOJAX_CACHE": "b"})
    prepare_environment()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "a"
