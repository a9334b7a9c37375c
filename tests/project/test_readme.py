"""The README does what it says: its Python runs, its commands exist, its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def command(number: int) -> str:
    block = re.search(rf"<!-- command: {number} -->\n```bash\n(.*)\n```\n<!-- end -->", README)
    assert block, f"command {number} is not one line between its markers"
    return block[1]


@pytest.mark.slow
@pytest.mark.parametrize("code", PYTHON_BLOCKS, ids=lambda code: code.splitlines()[0])
def test_its_python_runs(code, smollm2, capsys):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


def test_the_two_commands_install_this_project_and_nothing_else():
    assert "pip install -q . && .venv/bin/turbojax generate" in command(1)
    assert command(2) == ".venv/bin/pip install -q '.[test]' && .venv/bin/python -m pytest -n 2 --dist worksteal"
    assert "readme_command 2" in (ROOT / ".ci" / "run").read_text()


def test_every_command_line_in_it_is_understood():
    import shlex

    import typer

    from turbojax.cli.app import app

    group = typer.main.get_command(app)
    lines = [line.split("#")[0] for line in README.splitlines() if line.startswith("turbojax ")]
    assert len(lines) >= 4
    for line in lines:
        name, *arguments = shlex.split(line)[1:]
        arguments = [str(Path(__file__)) if argument.endswith("prompts.jsonl") else argument for argument in arguments]
        group.commands[name].make_context(name, arguments)  # parses; raises a usage error


def test_every_architecture_is_listed():
    from turbojax.models.families import FAMILIES

    assert set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == set(FAMILIES)


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
