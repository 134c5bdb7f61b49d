"""How far it is from a command to what it shows: files and functions of ours that run, time, memory.

    python benchmarks/distance.py [measure train figure lines list runs many] [--json FILE]

Each row is a process of its own. A file counts if a function of it runs; that a module is imported
is not counted. CPU seconds are the best of three, after one that fills the caches. For `many` the
study's records are copied under other seeds until there are 10,000 (the files that do not change
are linked), which takes a minute; `claims` of them is run twice, and so is read from its copy.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sinkutils"
GOALS = {
    "measure": "14 files",
    "train": "14 files",
    "figure": "6 files more than train",
    "lines": "8,260",
    "list": "0.5 CPU s, 60 MB",
    "runs": "1.5 CPU s",
    "list of 10,000": "5 CPU s",
    "claims of 10,000": "5 CPU s",
}
TRACED = """
import json, sys, threading
functions = set()

def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith({package!r}):
        if code.co_name not in ("<module>", "<lambda>") and "<class" not in code.co_name:
            functions.add((code.co_filename, code.co_firstlineno, code.co_name))

threading.setprofile(note)
sys.setprofile(note)
{code}
sys.setprofile(None)
import ast
bodies = {{}}
for file, line, name in functions:  # the body of a class is a frame of its own, and no function
    tree = bodies.setdefault(file, ast.parse(open(file, encoding="utf-8").read()))
classes = {{(f, n.name) for f, t in bodies.items() for n in ast.walk(t) if isinstance(n, ast.ClassDef)}}
functions = {{one for one in functions if (one[0], one[2]) not in classes}}
print("@" + json.dumps(sorted(functions)))
"""
MEASURE = """
from sinkutils.__main__ import main
main(["measure", {model!r}, "-n", "4"])
"""
TRAIN = """
from sinkutils.__main__ import main
main(["train", "k_bias", "--preset", {preset!r}, "--runs", {runs!r}, "--device", "cpu"])
"""
FIGURE = """
import seaborn as sns
import sinkutils as su
su.theme()
runs = su.runs("laptop")
axes = sns.stripplot(runs[runs.experiment.isin(["fixed_1", "k_bias"])], x="sink_1", y="experiment")
su.save(axes.figure, "distance")
"""
PRESET = """
name: distance
like: laptop
model: {num_layers: 2}
train: {steps: 20, eval_every: 10, eval_sequences: 8, valid_chunks: 8}
"""


def traced(code: str, **environment: str) -> dict[str, int]:
    """The files of ours of which functions run in a piece of code, with their number."""
    whole = TRACED.format(package=str(PACKAGE), code=code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", whole],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", **environment},
        cwd=ROOT,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    line = done.stdout.rpartition("@")[2]
    counts: dict[str, int] = {}
    for file, _, _ in json.loads(line):
        name = str(Path(file).relative_to(PACKAGE))
        counts[name] = counts.get(name, 0) + 1
    return counts


SMALL_MODEL = """
import sys
import transformers as tf
fast = tf.PreTrainedTokenizerFast(tokenizer_file={tokenizer!r})
fast.save_pretrained({folder!r})
config = tf.LlamaConfig(
    vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)
tf.LlamaForCausalLM(config).save_pretrained({folder!r})
"""


def small_model(folder: Path) -> None:
    """Save a small Llama, with the tokenizer of a record. In a process of its own, since a process
    that this one starts has at least its memory."""
    tokenizer = ROOT / "data" / "runs" / "laptop" / "fixed_1" / "0" / "tokenizer.json"
    code = SMALL_MODEL.format(tokenizer=str(tokenizer), folder=str(folder))
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)


def cost(*command: str, times: int = 4) -> str:
    """The CPU seconds and the memory of a process: the least of several, one of them a warm-up."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's Python keeps what it has compiled
    environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir(), "distance_pyc"))
    least = []
    for _ in range(times):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            stdout=subprocess.DEVNULL,
            env=environment,
            cwd=ROOT,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = status
        if status:
            return f"exit status {status}"
        megabytes = used.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
        least.append((used.ru_utime + used.ru_stime, megabytes))
    seconds, megabytes = min(least)
    return f"{seconds:.2f} CPU s, {megabytes:.0f} MB"


def code_lines() -> int:
    """The lines of the package that are neither blank, nor a comment, nor a docstring."""
    total = 0
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        documented = set[int]()
        for node in ast.walk(ast.parse(text)):
            body = getattr(node, "body", None)
            if not isinstance(body, list) or not body or not isinstance(body[0], ast.Expr):
                continue
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                documented |= {*range(value.lineno, (value.end_lineno or 0) + 1)}
        skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT)
        skipped += (tokenize.DEDENT, tokenize.ENDMARKER)
        lines = set[int]()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in skipped:
                lines |= {*range(token.start[0], token.end[0] + 1)}
        total += len(lines - documented)
    return total


def copies(runs: Path, count: int) -> None:
    """Copy the records of laptop under other seeds: as many records, all of them whole."""
    sources = sorted((ROOT / "data" / "runs" / "laptop").glob("*/[0-9]*/SHA256SUMS"))
    made = 0
    while made < count:
        for sums in sources[: count - made]:
            source = sums.parent
            target = runs / "laptop" / source.parent.name / str(made + 100)
            target.mkdir(parents=True)
            made += 1
            config = json.loads((source / "config.json").read_bytes())
            # Blanks behind the metrics: files that are the same would be told to be copies.
            changed = {"metrics.json": (source / "metrics.json").read_bytes() + b" " * made}
            changed["config.json"] = json.dumps(config | {"seed": int(target.name)}).encode()
            lines = ""
            for line in sums.read_text().splitlines()[:-1]:
                digest, name = line.split()
                if name in changed:
                    (target / name).write_bytes(changed[name])
                    digest = hashlib.sha256(changed[name]).hexdigest()
                elif (source / name).exists():
                    os.link(source / name, target / name)
                lines += f"{digest}  {name}\n"
            own = hashlib.sha256(lines.encode()).hexdigest()
            (target / "SHA256SUMS").write_text(f"{lines}{own}  SHA256SUMS\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rows = ("measure", "train", "figure", "lines", "list", "runs", "many")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(rows)}")
    parser.add_argument(
        "--files", action="store_true", help="also the files, each with its functions"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    asked = options.rows or rows
    results = []

    def show(name: str, seen: str) -> None:
        print(f"{name:<18}{seen:<36}goal: {GOALS[name]}", flush=True)
        results.append({"row": name, "seen": seen, "goal": GOALS[name]})
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    def show_files(name: str, counts: dict[str, int], what: str = "files") -> None:
        show(name, f"{len(counts)} {what}, {sum(counts.values())} functions")
        for file, functions in sorted(counts.items()) if options.files else ():
            print(f"    {functions:>4}  {file}")

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        if "measure" in asked:
            small_model(place / "model")
            show_files("measure", traced(MEASURE.format(model=str(place / "model"))))
        if "train" in asked or "figure" in asked:
            (place / "preset.yaml").write_text(PRESET)
            names = {"preset": str(place / "preset.yaml"), "runs": str(place / "runs")}
            trained = traced(TRAIN.format(**names))
            show_files("train", trained)
        if "figure" in asked:
            drawn = traced(FIGURE)
            further = {file: count for file, count in drawn.items() if file not in trained}
            show_files("figure", further, "further files")
        if "lines" in asked:
            show("lines", f"{code_lines():,}")
        if "list" in asked:
            show("list", cost("-m", "sinkutils", "list"))
        if "runs" in asked:
            show("runs", cost("-c", "import sinkutils as su; su.runs('laptop')"))
        if "many" in asked:
            with tempfile.TemporaryDirectory(dir=ROOT / "data") as beside:  # links need one disk
                copies(Path(beside), 10_000)
                for command in ("list", "claims"):
                    times = 4 if command == "list" else 2
                    seen = cost("-m", "sinkutils", command, "--runs", beside, times=times)
                    show(f"{command} of 10,000", seen)


if __name__ == "__main__":
    main()
