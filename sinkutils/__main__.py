"""The command line: python -m sinkutils COMMAND. What the commands do is in `commands`."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Sequence

from sinkutils import __version__, missing

COMMANDS = ("list", "train", "sweep", "measure", "report", "models", "claims", "run")
WRONG, LOCKED, INTERRUPTED, BROKEN_PIPE = 2, 3, 130, 141  # exit statuses


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for an error in one line, 3 for a run trained elsewhere."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? for what it cannot show
    if given == ["--version"]:
        print(f"sinkutils {__version__}")
        return 0
    if not given or (given[0] not in COMMANDS and not given[0].startswith("-")):
        return _unknown(given[0] if given else None)
    # Only here, as PyTorch takes seconds to load.
    from sinkutils.commands import parser
    from sinkutils.study.record import CorruptRecord, RunLocked

    options = parser().parse_args(given)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_: print(f"sinkutils: {message}", file=sys.stderr)
            status = options.function(options)
            sys.stdout.flush()
            return status or 0
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except RunLocked as error:
        print(f"sinkutils: {error}", file=sys.stderr)
        return LOCKED
    except ModuleNotFoundError as error:
        print(f"sinkutils: {missing(error, 'this command')}", file=sys.stderr)
        return WRONG
    except (ValueError, OSError, ImportError, CorruptRecord, MemoryError) as error:
        print("sinkutils:", " ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return WRONG
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, whose import this module does without
            raise
        print(f"sinkutils: the device is out of memory: {str(error).splitlines()[0]}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("sinkutils: stopped; run the same command again to go on", file=sys.stderr)
        return INTERRUPTED


def _unknown(command: str | None) -> int:
    close = difflib.get_close_matches(command or "", COMMANDS, n=1)
    what = f"there is no command {command!r}" if command else "give a command"
    hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(COMMANDS)}"
    print(f"sinkutils: {what}: {hint} (python -m sinkutils --help)", file=sys.stderr)
    return WRONG


if __name__ == "__main__":
    sys.exit(main())
