"""docs/records.md: what every experiment came to, where attention goes without a sink, what the study takes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from statistics import median

import pandas as pd

from sinkutils.ledger.results import EPSILON, EPSILONS, Results, Run, excess, results, sink
from sinkutils.ledger.rules import HOLDS, SINK, Check, judge
from sinkutils.paths import BENCHMARKS
from sinkutils.showing import names, tables
from sinkutils.showing.comparisons import DESTINATIONS
from sinkutils.showing.pages import markdown, written
from sinkutils.showing.tables import parameters
from sinkutils.study.config import RunConfig
from sinkutils.study.experiments import experiment
from sinkutils.study.grid import config
from sinkutils.study.presets import PRESETS
from sinkutils.study.record import RECIPE, Record
from sinkutils.study.store import Runs

PRESET = "laptop"  # of the study
OTHERS = tuple(name for name in PRESETS if name not in (PRESET, "smoke"))
NUMBERS = ("excess of α₁", "Sink₁ %", "at ε = 0.2 / 0.4", "Sink∗ %", "validation loss")


def recorded(preset: str) -> dict[str, list[Record]]:
    """The records of a preset that are results, by experiment: what is done or failed."""
    by_name: dict[str, list[Record]] = {}
    for entry in Runs().entries(preset):
        if entry.record is not None and entry.status in ("done", "failed"):
            by_name.setdefault(entry.experiment, []).append(entry.record)
    return by_name


def page() -> str:
    """The whole page."""
    about = (
        "Means over seeds, in brackets the least and the most. T: the length of the texts that a model was measured "
        "on. The excess of α₁ is what the ledger judges by; Sink₁ counts heads above ε = 0.3, beside it at two other ε."
    )
    parts = ["# The records", f"## The study, at `{PRESET}`", state_of_study(), made_on(), about, table(PRESET)]
    parts += ["## Where the attention goes instead", *instead(), "## What the study takes", minutes(), hours()]
    parts += [
        part for preset in OTHERS if recorded(preset) for part in (f"## At `{preset}`", at(preset), table(preset))
    ]
    return written(*parts)


def state() -> str:
    """What is recorded, of the study and of the other scales, and what is missing."""
    others = []
    for preset in OTHERS:
        runs = [f"{_seeds(len(kept))} of {names.title(name)}" for name, kept in recorded(preset).items()]
        others += [f"At `{preset}`: {'; '.join(runs)}."] if runs else []
    return " ".join([state_of_study(), *others])


def state_of_study() -> str:
    """Which experiments of the study are recorded, and what is missing."""
    by_name, lacking = recorded(PRESET), len(Runs().missing(PRESET))
    runs = f"{sum(map(len, by_name.values()))} runs of {len(by_name)} experiments"
    if not lacking:
        return f"All of the study at `{PRESET}` is recorded: {runs}, recipe {RECIPE}."
    rest = f"{lacking} runs are missing, and what has fewer than three seeds has no verdict."
    return f"Recorded at `{PRESET}` so far: {runs}, recipe {RECIPE}. {rest}"


def at(preset: str) -> str:
    """Of a scale beside the study's: how large its base is, and what its runs took."""
    taken = [_seconds(record) / 3600 for kept in recorded(preset).values() for record in kept]
    size = parameters(config("base", preset)) / 1e6
    least, most = f"{min(taken):.1f}", f"{max(taken):.1f}"
    return (
        f"Another scale than the study's: models of {size:.1f}M parameters. A run took "
        f"{least if least == most else f'{least} to {most}'} hours. [Scaling out](scaling.md) says how they are made."
    )


def table(preset: str) -> str:
    """Every experiment of a preset, a row each."""
    rows = []
    for name, kept in recorded(preset).items():
        title = names.title(name) + " (the base)" * (names.of(name, preset) == "the base")
        length = config(name, preset).train.eval_length
        numbers = _numbers([Run(record) for record in kept])
        rows.append([title, experiment(name).item, str(len(kept)), str(length), *numbers])
    return markdown(["experiment", "paper's item", "seeds", "T", *NUMBERS], rows)


def _numbers(runs: Sequence[Run]) -> list[str]:
    """The cells of a row, NUMBERS."""
    finals = [pd.Series([run.final.get(key) for run in runs], dtype=float) for key in ("sink_star", "valid_loss")]
    sinks = pd.Series([run.final.get("sink_1") for run in runs], dtype=float)
    beside = [pd.Series([sink(run, 1, eps) for run in runs], dtype=float).mean() for eps in EPSILONS if eps != EPSILON]
    others = "" if any(map(pd.isna, beside)) else " / ".join(f"{mean:.2f}" for mean in beside)
    return [_range(pd.Series(map(excess, runs), dtype=float), 3), _range(sinks), others, *map(_range, finals)]


def made_on() -> str:
    """On which kinds of machine the records were made: their last digits differ."""
    made = Counter(_made_with(record) for kept in recorded(PRESET).values() for record in kept)
    said = ", ".join(f"{count} on machines with {kind}" for kind, count in made.most_common())
    return f"Made: {said or 'none yet'}; [how reliable](reliability.md) says what that changes."


def machine(instruction_set: Sequence[str]) -> str:
    """The kind of machine that has these instructions, by the newest that matrix products use."""
    if "amx_bf16" in instruction_set:
        return "AMX"
    return "AVX-512 but not AMX" if "avx512_f" in instruction_set else "neither AVX-512 nor AMX"


# --- where the attention goes -----------------------------------------------------------------------------------------


def instead() -> list[str]:
    """Of every run without a sink, beside the base: the shares of attention by kind of key, in percent, and what they
    leave out.
    """
    ours = results(PRESET)
    if not (gone := tables.without_sink(ours)):
        return ["No base is recorded that has a sink to go elsewhere."]
    base = ours.values("base", "excess_1").mean()
    shown = dict.fromkeys([ours.label("base"), *(["default"] if ours.seeds("default") else []), *gone])
    columns, rows = [words for words, _ in DESTINATIONS.values()], []
    for name in shown:
        shares = tables.destinations({name: ours.seeds(name)}).get(name, {})
        lost = 1 - sum(shares.values())
        cells = [f"{100 * shares[kind]:.1f}" if kind in shares else "" for kind in DESTINATIONS]
        cells.append(f"{100 * lost:.1f}" if shares and lost > 0.005 else "")
        rows.append([names.of(name, PRESET), _range(ours.values(name, "excess_1"), 3), *cells])
    about = (
        f"The base, then every run without a sink on x₁: with a mean excess of α₁ below {SINK * base:.3f}, the share "
        f"of the base's that the ledger asks of a sink ({100 * SINK:.0f} %). Share of all attention by kind of key in "
        "percent, mean over seeds, texts, heads and the queries from the third on. A key counts for the first kind "
        f"that fits, from left to right. {columns[0]}: a learned key, where there is one. No key: what rows lack of "
        "one. Where weights may be negative or do not sum to one, the shares are the metric's proxies."
    )
    open_ = [name for name in gone if judge(Check("absent", (name,)), ours, {}).state != HOLDS]
    unsure = f"Too few or too different seeds to tell whether it is gone: {_named(open_)}." if open_ else ""
    lines = [about, unsure, _of_fixed_tokens(ours, gone), _of_windows(ours, gone)]
    return [*filter(None, lines), markdown(["experiment", NUMBERS[0], *columns, "no key"], rows)]


def _of_fixed_tokens(ours: Results, gone: Sequence[str]) -> str:
    """Where the kinds of key put a fixed token behind the first position, and how much it gets."""
    cells = []
    for name in gone:
        place = config(name, PRESET).data.fixed_position or 1
        reports = [run.report for run in ours.seeds(name).values() if place in run.report.get("targets", ())]
        if place > 1 and reports:
            maps = [pd.DataFrame(report["alpha"][report["targets"].index(place)]).stack() for report in reports]
            alpha = names.human(f"alpha_{place}")
            cells.append(f"{alpha} = {100 * pd.concat(maps).mean():.1f} % with {names.of(name, PRESET)}")
    if not cells:
        return ""
    kinds = [f"“{DESTINATIONS[kind][0]}”" for kind in ("rest", "self", "previous")]
    where = f"for {kinds[0]}, but {kinds[1]} where it is the query and {kinds[2]} for the next query"
    return f"A fixed token behind the first position has no column: it counts {where}. It gets {'; '.join(cells)}."


def _of_windows(ours: Results, gone: Sequence[str]) -> str:
    """What windows leave of x_1 to the queries that see it, as the ledger asks."""
    seen = {name: ours.values(name, "visible_1") for name in gone if config(name, PRESET).model.attention.window}
    cells = [f"{names.of(name, PRESET)} {_number(values.mean(), 3)}" for name, values in seen.items() if len(values)]
    if not cells:
        return ""
    lengths = " and ".join(map(str, sorted({config(name, PRESET).train.eval_length for name in seen})))
    said = (
        f"Windows are measured on texts of {lengths} tokens, and most of their queries do not see x₁. The ledger asks"
    )
    return f"{said} for the excess over those that do: {'; '.join(cells)}."


def _named(experiments: Sequence[str]) -> str:
    return "; ".join(names.of(name, PRESET) for name in experiments)


# --- what it takes ----------------------------------------------------------------------------------------------------


def minutes() -> str:
    """How long a run of as many tokens as the base's takes, by kind of machine: medians of the records' own times."""
    base = _tokens(config("base", PRESET))
    taken: dict[str, list[float]] = {}
    for kept in recorded(PRESET).values():
        for record in kept:
            if _tokens_of(record) == base:
                taken.setdefault(_made_with(record), []).append(_seconds(record) / 60)
    if not taken:
        return "No run is recorded whose time could be told."
    kinds = sorted(taken.items(), key=lambda kind: -len(kind[1]))
    said = "; ".join(f"{median(times):.1f} on machines with {kind} ({len(times)} runs)" for kind, times in kinds)
    return (
        f"Minutes that a run of `{PRESET}` takes on one core, the median of those with as many tokens as the base: "
        f"{said}. Most ran beside another training. The base's compiled steps alone, on a quiet core with AMX, take "
        f"{base / base_rate() / 60:.1f} ([how fast](speed.md))."
    )


def hours() -> str:
    """Core-hours of the whole study: the records' own times, and an estimate for what is missing."""
    by_name, missing = recorded(PRESET), Runs().missing(PRESET)
    every = [record for kept in by_name.values() for record in kept]
    done = sum(map(_seconds, every)) / 3600
    if not missing:
        return f"All of the study took {done:.0f} core-hours, by the records of its {len(every)} runs."
    said = f"The {len(every)} recorded runs of the study took {done:.0f} core-hours"
    if not every:
        return f"{said}; how long the {len(missing)} that are missing take no record says."
    usual = Counter(map(_made_with, every)).most_common(1)[0][0]
    a_token = median(_seconds(record) / _tokens_of(record) for record in every if _made_with(record) == usual)
    rest = 0.0
    for run in missing:
        seeds = list(map(_seconds, by_name.get(run.experiment, ())))
        rest += (median(seeds) if seeds else a_token * _tokens(run)) / 3600
    return (
        f"{said}. The {len(missing)} that are missing take {rest:.0f} more by estimate, the whole study some "
        f"{done + rest:.0f}. A missing run counts as the median of its experiment's other seeds; where there is none, "
        f"by its tokens, at the median pace of the records made on machines with {usual}."
    )


def base_rate() -> int:
    """Tokens a second of the base's compiled step, by benchmarks/training.py."""
    base = config("base", PRESET).model
    step = (base.hidden_size, base.context_length, "ours compiled bf16")
    measured = json.loads((BENCHMARKS / "training.json").read_text(encoding="utf-8"))["rows"]
    return next(row["tokens_per_second"] for row in measured if (row["d"], row["context"], row["who"]) == step)


def _seconds(record: Record) -> float:
    return float(record.provenance["wall_seconds"])


def _made_with(record: Record) -> str:
    return machine(record.provenance["instruction_set"])


def _tokens(run: RunConfig) -> int:
    """How many a run trains on."""
    return run.train.steps * run.train.batch_size * run.model.context_length


def _tokens_of(record: Record) -> int:
    train = record.config["train"]
    return int(train["steps"] * train["batch_size"] * record.config["model"]["context_length"])


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def _range(values: pd.Series, digits: int = 2) -> str:
    """A mean, in brackets the least and the most."""
    known = values.dropna()
    if len(known) < 2:
        return "".join(_number(value, digits) for value in known)
    mean, low, high = (_number(value, digits) for value in (known.mean(), known.min(), known.max()))
    return f"{mean} ({low} to {high})"


def _number(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "\N{MINUS SIGN}")
