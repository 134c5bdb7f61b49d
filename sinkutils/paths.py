"""All folders that the package uses, and how files in them are read and written.

In a checkout of the repository, these are the checkout's own folders. An installed package brings
the paper's numbers and the claims with it. It writes its results below $SINKUTILS_HOME or, if that
is not set, below the current folder. Nothing is ever written into site-packages.
"""

import contextlib
import csv
import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from sinkutils.checks import Refused, first_line

# CSafeLoader is ten times as fast, and exists only where libyaml is installed.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
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
    """The contents of a YAML file."""
    return yaml.load(path.read_text(encoding="utf-8"), LOADER)


class Strict(LOADER):  # type: ignore[misc, valid-type]
    """Reads 1e-3 as a number, and refuses a key that stands twice, of which YAML takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{key!r} stands twice in one place")
        return super().construct_mapping(node, deep)


Strict.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_own_yaml(path: str | Path) -> Any:
    """The contents of a user's YAML file. Raises ValueError, on one line, if it is none."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Strict)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"{path} is no YAML: {first_line(error)}") from error


@lru_cache
def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, as a dict from column to text."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_synced(path: Path, data: bytes | Callable[[BinaryIO], None]) -> None:
    """Write a new file and wait until it is on disk.

    data: the contents, or a function that writes them. Raises FileExistsError if there is anything
    of that name already, a link included.
    """
    with open(path, "xb") as file:
        if callable(data):
            data(file)
        else:
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replaceable(path: Path) -> Path:
    """The path that writing to `path` replaces: the target, if `path` is a link.

    Raises OSError if it exists and is not a regular file, but a device for instance.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(f"{path} is no regular file, and is not replaced: give another")
    return target


def replace_file(path: Path, data: bytes | Callable[[BinaryIO], None]) -> None:
    """Write a file completely or not at all: an old version stays until the new one is on disk.

    data: the contents, or a function that writes them. They are first written to a file of a name
    that nobody can guess.
    """
    path = replaceable(path)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except OSError as error:
        raise not_saved(path.name, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def standing(folder: Path) -> Path:
    """The folder of a record or, if it is not there, the old one that stands beside it.

    A process that dies while it replaces a record may leave the old one only (`study.record`).
    """
    old = folder.with_name(f".{folder.name}.old")
    return old if old.is_dir() and not os.path.lexists(folder) else folder


def sync_folder(path: Path) -> None:
    """Wait until the folder's own entries (new and renamed files) are on disk."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def not_saved(what: str, error: OSError) -> OSError:
    """The same error, with a message that says what to do about it."""
    return OSError(
        error.errno,
        f"could not save {what} ({error.strerror or error}): free some space or mend that, and run "
        "the same command again; what was saved before is intact",
    )


def cache_root() -> Path:
    """The cache folder: $SINKUTILS_CACHE, else sinkutils below $XDG_CACHE_HOME or ~/.cache."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    own = os.environ.get("SINKUTILS_CACHE")
    return Path(own) if own else Path(user_cache, "sinkutils")


@contextlib.contextmanager
def written_whole(
    folder: Path, what: str, is_whole: Callable[[Path], bool] = Path.exists
) -> Iterator[Path]:
    """A context manager that writes a folder as a whole or not at all.

    The body of the `with` statement fills a temporary folder, which is renamed to `folder` if the
    body ends without an error. When several processes build the same folder at the same time, each
    fills its own, and the first to finish wins. A folder of that name is replaced if it is damaged.

    what: the contents, as an error message calls them.
    is_whole: whether a folder is undamaged.
    Raises OSError with advice if there is no room or no permission.
    """
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=".build-", dir=root, ignore_cleanup_errors=True
        ) as scratch:
            new = Path(scratch, "whole")
            new.mkdir()
            yield new
            if os.path.lexists(folder) and not is_whole(folder):
                folder.rename(Path(scratch, "damaged"))
            if not folder.exists():
                new.rename(folder)
    except OSError as error:
        if error.errno is None:  # our own error, such as that the hub cannot be reached
            raise
        # The error may concern the cache or a file of text. In the second case it names the file.
        reason = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        raise OSError(
            error.errno,
            f"no {what} were written below {root} ({reason}): where that folder is the reason, "
            "make room there or set SINKUTILS_CACHE",
        ) from error


class Hashed:
    """A file to write to, and the SHA-256 of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()
