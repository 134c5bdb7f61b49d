"""The package as pip installs it, away from any checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sinkutils.paths import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package as `pip install .` puts it into site-packages, away from any checkout, and an empty folder."""
    top = tmp_path_factory.mktemp("installed")
    source, site, elsewhere = (top / name for name in ("source", "site", "elsewhere"))
    elsewhere.mkdir()
    for name in ("sinkutils", "data/paper"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    tables = [file.relative_to(ROOT) for file in (ROOT / "data").iterdir() if file.is_file()]
    for name in ("pyproject.toml", "README.md", "LICENSE", *tables):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", site, source], check=True)

    def call(*arguments, **environment):
        environment = os.environ | {"PYTHONPATH": str(site), "SINKUTILS_HOME": ""} | environment
        return subprocess.run(
            [sys.executable, *arguments], cwd=elsewhere, env=environment, text=True, capture_output=True
        )

    return call, site, elsewhere


def test_the_installed_package_works_in_any_folder_and_writes_nothing_beside_its_code(installed, tmp_path):
    call, site, elsewhere = installed
    before = {path for path in site.rglob("*") if "__pycache__" not in path.parts}
    listing = call("-m", "sinkutils", "list", "--section", "6")
    assert listing.returncode == 0 and "weight_decay_0.5" in listing.stdout and "41.08" in listing.stdout
    assert f"there are no records in {elsewhere / 'runs'}" in listing.stderr
    ledger = call("-m", "sinkutils", "claims", "--preset", "minute")
    assert ledger.returncode == 0 and "claims at minute" in ledger.stdout.splitlines()[-1], ledger.stderr
    notebooks = call("-m", "sinkutils", "run")
    assert notebooks.returncode == 2
    assert notebooks.stderr.splitlines()[-1] == (
        "sinkutils: the notebooks are in a checkout of the repository: run this command in one"
    )
    where = "from sinkutils import paths; print(paths.RUNS, paths.RENDERED)"
    for home in ("", str(tmp_path)):
        folders = call("-c", where, SINKUTILS_HOME=home).stdout.split()
        assert {Path(folder).parent for folder in folders} == {Path(home) if home else elsewhere}
    assert before == {path for path in site.rglob("*") if "__pycache__" not in path.parts}
    assert (site / "bin" / "sinkutils").exists() and not list(elsewhere.iterdir())
