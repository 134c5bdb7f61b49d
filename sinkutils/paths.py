"""Where things are, the one place that knows the folders, and how the tables there are read.

In a checkout they are the checkout's. Elsewhere (an installed package) the paper's numbers and the
claims come with the package, and what is made goes below $SINKUTILS_HOME, or else below the folder
in which Python was started, never into site-packages.
"""

import csv
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "data" / "claims.yaml").is_file() else None
HOME = Path(os.environ.get("SINKUTILS_HOME") or CHECKOUT or ".").resolve()
ROOT = CHECKOUT or HOME
DATA = CHECKOUT / "data" if HOME == CHECKOUT else HOME
RUNS = DATA / "runs"
PAPER = CHECKOUT / "data" / "paper" if CHECKOUT else PACKAGE / "paper_data"
LEDGER = CHECKOUT / "data" if CHECKOUT else PACKAGE / "ledger_data"  # claims, trials, packages
OPEN_LMS = ROOT / "data" / "open_lms"
FIGURES = ROOT / "figures"
RENDERED = HOME / "rendered"
NOTEBOOKS = ROOT / "notebooks"


def read_yaml(path: Path) -> Any:
    """What a YAML file holds."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
    return yaml.load(path.read_text(encoding="utf-8"), loader)


@lru_cache
def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
