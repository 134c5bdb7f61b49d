"""How often the ledger's 95 % intervals cover the truth: python benchmarks/interval_coverage.py

Made-up studies: a base of six seeds and a hundred settings of three, none with an effect, whose own spreads differ as
those of the records do. All differences are paired with the same base, whose spread counts in each of them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from sinkutils.ledger.readings import Readings
from sinkutils.study.grid import by_name, resolve

STUDIES, SETTINGS = 60, 100
MEDIAN_SPREAD, SPREAD_OF_SPREADS = (
    0.03,
    0.9,
)  # of the excess over seeds: standard deviation, and that of its logarithm
BASE_SPREAD = 0.03
SHARED = 0.2  # of the variance that a seed has in common


def main() -> None:
    """Print the coverage of levels and differences by tenth of the settings, from the quietest on."""
    draw = np.random.default_rng(0)
    base = resolve("base", "laptop")
    names = [e.name for e in by_name().values() if e.base and "laptop" in e.presets]
    names = [name for name in names if resolve(name, "laptop") == name != base][:SETTINGS]
    spreads = np.sort(MEDIAN_SPREAD * np.exp(draw.normal(0, SPREAD_OF_SPREADS, len(names))))
    covered = {kind: np.zeros(len(names)) for kind in ("level", "difference")}
    for _ in range(STUDIES):
        shared = draw.normal(size=6)

        def seeds(
            spread: float, count: int, shared: np.ndarray = shared
        ) -> dict[int, dict[str, float]]:
            own = draw.normal(size=count)
            values = spread * (np.sqrt(SHARED) * shared[:count] + np.sqrt(1 - SHARED) * own)
            return {seed: {"excess": value} for seed, value in enumerate(values)}

        runs = {name: seeds(spread, 3) for name, spread in zip(names, spreads, strict=True)}
        ours = Readings("laptop", {base: seeds(BASE_SPREAD, 6), **runs})
        for at, name in enumerate(names):
            found = (ours.estimate((name,), "excess"), ours.estimate((name, base), "excess"))
            for counts, estimate in zip(covered.values(), found, strict=True):
                counts[at] += estimate.low <= 0 <= estimate.high
    tenths = np.arange(len(names)) * 10 // len(names)
    table = (
        pd.DataFrame({kind: 100 * counts / STUDIES for kind, counts in covered.items()})
        .groupby(tenths)
        .mean()
    )
    table.insert(0, "spread", pd.Series(spreads).groupby(tenths).mean())
    print(table.round(3).to_string(header=True, float_format=lambda x: f"{x:.3g}"))
    means = ", ".join(
        f"{kind} {100 * counts.mean() / STUDIES:.1f}" for kind, counts in covered.items()
    )
    print(f"coverage in percent, all settings: {means}")


if __name__ == "__main__":
    main()
