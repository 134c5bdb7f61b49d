"""Files that are whole or not there: written, synced and then renamed, also where a disk is full or
a process dies.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from pathlib import Path


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    if os.name == "nt":  # Windows opens no folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def not_saved(what: str, error: OSError) -> OSError:
    """The error with what to do about it."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "free some space" if full else "mend that"
    return OSError(
        error.errno,
        f"could not save {what} ({error.strerror or error}): {advice} and run the same command "
        "again; what was saved before is intact",
    )


def beside(target: Path, kind: str) -> Path:
    """The hidden folder beside `target` in which its successor ("tmp") or predecessor ("old")
    stands for a moment.
    """
    return target.with_name(f".{target.name}.{kind}")


def put_in_place(new: Path, target: Path) -> None:
    """Give the folder `new` the name of `target`.

    At every moment the old one is on disk or the new one is.
    """
    if target.exists():
        os.replace(target, beside(target, "old"))
    os.replace(new, target)
    sync_folder(target.parent)


def remove(folder: Path, files: Collection[str]) -> None:
    """Delete a folder that holds nothing but some of these files.

    Raises OSError for one that holds others.
    """
    if not folder.exists():
        return
    for name in files:
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def set_aside(folder: Path, target: Path) -> Path:
    """Give a folder the first free of the names <target>.damaged, <target>.damaged-2, ..; returns
    where it is.
    """
    place = target.with_name(f"{target.name}.damaged")
    number = 1
    while place.exists():
        number += 1
        place = target.with_name(f"{target.name}.damaged-{number}")
    os.replace(folder, place)
    return place
