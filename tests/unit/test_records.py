"""Records: written whole or not at all, every damaged byte is noticed and named, and tidy frames of them."""

import errno
import hashlib
import itertools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import warnings
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import DONE, END, interrupted, made_up, refused, refuses, word_tokenizer
from safetensors.torch import save

import sinkutils as su
from sinkutils import config, paths
from sinkutils.__main__ import main
from sinkutils.measuring.load import ModelUnavailable
from sinkutils.names import load_lm
from sinkutils.paths import replace_file
from sinkutils.study import record as records_module
from sinkutils.study import store, tables
from sinkutils.study.config import config_dict, config_hash, upgrade
from sinkutils.study.record import (
    CorruptRecord,
    RunLocked,
    read_record,
    record_folder,
)
from sinkutils.study.store import Runs, is_of, write_record

JSON_FILES = ("config.json", "metrics.json", "provenance.json")
FILES = (*JSON_FILES, "model.safetensors", "tokenizer.json", "SHA256SUMS")

HERE = socket.gethostname()


@pytest.fixture
def folder(tiny, corpus, tmp_path):
    target = record_folder("test", "tiny", 0, tmp_path)
    metrics = DONE | {"final": END | {"sink_1": 1.5}}
    write_record(target, tiny, metrics, {}, {"w": torch.ones(3)}, corpus.tokenizer, corpus.identity)
    return target


def test_a_record_reads_back_as_written_also_where_it_was_copied_to(folder, tiny, corpus, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere" / "0")
    for place in (folder, tmp_path / "elsewhere" / "0"):
        record = read_record(place)
        text = {"name": "docstrings", "sha256": corpus.fingerprint}
        assert record.config == config_dict(tiny) | {"corpus": text}
        assert record.metrics["final"] == END | {"sink_1": 1.5}
        assert record.weights == place / "model.safetensors"
        assert {path.name for path in place.iterdir()} == set(FILES)


@pytest.mark.parametrize("file", [file for file in FILES if file != "model.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_damage_to_any_file_is_noticed_and_the_file_is_named(folder, tiny, tmp_path, file, damage):
    """Every flipped byte and every cut: end_to_end/test_reliability.py."""
    path = folder / file
    path.write_bytes(path.read_bytes()[:-3])
    if damage == "deleted":
        path.unlink()
    refuses(f"record test/tiny/0: {file} is", read_record, folder, kind=CorruptRecord)
    with pytest.warns(UserWarning, match="counts as missing"):
        assert Runs(tmp_path).of(tiny).record() is None


def test_a_full_disk_leaves_the_old_record_and_a_new_one_replaces_it(folder, tiny, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=full))
        with refused(r"could not save record test/tiny/0 \(No space .*: free some space", OSError):
            write_record(folder, tiny, DONE, {})
    assert read_record(folder).metrics["final"] == END | {"sink_1": 1.5}
    replaced = write_record(folder, tiny, DONE | {"status": "failed", "reason": "x"}, {})
    assert replaced.status == "failed" and replaced.weights is None
    assert [path.name for path in folder.parent.iterdir()] == ["0"]


def die_before_step(step: int, what) -> bool:
    """Call `what` in a child process that dies, in the middle of a file or before a rename, at its `step`-th write.

    Returns whether `what` came to its end before.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    steps = itertools.count(1)

    def write_half(path, data, whole=store.write_synced):
        if next(steps) == step:
            path.write_bytes(data[: len(data) // 2])
            os._exit(9)
        whole(path, data)

    def rename(source, target, really=os.replace):
        if next(steps) == step:
            os._exit(9)
        really(source, target)

    store.write_synced, os.replace = write_half, rename
    try:
        what()
    finally:  # whatever happens, the child must not go on as a second pytest
        os._exit(0 if sys.exc_info()[0] is None else 1)


def test_a_death_while_writing_leaves_the_old_record_or_the_new_one_to_the_next_run(tiny, tmp_path):
    run = Runs(tmp_path).of(tiny)
    old, new = DONE | {"status": "failed", "reason": "old"}, DONE
    for before in (None, old):
        left, taken = [], []
        for step in range(1, 8):  # four files, a rename or two, and none
            shutil.rmtree(tmp_path / "test", ignore_errors=True)
            if before:
                write_record(run.folder, tiny, before, {})
            ended = die_before_step(step, lambda: write_record(run.folder, tiny, new, {}))
            left.append(read_record(run.folder).metrics if run.folder.exists() else None)
            with run.lock():
                record = run.record()
            taken.append(record and record.metrics)
            assert {path.name for path in run.folder.parent.iterdir()} <= {"0"}
        renames = 2 if before else 1  # before the last of which the old one is in place again
        assert ended and taken == [before] * (4 + renames) + [new] * (3 - renames)
        middle = [None] * (renames - 1)
        assert left == [before] * 5 + middle + [new] * (3 - renames)


def test_a_run_is_held_by_one_process_and_its_checkpoint_goes_with_its_record(tiny, tmp_path):
    run = Runs(tmp_path).of(tiny)
    assert not run.locked()
    with run.lock():
        with pytest.raises(RunLocked, match="test/tiny/0 is being trained by another"), run.lock():
            pass
        assert run.locked()
    assert not run.partial.exists() and not run.locked()
    with pytest.raises(KeyboardInterrupt), run.lock():
        run.checkpoint.write_bytes(b"a step")
        raise KeyboardInterrupt
    assert run.checkpoint.exists() and not run.locked()
    with run.lock():
        write_record(run.folder, tiny, DONE, {})
    assert not run.partial.exists()


def test_two_machines_that_share_no_locks_are_told_of_each_other(tiny, tmp_path, monkeypatch):
    """The lock of the first is taken away, as on a file system that keeps locks to each machine."""
    run = Runs(tmp_path).of(tiny)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with run.lock():  # alone, and again after its own end
            pass
        with run.lock():
            pass
    with pytest.warns(UserWarning, match="a process on two began this run") as told:
        with run.lock():
            (run.partial / "lock").unlink()
            monkeypatch.setattr("socket.gethostname", lambda: "two")
            with run.lock():
                write_record(run.folder, tiny, DONE, {})
                run.checkpoint.parent.mkdir(exist_ok=True)
            assert f"a process on {HERE} began this run and has not ended it" in str(
                told[0].message
            )
            monkeypatch.setattr("socket.gethostname", lambda: HERE)
            run.partial.mkdir(exist_ok=True)
            (run.partial / "owner").write_text("two 7")
    assert read_record(run.folder).status == "done"


def test_nothing_is_left_of_a_run_that_a_full_disk_keeps_from_beginning(
    tiny, tmp_path, monkeypatch
):
    run = Runs(tmp_path).of(tiny)
    monkeypatch.setattr("sinkutils.study.store.replace_file", Mock(side_effect=OSError("full")))
    with pytest.raises(OSError, match="full"), run.lock():
        pass
    assert not run.partial.exists()


def test_readers_see_the_old_record_where_a_process_died_between_two_renames(two, tmp_path):
    whole = su.runs("smoke", tmp_path)
    folder = tmp_path / "smoke" / "k_bias" / "1"
    folder.rename(folder.with_name(".1.old"))
    assert su.runs("smoke", tmp_path).equals(whole)
    assert su.record("k_bias", "smoke", 1, tmp_path).seed == 1
    shutil.copytree(folder.with_name(".1.old"), folder)  # and the new one where both are there
    assert su.runs("smoke", tmp_path).equals(whole)


def test_a_stray_file_in_a_records_folder_does_no_harm_and_stays(folder, tiny, tmp_path):
    for name in (".DS_Store", "notes.txt"):
        (folder / name).write_text("of another")
    assert read_record(folder).status == "done"
    with pytest.warns(UserWarning, match="its old folder had other files, and is now 0.replaced"):
        write_record(folder, tiny, DONE | {"status": "failed", "reason": "x"}, {})
    aside = folder.with_name("0.replaced")
    assert [path.name for path in aside.iterdir()] == ["notes.txt"]
    assert {path.name for path in folder.parent.iterdir()} == {"0", "0.replaced"}


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_where_no_folder_can_be_made_nobody_else_is_said_to_train(tiny):
    """As below /proc, where making a folder ends with "not found": a sweep would wait for ever."""
    with pytest.raises(OSError, match="cannot lock a file below"), Runs("/proc/x").of(tiny).lock():
        pass


@pytest.mark.parametrize(
    "name",
    ["../precious", "a/b", "", ".", "..", "/tmp/x", "a\\b", ".hidden", "x\n", "c:", "x" * 101],
)
def test_names_of_experiments_and_presets_are_no_paths(tiny, tmp_path, name):
    for field in ("experiment", "preset"):
        refuses(f"{field} must be a name", replace, tiny, **{field: name})
    refuses("must be a name", su.record, name, folder=tmp_path)
    refuses("must be a name", lambda: list(Runs(tmp_path).entries(f"smoke@{name}/..")))


def foreign(kind: str, target, elsewhere) -> None:
    """Put something where a record is to be."""
    target.parent.mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("years of work")
    if kind == "a folder with files of others":
        shutil.copytree(elsewhere, target)
    elif kind == "a file":
        target.write_text("years of work")
    elif kind == "a link":
        target.symlink_to(elsewhere)
    else:
        target.symlink_to(elsewhere / "nowhere")


@pytest.mark.parametrize(
    "kind", ["a folder with files of others", "a file", "a link", "a link to nowhere"]
)
def test_what_is_no_record_is_not_replaced_which_is_said_before_step_1(
    kind, tiny, corpus, tmp_path
):
    target = record_folder("test", "tiny", 0, tmp_path / "runs")
    foreign(kind, target, tmp_path / "elsewhere")
    before = sorted(path for path in tmp_path.rglob("*"))
    with interrupted(0):  # a step would raise KeyboardInterrupt
        with refused("and is not replaced: move it away", FileExistsError):
            su.train(tiny, tmp_path / "runs", corpus=corpus, progress=False)
    assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("ends", [b"\r\n", b"\n"])
def test_a_record_with_the_line_ends_of_windows_is_the_same_record(ends, tmp_path):
    """As git makes them where core.autocrlf is set, zip tools and mail; the older records have lines."""
    source = paths.RUNS / "laptop" / "fixed_1" / "0"
    target = tmp_path / "laptop" / "fixed_1" / "0"
    target.mkdir(parents=True)
    for path in source.iterdir():
        data = path.read_bytes()
        text = path.suffix in (".json", "")
        (target / path.name).write_bytes(data.replace(b"\n", ends) if text else data)
    assert su.runs("laptop", tmp_path).status.tolist() == ["done"]
    assert read_record(target).metrics == read_record(source).metrics
    su.record("fixed_1", folder=tmp_path).load_model()


def test_git_for_windows_leaves_every_byte_as_it_is(tmp_path):
    """A commit of a record, a script and the attributes, cloned with the setting that Git for Windows makes."""
    source, clone = tmp_path / "source", tmp_path / "clone"
    names = [".gitattributes", "studies/gpu.sh"]
    record = paths.RUNS / "laptop" / "fixed_1" / "0"
    names += [f"data/runs/laptop/fixed_1/0/{path.name}" for path in record.iterdir()]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(paths.ROOT / name, source / name)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "core.autocrlf=true"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *command], cwd=source, check=True)
    cloning = ["clone", "--quiet", "-c", "core.autocrlf=true", source, clone]
    subprocess.run([*git, *cloning], check=True)
    for name in names:
        assert (clone / name).read_bytes() == (paths.ROOT / name).read_bytes(), name


def test_a_record_is_of_its_own_text_and_another_text_stands_apart(folder, tiny, corpus, tmp_path):
    runs, own = tmp_path, corpus.identity
    other = {"name": "path:novels", "sha256": "0" * 64}
    same_name = {"name": "docstrings", "sha256": "0" * 64}
    assert Runs(runs).of(tiny).record() == Runs(runs).of(tiny, own).record() is not None
    assert Runs(runs).of(tiny, other).record() is None
    assert Runs(runs).of(tiny, same_name).record() is None
    assert Runs(runs).of(tiny).folder == Runs(runs).of(tiny, own).folder == folder
    apart = record_folder("test@path-novels-00000000", "tiny", 0, runs)
    assert Runs(runs).of(tiny, other).folder == apart
    apart = record_folder("test@docstrings-00000000", "tiny", 0, runs)
    assert Runs(runs).of(tiny, same_name).folder == apart
    own = record_folder("test", "tiny", 0, runs / "empty")
    assert Runs(runs / "empty").of(tiny, same_name).folder == own


def test_numbers_are_kept_to_five_digits_and_a_record_holds_nothing_else(tiny, tmp_path):
    end = {"valid_loss": 1 / 3, "by_block": [(2 / 3, 12345678.0)], "step": 1234567}
    metrics = DONE | {"final": END | end}
    target = record_folder("test", "tiny", 0, tmp_path)
    final = write_record(target, tiny, metrics, {}).metrics["final"]
    assert (final["valid_loss"], final["step"]) == (0.33333, 1234567)
    assert final["by_block"] == [[0.66667, 12346000.0]]


def test_a_corrupt_record_is_one_row_that_says_so_and_is_seen_when_it_is_mended(tmp_path):
    for seed in (0, 1):
        made_up(tmp_path, "k_bias", seed)
    assert [entry.status for entry in Runs(tmp_path).entries("smoke")] == ["done", "done"]
    path = record_folder("smoke", "k_bias", 1, tmp_path) / "metrics.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    says = r"record smoke/k_bias/1: metrics\.json is .*or train the run again"
    with pytest.warns(UserWarning, match=says):
        entries = list(Runs(tmp_path).entries("smoke"))
    assert [entry.status for entry in entries] == ["done", "corrupt"]
    assert "metrics.json" in entries[1].reason
    refuses("smoke/k_bias/1", load_lm, path.parent, "cpu", kind=ModelUnavailable)
    path.write_bytes(whole)
    assert [entry.status for entry in Runs(tmp_path).entries("smoke")] == ["done", "done"]


def test_what_is_written_into_a_record_is_nobody_elses(tmp_path):
    made_up(tmp_path, "k_bias")
    record = su.record("k_bias", "smoke", folder=tmp_path)
    for part in (record.metrics["final"], record.config["corpus"], record.provenance):
        part.clear()
    again = su.record("k_bias", "smoke", folder=tmp_path)
    assert again.metrics["final"]["sink_1"] == 0 and again.config["corpus"] and again.provenance
    assert su.runs("smoke", tmp_path).sink_1.tolist() == [0]


def tamper(folder, **parts) -> None:
    """Change files of a record, given without their suffix, and make the digests right again; None: not in the list."""
    for name, data in parts.items():
        path = folder / (name if "." in name else f"{name}.json")
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    names = [path.name for path in folder.iterdir() if path.name != "SHA256SUMS"]
    sums = ""
    for name in names:
        sums += f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
    own = hashlib.sha256(sums.encode()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{sums}{own}  SHA256SUMS\n")


NORMS = dict.fromkeys(("hidden_norms", "key_norms", "value_norms"), [[1.0] * 4] * 2)
REPORT = {"T": 4, "targets": [1], "alpha": [[[0.5, 0.2], [0.1, 0.3]]], **NORMS}
END_OF_ALL = END | {"excess_1": 0.2, "report": REPORT}
WHOLE = {"status": "done", "reason": None, "curve": [END, END], "final": END_OF_ALL}
CURVE = torch.tensor([REPORT["alpha"]] * 2)  # alpha of the report, at both points: (2, 1, 2, 2)
DAMAGE = {
    "cut": lambda data: data[:-3],
    "half written": lambda data: data[: len(data) // 2],
    "edited by hand": lambda data: data.replace(b"0", b"1"),
}
STRANGE = {
    "config.json is": {"config": b"[]"},
    "config.json is .* KeyError: 'corpus'": {"config": b'{"recipe": 2}'},
    "SHA256SUMS is .* it lists alpha.safetensors, config.json, provenance.json": {"metrics": None},
    "SHA256SUMS is .* thesis.txt": {"thesis.txt": b"years of work"},
}


def one_row_says_what_is_wrong(tmp_path, reason: str) -> None:
    """Of two records, the second of them strange: each reader shows the first and says what is wrong."""
    for read in (su.runs, su.blocks, su.heads, su.curves):
        with pytest.warns(UserWarning, match=f"smoke/k_bias/1: {reason}"):
            table = read("smoke", tmp_path)
        assert set(table.experiment) <= {"fixed_1", "k_bias"} and len(table[table.seed == 0]) > 0
    rows = su.runs("smoke", tmp_path)
    assert rows.status.tolist() == ["done", "corrupt"] and "\n" not in rows.reason[1]
    assert len(su.claims("smoke", tmp_path)) > 100
    assert main(["list", "--preset", "smoke", "--runs", str(tmp_path)]) == 0
    assert main(["claims", "--preset", "smoke", "--runs", str(tmp_path)]) == 0
    says = f"smoke/k_bias/1: {reason}"
    refuses(says, su.record, "k_bias", "smoke", 1, tmp_path, kind=CorruptRecord)


@pytest.fixture
def two(tmp_path):
    """The folder of the second of two records."""
    arrays = {"curve": CURVE.half()}
    for name, seed in (("fixed_1", 0), ("k_bias", 1)):
        folder = made_up(tmp_path, name, seed, kept={"arrays": arrays}, **WHOLE).folder
    return folder


@pytest.mark.parametrize("file", ["config.json", "metrics.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_one_row_of_several_and_counts_as_missing(two, tmp_path, file, damage):
    path = two / file
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    one_row_says_what_is_wrong(tmp_path, rf"{file} is missing, truncated or changed")
    with pytest.warns(UserWarning, match=rf"{file} is missing, .*; it counts as missing"):
        assert Runs(tmp_path).of(config("k_bias", "smoke", 1)).record() is None


@pytest.mark.parametrize("reason", STRANGE)
def test_so_is_one_that_no_run_of_this_version_writes(two, tmp_path, reason):
    tamper(two, **STRANGE[reason])
    one_row_says_what_is_wrong(tmp_path, reason)


def runs_say_what_is_wrong(tmp_path, reason: str) -> None:
    """The same of the table of runs, and of what every other reader reads."""
    with pytest.warns(UserWarning, match=f"smoke/k_bias/1: {reason}"):
        rows = su.runs("smoke", tmp_path)
    assert rows.status.tolist() == ["done", "corrupt"] and "\n" not in rows.reason[1]
    with pytest.warns(UserWarning, match=f"smoke/k_bias/1: {reason}"):
        assert set(su.curves("smoke", tmp_path).experiment) == {"fixed_1"}


def without(field: str) -> dict:
    return {name: value for name, value in WHOLE.items() if name != field}


def ending(**changes) -> dict:
    return WHOLE | {"final": END_OF_ALL | changes}


def reporting(**changes) -> dict:
    return ending(report=REPORT | changes)


METRICS = {
    "no object": [WHOLE],
    "no final": without("final"),
    "no status": without("status"),
    "no curve": without("curve"),
    "a curve that is no list": WHOLE | {"curve": END},
    "a point that is no object": WHOLE | {"curve": [3.0, END]},
    "a point without a step": WHOLE | {"curve": [{"valid_loss": 3.0, "sink_1": 0.0}, END]},
    "another status": WHOLE | {"status": "great"},
    "a status that is no text": WHOLE | {"status": ["done"]},
    "a reason that is no text": WHOLE | {"status": "failed", "reason": 3},
    "no end of a run that is done": WHOLE | {"final": {}},
    "a sink as text": ending(sink_1="12.0"),
    "a sink of 999 percent": ending(sink_1=999.0),
    "a negative sink": ending(sink_2=-1.0),
    "a sink that is null": ending(sink_1=None),
    "a sink that is true": ending(sink_1=True),
    "more excess than all attention": ending(excess_1=5.0),
    "a negative loss": ending(valid_loss=-3.0),
    "a loss as a list": ending(valid_loss=[3.0]),
    "a loss as an object": ending(valid_loss={"nats": 3.0}),
    "a step that is half": WHOLE | {"curve": [END | {"step": 0.5}, END]},
    "a negative step": WHOLE | {"curve": [END | {"step": -1}, END]},
    "norms of x_1 as text": WHOLE | {"curve": [END | {"peak_1": ["a", "b"]}, END]},
    "not a number between numbers": WHOLE
    | {"curve": [END, END | {"train_loss": math.nan}, END | {"train_loss": 3.0}]},
    "losses as a number": WHOLE | {"curve": [END | {"losses": 3.0}, END]},
    "a report that is a list": ending(report=[1]),
    "a report without T": ending(report={n: x for n, x in REPORT.items() if n != "T"}),
    "a report of other targets": reporting(targets=[2]),
    "alpha of another shape": reporting(alpha=[[[0.5, 0.2]]]),
    "alpha of ragged lists": reporting(alpha=[[[0.5, 0.2], [0.1]]]),
    "alpha as text": reporting(alpha=[[["0.5", "0.2"], ["0.1", "0.3"]]]),
    "alpha of more than 1": reporting(alpha=[[[0.5, 0.2], [0.1, 7.0]]]),
    "norms of another shape": reporting(value_norms=[[1.0] * 4]),
    "negative norms": reporting(key_norms=[[-1.0] * 4] * 2),
    "gradients that are a list": ending(gradients=[1.0]),
}


@pytest.mark.parametrize("kind", METRICS)
def test_so_is_one_whose_numbers_no_run_computes(two, tmp_path, kind):
    tamper(two, metrics=METRICS[kind])
    runs_say_what_is_wrong(tmp_path, r"metrics\.json is whole, and of no run")


@pytest.mark.parametrize("written", [b"NaN", b"1e999", b"-Infinity", b"1" * 400])
def test_so_is_one_with_a_number_that_is_none(two, tmp_path, written):
    text = json.dumps(ending(sink_1=12.5)).encode().replace(b"12.5", written)
    tamper(two, metrics=text)
    runs_say_what_is_wrong(tmp_path, r"metrics\.json is whole, and of no run")


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("alpha.safetensors", b"garbage"),
        ("alpha.safetensors", {"curve": CURVE[:1]}),  # of one point, not two
        ("alpha.safetensors", {"curve": CURVE[:, :, [0, 1, 1]]}),  # of three blocks
        ("alpha.safetensors", {"curve": torch.full((2, 1, 2, 2), torch.nan)}),
        ("alpha.safetensors", {"curve": torch.zeros(2, 1, 2, 2).long()}),
        ("alpha.safetensors", {"curve": CURVE + 0.01}),  # of another run
        ("provenance", b"[]"),
        ("provenance", b'{"wall_seconds": "long"}'),
    ],
)
def test_so_is_one_with_strange_arrays_or_conditions(two, tmp_path, file, data):
    tamper(two, **{file: save(data) if isinstance(data, dict) else data})
    runs_say_what_is_wrong(tmp_path, rf"{file}\S* is whole, and of no run")


def test_metrics_of_another_seed_are_found_beside_it_with_new_digests_too(two, tmp_path):
    other = two.with_name("0")
    made_up(tmp_path, "k_bias", 0, curve=[END, END | {"sink_1": 2.0}])
    assert set(su.runs("smoke", tmp_path).status) == {"done"}
    tamper(two, metrics=(other / "metrics.json").read_bytes())
    with pytest.warns(UserWarning, match="metrics.json is that of another seed as well"):
        table = su.runs("smoke", tmp_path)
    rows = table[table.experiment == "k_bias"]
    assert set(rows.status) == {"corrupt"} and len(rows) == 2
    assert "done" in set(table.status)


@pytest.mark.parametrize(
    "corpus", ["docstrings", None, {"name": "docstrings"}, {"name": 3, "sha256": ""}]
)
def test_so_is_one_of_no_corpus(two, tmp_path, corpus):
    config = json.loads((two / "config.json").read_text())
    tamper(two, config=config | {"corpus": corpus})
    runs_say_what_is_wrong(tmp_path, r"config\.json is whole, and of no run")


@pytest.mark.parametrize("file", ["SHA256SUMS", "config.json", "metrics.json", "alpha.safetensors"])
@pytest.mark.parametrize("kind", ["link", "link to a device", "pipe", "folder", "huge"])
def test_so_is_one_with_a_file_that_is_no_plain_one(two, tmp_path, file, kind):
    path = two / file
    whole = path.read_bytes()
    path.unlink()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file_of_nothing:
            file_of_nothing.truncate(3 * 2**30)  # takes no room
    runs_say_what_is_wrong(tmp_path, rf"{file} is missing")


def refuse(error: Exception):
    raise error


@pytest.mark.parametrize("kind", ["file", "empty", "unreadable"])
def test_so_is_what_cannot_be_read(two, tmp_path, kind, monkeypatch):
    shutil.rmtree(two)
    if kind == "file":
        two.write_text("years of work")
    else:
        two.mkdir()
    if kind == "unreadable":
        (two / "SHA256SUMS").touch()
        refused = PermissionError(errno.EACCES, "Permission denied")
        really = records_module._contents
        monkeypatch.setattr(
            records_module,
            "_contents",
            lambda path: refuse(refused) if path.parent == two else really(path),
        )
    one_row_says_what_is_wrong(tmp_path, "SHA256SUMS is missing or damaged")


def test_a_stale_record_is_looked_at_only_where_its_numbers_are_shown(two, tmp_path):
    config = json.loads((two / "config.json").read_text())
    tamper(two, config=config | {"train": config["train"] | {"steps": 7}})
    assert su.runs("smoke", tmp_path).status.tolist() == ["done", "stale"]
    assert su.record("k_bias", "smoke", 1, tmp_path).status == "stale"
    (two / "metrics.json").write_bytes(b"[]")
    assert su.runs("smoke", tmp_path).status.tolist() == ["done", "corrupt"]
    assert len(su.claims("smoke", tmp_path)) > 100


def test_a_record_of_a_later_version_is_not_said_to_be_of_an_older_one(two, tmp_path):
    config = json.loads((two / "config.json").read_text())
    for recipe, advice in ((1, "train it again"), (9, "update the package")):
        tamper(two, config=config | {"recipe": recipe})
        assert advice in su.record("k_bias", "smoke", 1, tmp_path).reason


def test_changed_weights_are_noticed_when_loaded_and_may_be_deleted(folder, tiny, tmp_path):
    path = folder / "model.safetensors"
    whole = su.record("tiny", "test", folder=tmp_path)
    deep = replace(
        whole, config=whole.config | {"model": whole.config["model"] | {"num_layers": 10**9}}
    )
    refuses("they are not those of 1000000000 layers", deep.load_model, kind=CorruptRecord)
    path.write_bytes(path.read_bytes()[:-4] + b"....")
    record = Runs(tmp_path).of(tiny).record()  # the numbers beside them are whole
    says = r"record test/tiny/0: model\.safetensors is missing, truncated or changed"
    with pytest.raises(CorruptRecord, match=says):
        record.load_weights()
    with refused(r"model\.safetensors is missing, truncated", ModelUnavailable):
        load_lm(folder, "cpu")
    path.unlink()
    assert Runs(tmp_path).of(tiny).record().weights is None


def test_a_recorded_model_has_float32_whatever_the_default_dtype(tmp_path, tiny):
    weights = su.TransformerLM(tiny.model).state_dict()
    folder = record_folder("test", "tiny", 0, tmp_path)
    record = write_record(folder, tiny, DONE, {}, weights, word_tokenizer(17))
    torch.set_default_dtype(torch.bfloat16)
    try:
        loaded = record.load_model().state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(x, loaded[name]) for name, x in weights.items())


def test_a_record_whose_replacement_was_cut_off_is_found_in_its_old_folder(tmp_path, tiny):
    """As a power cut leaves it, between the two renames: only the old folder is there."""
    folder = record_folder("test", "tiny", 0, tmp_path)
    model = su.TransformerLM(tiny.model)
    kept = {"weights": model.state_dict(), "tokenizer": word_tokenizer(17)}
    write_record(folder, tiny, DONE | {"final": END}, {}, **kept)
    folder.rename(folder.with_name(".0.old"))
    assert su.record("tiny", "test", folder=tmp_path).status == "done"
    for name in ("test/tiny/0", folder):
        loaded, _ = load_lm(name, "cpu", runs=tmp_path)
        assert loaded.config == tiny.model


@pytest.fixture
def copied(study, monkeypatch, tmp_path):
    """Records that are copied at once, into a cache of the test's own. Counts those that are read."""
    monkeypatch.setenv("SINKUTILS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "FEW", 0)
    monkeypatch.setattr(tables, "SETTLED", -1.0)
    read = []

    def counted(folder):
        read.append(f"{folder.parent.name}/{folder.name}")
        return read_record(folder)

    monkeypatch.setattr(tables, "read_record", counted)
    runs = tmp_path / "runs"
    shutil.copytree(study, runs)
    return runs, read


FRAMES = (su.runs, su.blocks, su.heads, su.curves)


@pytest.mark.parametrize("frame", FRAMES)
def test_a_table_from_copies_is_the_table_from_the_records_to_the_last_digit(frame, copied, study):
    runs, read = copied
    first = frame("laptop", runs)
    assert len(read) == 6
    second = frame("laptop", runs)
    assert len(read) == 6
    pd.testing.assert_frame_equal(first, second, check_exact=True)


def test_a_changed_record_is_read_again_and_only_that(copied):
    runs, read = copied
    su.runs("laptop", runs)
    read.clear()
    path = runs / "laptop" / "k_bias" / "1" / "metrics.json"
    (path.parent / ".DS_Store").symlink_to("nowhere")
    assert set(su.runs("laptop", runs).status) == {"done"} and read == ["k_bias/1"]
    read.clear()
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))  # the same size
    os.utime(path, ns=(0, 0))
    with pytest.warns(UserWarning, match="k_bias/1: metrics.json is missing, truncated or changed"):
        table = su.runs("laptop", runs)
    assert read == ["k_bias/1"] and sorted(table.status)[:2] == ["corrupt", "done"]
    shutil.rmtree(runs / "laptop" / "k_bias")
    assert set(su.runs("laptop", runs).experiment) == {"fixed_1", "window_1_64"}
    assert read == ["k_bias/1"]


def test_a_copy_says_stale_by_the_study_of_today(copied, monkeypatch):
    runs, read = copied
    assert set(su.runs("laptop", runs).status) == {"done"}
    read.clear()
    today = store.grid.contents
    monkeypatch.setattr(store.grid, "contents", lambda *run: today(*run) | {"recipe": 3})
    assert set(su.runs("laptop", runs).status) == {"stale"} and not read


@pytest.mark.parametrize(
    "damage", ["cut", "a digit", "no JSON", "empty", "of other code", "a folder"]
)
def test_a_damaged_copy_is_not_used(damage, copied, tmp_path, monkeypatch):
    runs, read = copied
    first = su.runs("laptop", runs)
    read.clear()
    (file,) = (tmp_path / "cache" / "tables").iterdir()
    data = file.read_bytes()
    if damage == "of other code":
        monkeypatch.setattr(tables, "_code", lambda: "other")
    elif damage == "a folder":
        file.unlink()
        file.mkdir()
    else:
        change = {"cut": data[:-9], "a digit": data.replace(b"3", b"4"), "empty": b""}
        file.write_bytes(change.get(damage, b"no JSON"))
    pd.testing.assert_frame_equal(first, su.runs("laptop", runs), check_exact=True)
    assert len(read) == 6


def test_a_record_that_may_still_change_within_a_tick_is_not_copied(copied, monkeypatch):
    runs, read = copied
    monkeypatch.setattr(tables, "SETTLED", 3600.0)
    su.runs("laptop", runs)
    su.runs("laptop", runs)
    assert len(read) == 12


def test_every_committed_record_is_whole_and_of_its_experiment():
    for preset, count in (("laptop", 574), ("minute", 135), ("desk", 4), ("gpu", 4)):
        statuses = [entry.status for entry in Runs(paths.RUNS).entries(preset)]
        assert len(statuses) >= count and set(statuses) <= {"done", "failed"}


def test_a_field_that_came_after_a_record_counts_with_its_default(tmp_path):
    run, record = config("fixed_1", "smoke"), made_up(tmp_path, "fixed_1")
    values = json.loads((record.folder / "config.json").read_text())
    for name in ("gate", "qk_norm", "value_scale", "normalization"):
        del values["model"][name]
    del (
        values["model"]["attention"]["sink_logit"],
        values["data"]["validation"],
        values["train"]["optimizer"],
    )
    assert upgrade(values) == record.config
    assert is_of(record, run)
    for changes in ({"gate": "head"}, {"attention": replace(run.model.attention, window=8)}):
        assert not is_of(record, replace(run, model=replace(run.model, **changes)))
    assert not is_of(record, replace(run, seed=1))
    assert not is_of(replace(record, config={**record.config, "recipe": 1}), run)


def test_a_retired_field_changes_neither_what_a_record_is_of_nor_its_configs_hash(tmp_path):
    run, record = config("fixed_1", "smoke"), made_up(tmp_path, "fixed_1")
    assert "bos" not in record.config["data"]
    values = upgrade(record.config | {"data": record.config["data"] | {"bos": False}})
    assert is_of(replace(record, config=values), run)
    # what the fine-tunings of the study name their start by
    assert config_hash(config("fixed_1", "laptop")).startswith("ed45b225684cd4be")
    assert config("sft_softmax", "laptop", 1).start_sha256.startswith("1f6ad9568091e3ed")


NAMES = ("fixed_1", "k_bias", "window_1_64")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A few of the study's records in a folder of their own."""
    root = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        (root / "laptop" / name).mkdir(parents=True)
        for seed in (0, 1):
            source = paths.RUNS / "laptop" / name / str(seed)
            (root / "laptop" / name / str(seed)).symlink_to(source)
    return root


def report_of(name: str, seed: int) -> dict:
    path = paths.RUNS / "laptop" / name / str(seed) / "metrics.json"
    return json.loads(path.read_text())["final"]


def test_a_row_per_run_says_what_its_record_says_and_the_mean_of_its_blocks(study):
    table = su.runs("laptop", study).set_index(["experiment", "seed"])
    assert len(table) == 2 * len(NAMES) and (table.status == "done").all()
    row, final = table.loc[("k_bias", 1)], report_of("k_bias", 1)
    for name in ("sink_1", "sink_star", "valid_loss"):
        assert row[name] == final[name]
    uniform = sum(1 / i for i in range(1, 65)) / 64
    alpha = np.array(final["report"]["alpha"][0])
    assert row.block_1 == pytest.approx(((alpha[0] - uniform) / (1 - uniform)).mean())
    assert (row.block_1 + 3 * row.later_blocks) / 4 == pytest.approx(row.excess_1, abs=1e-4)
    assert row.element == max(block[0] for block in final["report"]["hidden_peaks"])
    by_block = su.blocks("laptop", study).groupby(["experiment", "seed"])
    # also under a window, and where there is a key of its own
    for name in ("excess_1", "excess_star"):
        expected = pytest.approx(table[name].tolist(), abs=1e-5, nan_ok=True)
        assert by_block[name].mean().tolist() == expected


def test_blocks_heads_and_curves_are_the_reports_numbers_in_their_order(study):
    final = report_of("k_bias", 0)
    heads = su.heads("laptop", study).query("experiment == 'k_bias' and seed == 0")
    assert heads.alpha_1.tolist() == np.ravel(final["report"]["alpha"][0]).tolist()
    assert heads.alpha_star.tolist() == np.ravel(final["report"]["alpha_star"]).tolist()
    blocks = su.blocks("laptop", study).query("experiment == 'k_bias' and seed == 0")
    norms = final["report"]["value_norms"][2]
    assert blocks.value_ratio.tolist()[2] == pytest.approx(norms[0] / np.mean(norms[1:]))
    curve = su.curves("laptop", study).query("experiment == 'k_bias' and seed == 0")
    assert curve.step.tolist()[-1] == 12_000 and curve.tokens.tolist()[-1] == 12_000 * 32 * 64
    assert curve.valid_loss.tolist()[-1] == final["valid_loss"]
    seen_once = su.blocks("laptop", study).query("experiment == 'window_1_64'")
    assert np.isfinite(seen_once.excess_1).all()


def test_a_file_is_replaced_behind_its_link_and_what_is_no_file_is_not(tmp_path):
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    target.write_text("old")
    link.symlink_to(target)
    replace_file(link, b"new")
    assert link.is_symlink() and target.read_text() == "new"
    os.mkfifo(pipe)
    for place in (pipe, tmp_path):
        refuses("is no regular file", replace_file, place, b"new", kind=OSError)
    assert pipe.is_fifo() and {path.name for path in tmp_path.iterdir()} == {
        "target",
        "link",
        "pipe",
    }
