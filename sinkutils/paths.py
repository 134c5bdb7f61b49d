"""Where things are: the one place that knows the folders of a checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAPER = ROOT / "data" / "paper"
RUNS = ROOT / "data" / "runs"
OPEN_LMS = ROOT / "data" / "open_lms"
MEASUREMENTS = ROOT / "data" / "measurements"
FIGURES = ROOT / "figures"
NOTEBOOKS = ROOT / "notebooks"
BENCHMARKS = ROOT / "benchmarks" / "results"
