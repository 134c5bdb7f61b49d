"""What comes back from a lent GPU: eight files of 16 MiB at most, so that everything goes into a few tar archives.

FOLDER/files-0.tar is filled, then files-1.tar and so on. Several processes may add at once. What was added before a
kill can be read: `tar xf` gives all but a file that was being added. The four other files are log.txt, curves.jsonl,
results.jsonl and gpu.json.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from filelock import FileLock

ARCHIVES = 4
LARGEST = 16 * 2**20
HEADER = 2 * tarfile.BLOCKSIZE  # of a file inside, and what rounds it up
END = tarfile.RECORDSIZE  # to which an archive is filled up


def add(out: Path, root: Path, files: list[Path]) -> None:
    """Add files below `root` to the archives in `out`; those that find no room are named and left out."""
    archives = [out / f"files-{number}.tar" for number in range(ARCHIVES)]
    with FileLock("/tmp/card-out.lock"):
        for path in files:
            name = str(path.relative_to(root))
            if not any(added(archive, path, name) for archive in archives):
                print(f"no room for {name}, {path.stat().st_size} bytes", flush=True)


def added(archive: Path, path: Path, name: str) -> bool:
    """Add a file to an archive if that stays small enough, and if no kill has left its end broken."""
    size = archive.stat().st_size if archive.exists() else 0
    if size + path.stat().st_size + HEADER + END > LARGEST:
        return False
    try:
        with tarfile.open(archive, "a") as tar:
            tar.add(path, name)
    except tarfile.ReadError:
        return False
    return True
