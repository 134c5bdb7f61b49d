"""Where things are: the one place that knows the folders.

In a checkout they are the checkout's. Elsewhere (an installed package) the paper's numbers and the claims come with the
package, and what is made goes below $SINKUTILS_HOME, or else below the folder in which Python was started, never into
site-packages.
"""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").is_file() else None
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
