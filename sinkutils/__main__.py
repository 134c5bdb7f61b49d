"""The command line: python -m sinkutils COMMAND. What the commands do is in `commands`."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from io import TextIOWrapper

from sinkutils.commands import WRONG, parser

LOCKED, INTERRUPTED, BROKEN_PIPE, TERMINATED = 3, 130, 141, 143  # exit statuses
# What a user can mend is said in one line. The names are of errors whose modules load PyTorch.
EXPECTED = (ValueError, OSError, ImportError, MemoryError)
BY_NAME = ("CorruptRecord", "RunLocked", "OutOfMemoryError")


class Terminated(KeyboardInterrupt):
    """The process was sent TERM, as by kill, timeout, Slurm or a container that is stopped."""


def terminated(number: int, frame: object) -> None:
    raise Terminated


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for an error in one line, 3 for a run trained elsewhere.

    Of a process that is told to stop it is 130 (INT) or 143 (TERM), as shells have it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, TextIOWrapper
        ):  # a terminal without UTF-8 shows ? for what it cannot show
            stream.reconfigure(errors="replace")
    options = parser().parse_args(arguments)
    before = signal.signal(signal.SIGTERM, terminated)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_: print(
                f"sinkutils: {message}", file=sys.stderr
            )
            status = options.function(options)
            sys.stdout.flush()
            return status or 0
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt as stop:
        goes_on = options.command in ("train", "sweep")
        print(
            "sinkutils: stopped" + goes_on * "; run the same command again to go on",
            file=sys.stderr,
        )
        return TERMINATED if isinstance(stop, Terminated) else INTERRUPTED
    except Exception as error:
        kind = type(error).__name__
        if not isinstance(error, EXPECTED) and kind not in BY_NAME:
            raise
        extra = (
            "; an extra brings it, such as sinkutils[notebooks] or [hub]"
            if kind == "ModuleNotFoundError"
            else ""
        )
        print("sinkutils:", (" ".join(str(error).split()) or kind) + extra, file=sys.stderr)
        return LOCKED if kind == "RunLocked" else WRONG
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
