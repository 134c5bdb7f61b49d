"""How long the lab takes: 64 tokens by each of its models, from the page's request to the worker's answer.

    taskset -c 0 .venv-book/bin/python benchmarks/lab.py --json benchmarks/results/lab.json

In headless Chromium, on one core. Twenty passes warm up, and a hundred count.
"""

from __future__ import annotations

import json
import os
import statistics
import sys

from bench import ROOT, keep, parser, show

sys.path.insert(0, str(ROOT / "tests" / "end_to_end"))
from browser import chromium

PASSES = """
    const [warm, passes, done] = arguments;
    const tokens = TOKENIZER.encode(DATA.samples.join(" "));
    const milliseconds = {};
    (async () => {
        for (const name of NAMES.filter((one) => one in DATA.models)) {
            milliseconds[name] = [];
            for (let i = 0; i < warm + passes; i++) {
                const start = performance.now();
                const { labels } = await pass(name, tokens, UNTOUCHED);
                if (labels.length !== CONTEXT) throw new Error("a text of fewer tokens");
                if (i >= warm) milliseconds[name].push(performance.now() - start);
            }
        }
    })().catch(String).then((error) => done(JSON.stringify(error ?? milliseconds)));
"""


def main() -> None:
    args = parser(__doc__).parse_args()
    load = os.getloadavg()[0]
    with chromium() as driver:
        driver.get((ROOT / "docs" / "lab" / "index.html").as_uri())
        milliseconds = json.loads(driver.execute_async_script(PASSES, 20, 100))
    rows = []
    for model, times in milliseconds.items():
        median, last = statistics.median(times), statistics.quantiles(times, n=20)[-1]
        rows.append({"model": model, "median_ms": round(median), "95_percent_ms": round(last)})
        show(rows[-1])
    load = [round(load, 1), round(os.getloadavg()[0], 1)]
    keep(args.json, {"cores": len(os.sched_getaffinity(0)), "load": load, "models": rows})


if __name__ == "__main__":
    main()
