"""What the scripts share: the option --json, the rows of a table, seconds of a piece of work, the matmul peak."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # two_installs.py runs where there is no torch
    import torch

ROOT = Path(__file__).resolve().parent.parent


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of a script, --json among them, under its docstring as it is written."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, help="also write the numbers to this file")
    return made


def keep(file: Path | None, numbers: Any) -> None:
    """Write the numbers where --json said, if it did."""
    if file:
        file.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def show(row: dict[str, Any]) -> None:
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def seconds(
    work: Callable[[], Any],
    repeats: int = 1,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Mean seconds of `work` over `repeats` calls, with the device's queue emptied before and after."""
    import torch

    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    wait()
    start = clock()
    for _ in range(repeats):
        work()
    wait()
    return (clock() - start) / repeats


def matmul_peak(dtype: torch.dtype, device: torch.device | str = "cpu") -> float:
    """The best rate of a large matmul here, in FLOP/s."""
    import torch

    size, repeats = (8192, 30) if torch.device(device).type == "cuda" else (2048, 3)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds(lambda: a @ b, repeats, device)  # warms up
    return 2 * size**3 / min(seconds(lambda: a @ b, repeats, device) for _ in range(3))
