"""The command line, python -m sinkutils COMMAND: see `commands`."""

import sys

from sinkutils.commands import main

if __name__ == "__main__":
    sys.exit(main())
