"""The command line, python -m sinkutils COMMAND. The commands themselves are in `commands`.

This module runs a command and turns its errors and interrupts into exit statuses.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from io import TextIOWrapper

from sinkutils.checks import Refused, launched
from sinkutils.commands import WRONG, parser

# Exit statuses.
LOCKED, INTERRUPTED, BROKEN_PIPE, TERMINATED = 3, 130, 141, 143
# Errors that the user can correct are printed in one line, without a traceback. Any other error may
# be a mistake of ours. Some are listed by name, because importing their classes would load PyTorch.
EXPECTED = (Refused, OSError, ImportError, MemoryError)
EXPECTED_NAMES = ("CorruptRecord", "RunLocked", "OutOfMemoryError")


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM: from kill, timeout, Slurm or a container that is stopped."""


def terminated(number: int, frame: object) -> None:
    raise Terminated


def say(message: str) -> None:
    """Print a message to stderr."""
    print(f"sinkutils: {message}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: success. 1: the command ran, and something in it failed (a run, a notebook). 2: an error that
    is reported in one line. 3: another process is training this run. 130 and 143: the process was
    stopped by SIGINT or SIGTERM. 141: whoever read the output closed the pipe.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?"
    options = parser().parse_args(arguments)
    rank, _ = launched()
    before = signal.signal(signal.SIGTERM, terminated)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_: say(str(message))
            status = options.function(options)
            sys.stdout.flush()
            return status or 0
    except BrokenPipeError:  # the reader of our output, such as head, has closed the pipe
        # Python flushes stdout again at exit, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt as stop:
        goes_on = options.command in ("train", "sweep")
        if rank == 0:
            say("stopped; run the same command again to go on" if goes_on else "stopped")
        return TERMINATED if isinstance(stop, Terminated) else INTERRUPTED
    except Exception as error:
        kind = type(error).__name__
        expected = isinstance(error, EXPECTED) or kind in EXPECTED_NAMES
        if options.debug or not expected:
            raise
        message = " ".join(str(error).split()) or kind
        if kind == "ModuleNotFoundError":
            message += "; an extra brings it: sinkutils[notebooks], [hub], [models] or [slurm]"
        if rank == 0 or not isinstance(error, Refused):  # all processes refuse the same input
            say(message)
        return LOCKED if kind == "RunLocked" else WRONG
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
