"""The floors of the house: who imports whom, and what must stay free of jax."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("turbojax", "pallas_kernels", "checkpoints")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_import_contracts_hold():
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_one_module_imports_pallas_triton():
    importers = [path for path in FILES if any("pallas.triton" in name for name in imports(path))]
    assert importers == [ROOT / "pallas_kernels" / "backend.py"]


def test_nothing_imports_jax_internals_or_torch():
    forbidden = {
        (str(path.relative_to(ROOT)), name)
        for path in FILES
        for name in imports(path)
        if name.startswith("jax._src") or name.split(".")[0] == "torch"
    }
    assert forbidden == set()


def test_host_modules_import_no_jax():
    """In one process, which ends at the first that brings it along."""
    modules = ["turbojax", "turbojax.configs", "turbojax.errors", "turbojax.cli", "checkpoints"]
    modules += sorted(f"turbojax.engine.{path.stem}" for path in (ROOT / "turbojax" / "engine").glob("[a-z]*.py"))
    done = run_python(
        f"import importlib, sys\nfor module in {modules}:\n    importlib.import_module(module)\n"
        "    heavy = {'jax', 'jaxlib', 'flax', 'orbax', 'transformers'} & sys.modules.keys()\n"
        "    assert not heavy, (module, heavy)"
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_of_turbojax_is_there():
    import turbojax

    for name in turbojax.__all__:
        assert getattr(turbojax, name) is not None
        assert name in dir(turbojax)
    with pytest.raises(AttributeError, match="no_such_name"):
        turbojax.no_such_name  # noqa: B018


def test_every_file_says_why_it_exists():
    silent = [
        str(path.relative_to(ROOT))
        for path in FILES
        if (source := path.read_text(encoding="utf-8")).strip() and not ast.get_docstring(ast.parse(source))
    ]
    assert silent == []


def test_versions_agree():
    import turbojax

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert turbojax.__version__ == project["version"]
    pins = dict(pin.split("==") for pin in project["optional-dependencies"]["test"] if "==" in pin)
    assert f"rev: v{pins['ruff']}\n" in (ROOT / ".pre-commit-config.yaml").read_text()
    requirement = next(r for r in project["dependencies"] if r.startswith("jax>"))
    for extra in ("cuda12", "cuda13"):
        assert project["optional-dependencies"][extra] == [requirement.replace("jax", f"jax[{extra}]", 1)]


def test_the_list_of_ops_names_every_op_that_has_a_kernel():
    """`check_env` prints it."""
    from pallas_kernels import backend

    calls = [
        node
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "backend.choose"
    ]
    assert {ast.literal_eval(call.args[0]) for call in calls} == set(backend.OPS)
