"""README's parts from records and benchmarks: `python -m sinkutils readme` writes them anew."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import isnan

from sinkutils.ledger import effects, frozen, rules
from sinkutils.ledger import later as later_claims
from sinkutils.ledger.claims import claims
from sinkutils.paths import BENCHMARKS, ROOT
from sinkutils.showing.tables import records
from sinkutils.study.record import RECIPE
from sinkutils.study.store import Runs

RESULTS = ("done", "failed")  # the statuses of a record that counts


def claims_part() -> str:
    """How many claims have which verdict at the laptop preset."""
    counts = claims("laptop")["verdict"].value_counts().sort_index()
    listed = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    return f"Of {counts.sum()} claims at `laptop`: {listed}. Each with its numbers: [docs/ledger.md](docs/ledger.md)."


def ledger_page() -> str:
    """docs/ledger.md: the rules, since when they stand, and every claim at the laptop preset, later papers' apart."""
    columns = ["source", "claim", "paper", "ours", "95 %", "verdict", "holds", "effect", "reason"]
    paper, later = ([
        [row["source"], row["claim"], row["paper"], row["ours"], row["interval"], f"**{row['verdict']}**", row["holds"],
         "" if isnan(row["effect"]) else f"{row['effect']:.3f} ({row['low']:.3f} to {row['high']:.3f})", row["reason"]]
        for row in claims("laptop", part=part).to_dict("records")
    ] for part in ("paper", "later"))  # fmt: skip
    entries = json.loads(frozen.PATH.read_text(encoding="utf-8"))
    since = [f"{number}. `{entry['sha256'][:16]}`: {entry['reason']}" for number, entry in enumerate(entries, 1)]
    return page("# The ledger at `laptop`", claims_part().partition(" Each")[0], markdown(columns, paper),
                "## Claims of later papers", later_claims.__doc__ or "", markdown(columns, later),
                "## The rules", rules.__doc__ or "", "## The statistics", effects.__doc__ or "",
                "## Since when they stand", frozen.__doc__ or "", "\n".join(since))  # fmt: skip


def state_part() -> str:
    """Which experiments are recorded at the laptop preset, and what is missing."""
    table = records("laptop")
    seeds = table.loc[table["status"].isin(RESULTS), "experiment"].value_counts(sort=False)
    lacking, where = Runs().missing("laptop"), "Each with its numbers: [docs/records.md](docs/records.md)."
    if not lacking:
        return f"All {len(seeds)} experiments of `laptop` are recorded under recipe {RECIPE}. {where}"
    listed = ", ".join(f"{name} ({count})" for name, count in seeds.items()) or "none"
    return (f"Recorded at `laptop` under recipe {RECIPE}, with the number of seeds: {listed}. The sweep is under way, "
            f"{len(lacking)} runs are missing; what has fewer than three seeds has no verdict. {where}")  # fmt: skip


def records_page() -> str:
    """docs/records.md: the records at the laptop preset, their mean and range over seeds."""
    frame = records("laptop")
    rows = []
    for name, group in frame[frame["status"].isin(RESULTS)].groupby("experiment", sort=False):
        sinks = [_range(group[column]) for column in ("sink_1", "sink_star", "valid_loss")]
        rows.append([str(name), str(group["item"].iloc[0]), str(len(group)), *sinks])
    columns = ["experiment", "paper's item", "seeds", "Sink_1 %", "Sink_* %", "valid loss"]
    return page("# The records at `laptop`", state_part().partition(" Each")[0], markdown(columns, rows))


def training_part() -> str:
    """Training speed beside the peer, from the last benchmark."""
    path = BENCHMARKS / "training.json"
    if not path.exists():
        return "(not measured yet)"
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        [
            f"d {row['d']}, L {row['layers']}, C {row['context']}",
            row["who"],
            f"{row['tokens_per_second']:,}",
            f"{row['times_llama']:.2f}",
            f"{100 * row['share_of_matmul_peak']:.0f} %",
        ]
        for row in data["rows"]
    ]
    return markdown(["shape", "who", "tokens/s", "times llama", "of the matmul peak of its precision"], rows)


def measure_part() -> str:
    """What measuring costs beside a plain forward pass and the published procedure, from the last benchmark."""
    path = BENCHMARKS / "measure.json"
    if not path.exists():
        return "(not measured yet)"
    cells = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for cell in cells:
        beside = next(
            (
                c
                for c in cells
                if c["way"] == "forward" and c["samples"] == cell["samples"] and c["length"] == cell["length"]
            ),
            None,
        )
        ratios = ["", ""]
        if beside is not None:
            ratios = [f"{cell[key] / beside[key]:.2f}" for key in ("seconds", "peak_gib")]
        size = f"{cell['samples']} x {cell['length']}"
        rows.append(
            [size, cell["way"], f"{cell['seconds']:.1f} s", ratios[0], f"{cell['peak_gib']:.2f} GiB", ratios[1]]
        )
    return markdown(["texts x T", "way", "time", "times forward", "peak memory", "times forward"], rows)


def attention_part() -> str:
    """A training step of each attention operation beside softmax's, from the last benchmark."""
    path = BENCHMARKS / "attention_ops.json"
    if not path.exists():
        return "(not measured yet)"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    cells = [[row["operation"], f"{row['times_softmax']:.1f}", f"{row['memory_times_softmax']:.2f}"] for row in rows]
    return markdown(["operation", "time, times softmax", "memory, times softmax"], cells)


def reliability_part() -> str:
    """Kills, damage and random inputs, counted by the last benchmark, and what a second worker gains."""
    path = BENCHMARKS / "reliability.json"
    if not path.exists():
        return "(not measured yet)"
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    if "kills" in data:
        kills = data["kills"]
        hit = ", ".join(f"{what} {n}" for what, n in sorted(kills["hit"].items()))
        rows.append([f"sweeps of two workers killed at random instants ({hit})", f"{kills['kills']}",
                     f"all {kills['records']} records there, whole, and equal to an unbroken sweep's"])  # fmt: skip
    if "twice" in data:
        twice = data["twice"]
        rows.append(["runs of two sweeps started at once", f"{twice['runs']}", f"{twice['trained_once']} trained once"])
    if "damage" in data:
        damage = data["damage"]
        wrong = f"{damage['missed']} not noticed, {damage['unnamed']} without the file's name"
        rows.append([f"each byte flipped in each of the {damage['files']} files of a record, each length cut to",
                     f"{damage['flipped'] + damage['cut']:,}", wrong])  # fmt: skip
    for what, counts in data.get("inputs", {}).items():
        right, refused = counts.get("answered", 0), counts.get("refused", 0)
        rows.append([f"random inputs: {what}", f"{right + refused:,}",
                     f"{right:,} right, {refused:,} refused by a ValueError that names the argument"])  # fmt: skip
    if "efficiency" in data:
        gain = data["efficiency"]
        rows.append([f"two workers beside one, {gain['runs']} runs at `{gain['preset']}`", "1",
                     f"efficiency {gain['efficiency']:.2f}"])  # fmt: skip
    return markdown(["what", "times", "outcome"], rows)


PAGES = {"ledger": ledger_page, "records": records_page}  # of docs/
PARTS: dict[str, Callable[[], str]] = {
    "claims": claims_part,
    "state": state_part,
    "training": training_part,
    "measure": measure_part,
    "attention": attention_part,
    "reliability": reliability_part,
}


def render(text: str) -> str:
    """README's text with every generated part made anew."""
    for name, make in PARTS.items():
        pattern = re.compile(f"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no part between '<!-- begin {name} -->' and '<!-- end {name} -->'")
        made = make() + "\n"
        text = pattern.sub(lambda match, made=made: match[1] + made + match[2], text)  # type: ignore[misc]
    return text


def page(*parts: str) -> str:
    """A page of docs/, its parts a line apart."""
    return "\n\n".join(["<!-- written by python -m sinkutils readme -->", *(part.strip() for part in parts)]) + "\n"


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    cells = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in cells)


def _range(column) -> str:
    values = column.dropna()
    if values.empty:
        return ""
    mean = f"{values.mean():.2f}"
    return mean if len(values) == 1 else f"{mean} ({values.min():.2f} to {values.max():.2f})"


def write() -> None:
    """Write README.md's generated parts and the generated pages of docs/ anew. Raises OSError outside a checkout."""
    readme = ROOT / "README.md"
    text = render(readme.read_text(encoding="utf-8"))
    readme.write_text(text, encoding="utf-8")
    for name, make in PAGES.items():
        (ROOT / "docs" / f"{name}.md").write_text(make(), encoding="utf-8")
