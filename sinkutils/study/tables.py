"""What a table needs of each record of a preset, and a copy of that in the cache.

To read and check 600 records takes seconds. So the values that a table is made of are copied to the
cache, each with the names, sizes and times of its record's files. If any of these changes, the
record is read and checked again. The records alone count: a copy may be deleted at any time, and
one that is damaged, or was made by other code, is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sinkutils import paths
from sinkutils.study.config import Json
from sinkutils.study.record import CorruptRecord, Record, read_record, seed_of

Of = Callable[[Record], Any]  # the value of an intact record, which JSON can hold
SEED = re.compile(r"(0|[1-9][0-9]*)|\.(0|[1-9][0-9]*)\.old")  # the folder of a record
FEW = 20  # so many records are read fast enough without a copy
# A file that changes twice within a tick of the disk's clock keeps its time. So a record whose files
# are younger than this, in seconds, is not copied yet.
SETTLED = 2.0


class Entry(NamedTuple):
    """A record as a table has it. reason: why its status is not "done", or None."""

    experiment: str
    seed: int
    status: str
    reason: str | None
    config: Json  # empty for a corrupt record
    value: Any
    digest: str  # of its metrics.json, if it has a curve; else ""


def entries_of(preset: Path, of: Of | None = None) -> list[Entry]:
    """The records in the folder of a preset, sorted by experiment and seed. None of them is stale.

    of: gives the value of a record that is intact. It must be a function of a module, since the
    copy has its name. If it raises `CorruptRecord`, the record has the status "corrupt".
    """
    folders = _folders(preset)
    if len(folders) < FEW:
        return [_entry(folder, of) for folder in folders]
    what = f"{of.__module__}.{of.__name__}" if of else ""
    place = hashlib.sha256(f"{preset.absolute()} {what}".encode()).hexdigest()[:16]
    file = paths.cache_root() / "tables" / f"{preset.name}-{place}.json"
    copy = _read(file)
    entries = []
    settled = {}
    now = time.time_ns()
    for folder in folders:
        name = f"{folder.parent.name}/{folder.name}"
        stamp = _stamp(folder)
        known = copy.get(name)
        entry = Entry(*known[1]) if known and known[0] == stamp else _entry(folder, of)
        entries.append(entry)
        if now - max(max(times) for _, _, *times in stamp) > SETTLED * 1e9:
            settled[name] = [stamp, [*entry]]
    if settled != copy:
        _write(file, settled)
    return entries


def state_of(preset: Path) -> str:
    """A digest of the names, sizes and times of all files of the records of a preset."""
    stamps = [[str(folder), _stamp(folder)] for folder in _folders(preset)]
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()


def _folders(preset: Path) -> list[Path]:
    """The folders of the records in the folder of a preset, sorted by experiment and seed."""
    found = []
    for path in preset.glob("*/*"):
        if SEED.fullmatch(path.name):
            seed = seed_of(path)
            # A process that died while it replaced a record may have left the old one only.
            if path.name == str(seed) or not path.with_name(str(seed)).exists():
                found.append((path.parent.name, seed, path))
    return [path for _, _, path in sorted(found)]


def _stamp(folder: Path) -> list[list[Any]]:
    """The name, size and times of each file of a record. The second time nobody can set."""
    stamp: list[list[Any]] = []
    with contextlib.suppress(OSError):  # reading the record will raise it again
        for file in os.scandir(folder):
            status = file.stat(follow_symlinks=False)  # a link to nowhere has one too
            times = [status.st_mtime_ns, status.st_ctime_ns]
            stamp.append([file.name, status.st_size, *times])
    return sorted(stamp) or [["", 0, time.time_ns()]]


def _entry(folder: Path, of: Of | None) -> Entry:
    try:
        record = read_record(folder)
        value = of(record) if of else None
        digest = record.digests["metrics.json"] if record.metrics["curve"] else ""
        result = (record.status, record.reason, record.config, value, digest)
    except CorruptRecord as error:
        result = ("corrupt", str(error), {}, None, "")
    return Entry(folder.parent.name, seed_of(folder), *result)


def _read(file: Path) -> Json:
    """The stamp and the entry of each record, by name; empty if the copy cannot be used."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        digest, _, data = file.read_bytes().partition(b"\n")
        if digest.decode() == hashlib.sha256(data).hexdigest():
            copy = json.loads(data)
            if copy["code"] == _code():
                records: Json = copy["records"]
                return records
    return {}


def _write(file: Path, records: Json) -> None:
    data = json.dumps({"code": _code(), "records": records}).encode()
    digest = hashlib.sha256(data).hexdigest().encode()
    with contextlib.suppress(OSError):  # without a copy, the records are read again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        paths.replace_file(file, digest + b"\n" + data)


@cache
def _code() -> str:
    """A digest of this package's code, which decides what an entry is."""
    whole = hashlib.sha256()
    for file in sorted(paths.PACKAGE.rglob("*.py")):
        whole.update(file.read_bytes())
    return whole.hexdigest()
