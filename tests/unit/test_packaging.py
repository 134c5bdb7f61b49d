"""The files around the code: one set of pins, one set of commands."""

import ast
import graphlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

import sinkutils
from sinkutils.data import embedded
from sinkutils.study import experiments

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements():
    """Every requirement of pyproject.toml, by the name of its extra; "" is the core."""
    by_extra = {"": PROJECT["project"]["dependencies"], **PROJECT["project"]["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in by_extra.items()}


def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_ranges_hold_the_pins_and_no_other_file_has_any():
    pinned = pins()
    for extra, lines in requirements().items():
        for line in lines:
            assert "==" not in str(line), f"{line} of {extra or 'the core'} is a pin"
            assert line.name == "sinkutils" or line.specifier.contains(pinned[line.name]), line
    for name in ("environment.yml", "Makefile", "docs/requirements.txt", "pyproject.toml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"[a-z]==\d", text) and (name == "pyproject.toml" or "constraints.txt" in text), name


def test_the_text_is_of_packages_that_are_pinned_and_that_make_installs():
    installed = {name: one and one.version.partition("+")[0] for name, one in embedded.installed().items()}
    assert installed.items() <= pins().items()
    listed = {line.name for extra in ("", "notebooks", "test", "hub", "text") for line in requirements()[extra]}
    assert set(embedded.DISTRIBUTIONS) <= listed
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "--constraint constraints.txt --editable '.[text,models]'" in makefile


def test_a_package_that_is_missing_is_named_with_what_brings_it():
    code = "import sys; sys.modules['pandas'] = None; import sinkutils as su; su.records"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True)
    assert run.stderr.splitlines()[-1] == "ImportError: pandas is needed for su.records: pip install pandas"
    # nbformat and nbclient come with papermill.
    by_extra = {extra: {line.name for line in lines} for extra, lines in requirements().items()}
    assert set(sinkutils._EXTRAS) - {"nbformat", "nbclient"} <= by_extra["notebooks"] | by_extra["hub"]
    assert set(sinkutils._EXTRAS.values()) <= set(by_extra)


def test_no_file_names_a_machine_path():
    names = "(/" + "work/|/" + "root/|/home/[a-z])"
    for path in ROOT.rglob("*"):
        made = path.relative_to(ROOT).parts[0] in ("rendered", "book", "build") or ".egg-info" in str(path)
        hidden = path.relative_to(ROOT).parts[0].startswith(".")
        if path.suffix in (".py", ".md", ".ipynb", ".json", ".toml", ".yml") and not made and not hidden:
            assert not re.search(names, path.read_text(errors="replace")), path


def test_every_room_is_packaged_and_the_version_is_one():
    rooms = {f"sinkutils.{path.parent.name}" for path in (ROOT / "sinkutils").glob("*/__init__.py")}
    tops = {"sinkutils", "sinkutils.paper_data", "sinkutils.ledger_data"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == tops | rooms
    assert PROJECT["project"]["version"] == sinkutils.__version__


def test_importing_the_package_loads_few_modules():
    code = (
        "import sys, sinkutils as su\n"
        "own = lambda: [m for m in sys.modules if m.startswith('sinkutils')]\n"
        "assert len(own()) == 1 and 'torch' not in sys.modules, own()\n"
        "su.TransformerLM(su.LMConfig())\n"
        "assert len(own()) <= 12, own()\n"
        "su.config('base')\n"
        "late = {'transformers', 'datasets', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules)\n"
        "assert not late and not any('training' in m or 'plots' in m for m in own()), (late, own())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_what_contributing_says_to_paste_is_an_experiment():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.strip().startswith("softplus: {title")]
    ((name, fields),) = yaml.safe_load(line).items()
    assert set(experiments.Experiment(name, "8", **fields).change) <= set(experiments.experiment("sigmoid").change)


ROOMS = ("model", "data", "study", "measuring", "training", "ledger", "plots")


def test_rooms_import_only_from_those_before_them_and_no_two_modules_each_other():
    package = Path(sinkutils.__file__).parent
    paths = {
        ".".join(("sinkutils", *path.relative_to(package).with_suffix("").parts)): path
        for path in package.rglob("*.py")
    }
    graph = {}
    for name, path in paths.items():
        source = re.sub(r"^if TYPE_CHECKING:\n(?: .*\n|\n)+", "", path.read_text("utf-8"), flags=re.MULTILINE)
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        sources = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
        graph[name] = {source if source in paths else source.rpartition(".")[0] for source in sources} & set(paths)
        room = name.split(".")[1]
        later = ROOMS[ROOMS.index(room) + 1 :] if room in ROOMS else ()
        up = [source for source in graph[name] if source.split(".")[1] in later]
        assert not up, f"{name} imports {up}"
    assert any(graph.values())
    graphlib.TopologicalSorter(graph).prepare()  # a circle raises CycleError, which names it
