"""The command line: python -m sinkutils COMMAND. What the commands do is in `commands`."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from io import TextIOWrapper

from sinkutils.commands import WRONG, parser

# Exit statuses; a sweep knows LOCKED of its workers, and their messages by how they begin.
LOCKED, INTERRUPTED, BROKEN_PIPE, TERMINATED = 3, 130, 141, 143
# What a user can mend is said in one line. The names are of errors whose modules load PyTorch.
EXPECTED = (ValueError, OSError, ImportError, MemoryError)
EXPECTED_NAMES = ("CorruptRecord", "RunLocked", "OutOfMemoryError")


class Terminated(KeyboardInterrupt):
    """The process was sent TERM, as by kill, timeout, Slurm or a container that is stopped."""


def terminated(number: int, frame: object) -> None:
    raise Terminated


def say(message: str) -> None:
    print(f"sinkutils: {message}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    It is 0, 2 for an error in one line, 3 for a run that another process trains, and 130 (INT) or
    143 (TERM) of a process that is told to stop, as shells have it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? instead
    options = parser().parse_args(arguments)
    before = signal.signal(signal.SIGTERM, terminated)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_: say(str(message))
            status = options.function(options)
            sys.stdout.flush()
            return status or 0
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt as stop:
        goes_on = options.command in ("train", "sweep")
        say("stopped; run the same command again to go on" if goes_on else "stopped")
        return TERMINATED if isinstance(stop, Terminated) else INTERRUPTED
    except Exception as error:
        kind = type(error).__name__
        if not isinstance(error, EXPECTED) and kind not in EXPECTED_NAMES:
            raise
        message = " ".join(str(error).split()) or kind
        if kind == "ModuleNotFoundError":
            message += "; an extra brings it: sinkutils[notebooks], [hub], [models] or [slurm]"
        say(message)
        return LOCKED if kind == "RunLocked" else WRONG
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
