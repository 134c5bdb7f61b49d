"""The files around the code: one set of pins, a package that installs, a README with the numbers of the records."""

import ast
import graphlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from scipy import stats

import sinkutils as su
from sinkutils.commands import parser
from sinkutils.ledger.claims_file import read_claims
from sinkutils.paths import LEDGER, OPEN_LMS, ROOT
from sinkutils.study import corpus, grid, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements():
    """Every requirement of pyproject.toml, by the name of its extra; "" is the core."""
    project = PROJECT["project"]
    by_extra = {"": project["dependencies"], **project["optional-dependencies"]}
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
        assert not re.search(r"[a-z]==\d", text), name
        assert name == "pyproject.toml" or "constraints.txt" in text, name


def test_the_text_is_of_packages_that_are_pinned_and_that_make_installs():
    versions = corpus.text_versions().items()
    installed = {name: version and version.partition("+")[0] for name, version in versions}
    assert installed.items() <= pins().items()
    extras = ("", "notebooks", "test", "hub", "text")
    listed = {line.name for extra in extras for line in requirements()[extra]}
    assert set(sources.DISTRIBUTIONS) <= listed
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "--constraint constraints.txt --editable '.[text,models]'" in makefile


def test_no_file_names_a_machine_path():
    names = "(/" + "work/|/" + "root/|/home/[a-z])"
    kinds = (".py", ".md", ".ipynb", ".json", ".toml", ".yml")
    for path in ROOT.rglob("*"):
        top = path.relative_to(ROOT).parts[0]
        made = top in ("rendered", "book", "build", "mutants") or ".egg-info" in str(path)
        if path.suffix in kinds and not made and not top.startswith("."):
            assert not re.search(names, path.read_text(errors="replace")), path


def test_every_room_is_packaged_and_the_version_is_one():
    rooms = {f"sinkutils.{path.parent.name}" for path in (ROOT / "sinkutils").glob("*/__init__.py")}
    tops = {"sinkutils", "sinkutils.paper_data", "sinkutils.ledger_data"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == tops | rooms
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sinkutils.__version__"}


def test_the_package_holds_its_tables_and_none_of_the_records(tmp_path):
    """By the files that a wheel would take; 61 MB of records once went with them."""
    code = (
        "from setuptools.dist import Distribution\n"
        "made = Distribution({'script_name': 'setup.py'})\n"
        "made.parse_config_files()\n"
        f"made.get_command_obj('egg_info').egg_base = {str(tmp_path)!r}\n"
        "build = made.get_command_obj('build_py')\n"
        "build.ensure_finalized()\n"
        "for _, folder, _, names in build.data_files:\n"
        "    print(*(f'{folder}/{name}' for name in names), sep='\\n')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    files = [line for line in done.stdout.splitlines() if (ROOT / line).is_file()]
    names = {Path(line).name for line in files}
    wanted = {"presets.yaml", "claims.yaml", "pretraining.csv", "draw.js", "page.html", "py.typed"}
    assert wanted <= names
    assert sum((ROOT / line).stat().st_size for line in files) < 5_000_000


def test_editors_and_type_checkers_know_every_public_name():
    stub = ast.parse((ROOT / "sinkutils" / "__init__.pyi").read_text("utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.asname: node.module for node in imports for alias in node.names}
    assert homes == su._HOMES and len(homes) > 30
    for name in homes:
        named = getattr(su, name)
        assert getattr(named, "__module__", named.__name__).startswith(homes[name])


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
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_what_contributing_says_to_paste_is_an_experiment_and_a_claim(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.strip().startswith("softplus: {title")]
    ((name, fields),) = yaml.safe_load(line).items()
    change = grid.Experiment(name, "8", **fields).change
    assert set(change) <= set(grid.experiment("sigmoid").change)
    (claim,) = re.findall(r"```yaml\n(- id:.*?)```", text, flags=re.DOTALL)
    (tmp_path / "claims.yaml").write_text(claim)
    assert read_claims(tmp_path / "claims.yaml")[0].checks[0].runs == (name,)


def test_rooms_import_only_from_those_before_them_and_no_two_modules_each_other():
    package = ROOT / "sinkutils"
    rooms = ("model", "measuring", "plots", "study", "ledger")
    paths = {}
    for path in package.rglob("*.py"):
        paths[".".join(("sinkutils", *path.relative_to(package).with_suffix("").parts))] = path
    graph = {}
    for name, path in paths.items():
        source = re.sub(
            r"^if TYPE_CHECKING:\n(?: .*\n|\n)+", "", path.read_text("utf-8"), flags=re.MULTILINE
        )
        tree = ast.parse(source)

        def imported(nodes):
            froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
            sources = {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
            homes = {one if one in paths else one.rpartition(".")[0] for one in sources}
            return homes & set(paths)

        # What a function imports when it is called makes no circle, but it must be of no later room.
        graph[name] = imported(tree.body)
        room = name.split(".")[1]
        later = rooms[rooms.index(room) + 1 :] if room in rooms else ()
        up = [source for source in imported(ast.walk(tree)) if source.split(".")[1] in later]
        assert not up, f"{name} imports {up}"
    assert any(graph.values())
    graphlib.TopologicalSorter(graph).prepare()  # a circle raises CycleError, which names it


def test_the_scripts_of_a_study_call_commands_that_there_are():
    stubs = 'make() { :; }; python() { echo "$*"; }; . "$0"'
    lines = []
    # those for a lent card call scripts of their own
    for script in sorted((ROOT / "studies").glob("[!c]*.sh")):
        lines += subprocess.check_output(["bash", "-c", stubs, script], text=True).splitlines()
    assert len(lines) > 10
    for line in lines:
        parser().parse_args(line.partition("-m sinkutils ")[2].split())


def test_no_module_is_much_longer_than_500_lines():
    modules = (ROOT / "sinkutils").rglob("*.py")
    lines = {path.name: len(path.read_text("utf-8").splitlines()) for path in modules}
    assert len(lines) > 10
    assert {name: count for name, count in lines.items() if count > 510} == {}


def later_blocks_with_a_sink(name):
    """Sink_1 of blocks 2 to L in percent, over the seeds that keep alpha of each text."""
    shares = []
    runs = su.runs("laptop")
    for seed in runs[runs.experiment == name].seed:
        alpha = su.record(name, "laptop", seed).arrays["final"][:, 0]  # (n, L, H)
        shares.append(100 * float((np.asarray(alpha)[:, 1:] > 0.3).mean()))
    return np.mean(shares)


@pytest.mark.slow
def test_each_number_of_ours_is_what_the_records_say():
    numbers = ["sink_1", "sink_star"]
    mean = su.runs("laptop").groupby("experiment")[numbers].mean()
    files = {name: OPEN_LMS / f"{name}.json" for name in ("smollm2", "gemma-3-270m")}
    real = {name: json.loads(file.read_text()) for name, file in files.items()}
    smol = real["smollm2"]["probes"]["natural"]["text"]["sink"]["1"]["0.3"]
    alone = real["smollm2"]["alone"]
    token_30 = alone["middle, x_1 hidden"]["blocks 1 to 12"]["sink"]
    natural = real["gemma-3-270m"]["probes"]["natural"]
    gemma = {name: kept["sink"]["1"]["0.3"] for name, kept in natural.items()}
    # a cache of 128 keys, without and with the first one; bins of eight positions
    leaving = {name: np.array(loss) for name, loss in real["smollm2"]["leaving"]["loss"].items()}
    dropped, kept = (
        (leaving[name] - leaving["full"])[:, 8:].mean() for name in ("128 + 0", "127 + 1")
    )
    of_value = json.loads((LEDGER / "constant_value.json").read_text())
    constant, of_gemma = (
        np.subtract(
            of_value[name]["loss"]["mean in its place"], of_value[name]["loss"]["kept"]
        ).mean()
        for name in files
    )
    assert of_gemma < 0.025
    desk, gpu = (su.runs(preset).set_index("experiment") for preset in ("desk", "gpu"))
    state = json.loads((LEDGER / "one_number.json").read_text())["smollm2"]
    of_texts = np.subtract(
        state["block 12"]["the element alone"]["loss"], state["untouched"]["loss"]
    )
    within = stats.t.ppf(0.975, len(of_texts) - 1) * stats.sem(of_texts)
    assert abs(of_texts.mean()) < 0.005
    places = real["smollm2"]["positions"]["sink"]
    said = {
        f"from the third token on changes by 0.00 ± {within:.2f} nats",
        f"costs SmolLM2 {dropped:.2f} nats per token over the next 64",
        f"With that one key kept it is {kept:.2f}. "
        f"Of what its value brings, a constant is enough: that adds {constant:.2f}",
        f"at most {max(places[1:32]):.1f} % have one on any single one of the next 31",
        f"{smol:.2f} % [",
    }
    assert 70 < places[0] < 75  # "nearly three quarters"
    begins = {}  # the film: the step from which a head of seed 0 rests on its key, or on the token
    for name in ("k_bias", "fixed_1"):
        record = su.record(name, "laptop", 0)
        most = np.asarray(record.arrays["curve"])[:, -1 if name == "k_bias" else 0].max((1, 2))
        begins[name] = record.metrics["curve"][int((most > 0.3).argmax())]["step"]
    assert begins == {"k_bias": 300, "fixed_1": 3000}
    with_key = su.runs("laptop").query("experiment == 'k_bias'").set_index("seed").sink_star
    assert len(with_key) == 9 and with_key.idxmax() == 0  # the film's seed
    later = su.runs("laptop").groupby("experiment").later_blocks.mean()
    closable, open_ = ["gate_head", "gate_element", "gate_shared"], ["gate_open", "gate_constant"]
    assert later[closable].max() < later["fixed_1"] / 3 and later[open_].min() > later["fixed_1"]
    left = (100 * later[closable] / later["fixed_1"]).round()
    said.add(
        f"A gate that a query can close leaves {left.min():.0f} to {left.max():.0f} % "
        "of the later blocks' sink"
    )
    third = {name: kept["moved"]["alpha"]["3"] for name, kept in real.items()}  # the BOS in place 3
    first, bos = (np.mean(third["smollm2"][token]) for token in ("first", "bos"))
    its_bos = [np.mean(real["gemma-3-270m"]["moved"]["alpha"][k]["bos"]) for k in ("1", "3")]
    said.add(
        f"SmolLM2 still gives the first token {first:.2f} of its attention, and the BOS {bos:.2f}. "
        f"Gemma gives its BOS {its_bos[0]:.2f}, in third place as in first"
    )
    assert f"{its_bos[0]:.2f}" == f"{its_bos[1]:.2f}"
    said.add(f"a sink on a fixed first token is rarer: {gpu.sink_1['fixed_1']:.0f} % of the pairs")
    said.add(f"in few heads (at 25M in {gpu.sink_1['default']:.1f} % of the pairs")
    resting = su.heads("gpu").query("experiment == 'k_bias' and alpha_star > 0.3")
    assert len(resting) == 2 and desk.sink_star.k_bias > 70  # "most heads", "two of 64"
    assert max(sizes.sink_1.k_bias for sizes in (desk, gpu)) < 0.3
    assert mean.sink_1.fixed_1 > 50  # "on which most had it before"
    assert gemma["text"] < 0.05 < gemma["BOS"] and token_30 > 50
    later = {name: later_blocks_with_a_sink(name) for name in ("fixed_1", "sigmoid")}
    assert later["sigmoid"] == 0
    said.add(
        f"With softmax {later['fixed_1']:.1f} % of the pairs in the later blocks of a small model "
        "have a sink. With sigmoid, whose weights need not add up to one, none has"
    )
    on_key = su.runs("laptop").query("experiment == 'k_bias'").seed
    stars = [su.record("k_bias", "laptop", seed).arrays["star"][:, 1:] > 0.3 for seed in on_key]
    said.add(f"and {100 * np.mean([np.asarray(star) for star in stars]):.1f} % have one on the key")
    assert later_blocks_with_a_sink("k_bias") == 0
    operations = real["smollm2"]["operations"]
    assert operations["transplant"]["sink_1"] < 0.1 and operations["transplant"]["sink_star"] > 72
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [words for words in said if words not in readme] == []
    assert mean.sink_1.k_bias == 0
    for seed in range(6):  # as 06 says
        sinks = (
            su.record("sigmoid", "laptop", seed).arrays["final"][:, 0] > 0.3
        )  # (text, block, head)
        assert sinks[:, 0].any() and not sinks[:, 1:].any()
    ledger = (ROOT / "notebooks" / "10_ledger.ipynb").read_text("utf-8")
    assert "agree: 47; by chance 30" in ledger and "of 55 settings 32" in ledger
    assert "agree with the settings that have dead heads: 51 of 60" in ledger
    assert "in 47 of 55 settings, where guessing would agree in 30" in readme
    assert "With these it is 51 of 60" in readme
    assert "of 79 judged under both 57 have the same verdict" in ledger
    assert "clear under both: 28, 28 of them alike" in ledger
    trust = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    assert f"each of the {len(su.runs('laptop'))} runs of `laptop`" in trust
    assert f"judged all {len(su.claims('laptop'))} claims again" in trust
    assert "57 of 79 claims have the same verdict, and the 28 that are clear" in trust


@pytest.mark.parametrize(
    "path",
    ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))],
)
def test_a_link_leads_to_a_file_that_is_there_and_in_the_book(path):
    text = re.sub(r"```.*?```", "", (ROOT / path).read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [(ROOT / path).parent / to for to in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)]
    assert [to for to in targets if not to.exists()] == []
    assert {to.resolve().parent for to in targets if to.suffix == ".md"} <= {ROOT, ROOT / "docs"}


@pytest.mark.slow
def test_the_installed_package_works_in_any_folder_and_writes_nothing_beside_its_code(tmp_path):
    """As `pip install .` puts it into site-packages, away from any checkout."""
    source, site, elsewhere = (tmp_path / name for name in ("source", "site", "elsewhere"))
    elsewhere.mkdir()
    for name in ("sinkutils", "data/paper"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    data = [f"data/{path.name}" for path in (ROOT / "data").glob("*.*")]  # and no records
    for name in ("pyproject.toml", "README.md", "LICENSE", *data):
        shutil.copy(ROOT / name, source / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    pip = [sys.executable, "-m", "pip", "install", *options]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", site, source], check=True)

    def call(*arguments, **environment):
        environment = os.environ | {"PYTHONPATH": str(site), "SINKUTILS_HOME": ""} | environment
        options = {"cwd": elsewhere, "env": environment, "text": True, "capture_output": True}
        return subprocess.run([sys.executable, *arguments], **options)

    before = {path for path in site.rglob("*") if "__pycache__" not in path.parts}
    listing = call("-m", "sinkutils", "list", "--section", "6")
    assert listing.returncode == 0
    assert "weight_decay_0.5" in listing.stdout
    assert "41.08" in listing.stdout
    assert f"there are no records in {elsewhere / 'runs'}" in listing.stderr
    ledger = call("-m", "sinkutils", "claims", "--preset", "minute")
    assert ledger.returncode == 0 and "claims at minute" in ledger.stdout, ledger.stderr
    notebooks = call("-m", "sinkutils", "run")
    assert notebooks.returncode == 2
    assert "they are in a checkout of the repository" in notebooks.stderr.splitlines()[-1]
    where = "from sinkutils import paths; print(paths.RUNS, paths.RENDERED)"
    for home in ("", str(tmp_path)):
        folders = call("-c", where, SINKUTILS_HOME=home).stdout.split()
        assert {Path(folder).parent for folder in folders} == {Path(home) if home else elsewhere}
    assert before == {path for path in site.rglob("*") if "__pycache__" not in path.parts}
    assert (site / "bin" / "sinkutils").exists() and not list(elsewhere.iterdir())


def test_a_folder_that_has_a_project_of_its_own_is_no_checkout(tmp_path):
    (tmp_path / "sinkutils").mkdir()
    for name in ("__init__.py", "__init__.pyi", "paths.py"):
        shutil.copy(ROOT / "sinkutils" / name, tmp_path / "sinkutils")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'another'\n")
    code = "from sinkutils import paths; print(paths.CHECKOUT)"
    where = {"env": os.environ | {"PYTHONPATH": str(tmp_path)}, "cwd": tmp_path, "text": True}
    assert subprocess.check_output([sys.executable, "-c", code], **where) == "None\n"


def test_a_name_that_a_text_gives_between_backticks_is_there():
    homes = {path.stem: path for path in (ROOT / "sinkutils").rglob("*.py")} | {"su": None}
    lacking = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for home, name in re.findall(r"`(\w+)\.(\w+)[^`]*`", path.read_text(encoding="utf-8")):
            if home == "su":
                known = hasattr(su, name)
            elif home in homes:
                pattern = rf"^\s*(def|class) {name}\b|^\s*{name}\b[^=]*[=:]"
                known = re.search(pattern, homes[home].read_text("utf-8"), re.M)
            else:
                continue
            if not known and name not in ("py", "md", "yaml", "safetensors"):
                lacking.append((path.name, home, name))
    assert lacking == []


def test_the_page_of_public_names_is_what_docs_api_makes_of_their_docstrings(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import api

    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == api.page(), (
        "a docstring or a signature changed: run python docs/api.py"
    )
