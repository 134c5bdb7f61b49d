"""The files around the code: one set of pins, one set of commands."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def test_every_dependency_is_pinned_exactly():
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+==[0-9][0-9a-z.]*", pin) for pin in PINS), PINS
    assert "torch==2.13.0" in PINS


def test_environment_yml_holds_the_same_pins():
    lines = (ROOT / "environment.yml").read_text().splitlines()
    assert [line.strip("- ") for line in lines if "==" in line and not line.startswith("#")] == PINS


def test_the_ci_runs_what_the_readme_tells_a_user_to_run():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    readme = (ROOT / "README.md").read_text()
    assert "make run" in readme and "make test" in readme


def test_no_file_names_a_machine_path():
    names = "(/" + "work/|/" + "root/|/home/[a-z])"
    for path in ROOT.rglob("*"):
        inside = path.relative_to(ROOT).parts
        if path.suffix in (".py", ".md", ".ipynb", ".json", ".toml", ".yml") and not inside[0].startswith("."):
            assert not re.search(names, path.read_text(errors="replace")), path
