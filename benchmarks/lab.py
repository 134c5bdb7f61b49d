"""How long the lab takes: to its first map, for 64 tokens by each of its models, and to grow one.

    taskset -c 0 .venv-book/bin/python benchmarks/lab.py --json benchmarks/results/lab.json

In headless Chromium, on one core. Five new browsers open the page: the first map was recorded, and
the live one takes its place. Of the passes, from the page's
request to the worker's answer, twenty warm up and a hundred count. A model grows for 100 steps.
"""

from __future__ import annotations

import json
import os
import statistics
import sys

from bench import ROOT, keep, parser, show

sys.path.insert(0, str(ROOT / "tests" / "end_to_end"))
from browser import chromium
from selenium.webdriver.support.wait import WebDriverWait

PAGE = (ROOT / "docs" / "lab" / "index.html").as_uri()
FIRST_MAPS = """
    { // a block: the page has a `look` of its own
        const look = (now) => {
            if (document.querySelector("#map svg")) window.firstMap ??= now;
            if (window.started && results.edited) window.liveMap ??= now;
            if (!window.liveMap) requestAnimationFrame(look);
        };
        requestAnimationFrame(look);
    }
"""
PASSES = """
    const [warm, passes, done] = arguments;
    const milliseconds = {};
    state.text = DATA.samples.join(" ");
    (async () => {
        for (const name of NAMES.filter((one) => one in DATA.models)) {
            milliseconds[name] = [];
            for (let i = 0; i < warm + passes; i++) {
                const start = performance.now();
                const { labels } = await pass(name, UNTOUCHED);
                if (labels.length !== CONTEXT) throw new Error("a text of fewer tokens");
                if (i >= warm) milliseconds[name].push(performance.now() - start);
            }
        }
    })().catch(String).then((error) => done(JSON.stringify(error ?? milliseconds)));
"""
GROWTH = """
    const [steps, done] = arguments;
    startGrowth(true);
    const look = () => growth.steps >= steps
        ? done(growth.steps / growth.seconds) : setTimeout(look, 100);
    look();
"""


def main() -> None:
    args = parser(__doc__).parse_args()
    load = os.getloadavg()[0]
    opened, rows = [], []
    for _ in range(5):
        with chromium() as driver:
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": FIRST_MAPS})
            driver.get(PAGE)
            wait = WebDriverWait(driver, 60)
            wait.until(lambda page: page.execute_script("return window.liveMap"))
            opened.append(driver.execute_script("return [firstMap, liveMap]"))
    with chromium() as driver:
        driver.get(PAGE)
        milliseconds = json.loads(driver.execute_async_script(PASSES, 20, 100))
        steps = driver.execute_async_script(GROWTH, 100)
    for model, times in milliseconds.items():
        median, last = statistics.median(times), statistics.quantiles(times, n=20)[-1]
        rows.append({"model": model, "median_ms": round(median), "95_percent_ms": round(last)})
        show(rows[-1])
    first, live = (round(statistics.median(times)) for times in zip(*opened, strict=True))
    whole = {"first_map_ms": first, "live_map_ms": live, "steps_a_second": round(steps)}
    show(whole)
    load = [round(load, 1), round(os.getloadavg()[0], 1)]
    cores = len(os.sched_getaffinity(0))
    keep(args.json, {"cores": cores, "load": load, **whole, "models": rows})


if __name__ == "__main__":
    main()
