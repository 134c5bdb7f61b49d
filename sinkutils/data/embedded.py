"""The text that is on every machine that can run the project: pinned packages and the standard library."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import platform
import re
import sys
import sysconfig
import warnings
from bisect import bisect
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from tqdm.auto import tqdm

# The start of a class or function, with its indentation.
HEADER = re.compile(r"^([ \t]*)(?:async[ \t]+)?(def|class)[ \t]+(\w+)", re.MULTILINE)
MIN_CHARACTERS = 256  # shorter documents are skipped: about 64 tokens at a vocabulary of 1,024 and more
# What constraints.txt pins exactly and what has English docstrings: nothing else in an environment changes the text.
DISTRIBUTIONS = (
    *("torch", "transformers", "datasets", "numpy", "pandas", "matplotlib", "seaborn", "hypothesis", "pytest", "mypy"),
    *("jupyterlab", "papermill", "nbval", "tokenizers", "safetensors", "tqdm", "ipywidgets"),
    # Required by those; pinned because they are text.
    *("sympy", "networkx", "huggingface-hub", "debugpy", "fonttools", "ipython", "mpmath", "pydantic", "tornado"),
)
# Of the standard library: what some distributors leave out.
PRUNED = {"__pycache__", "test", "tests", "idle_test"}
OF_THE_BUILD = ("torch/version.py",)  # says whether it is the build for CPUs
PROSE = (".rst", ".md", ".txt")
HEADERS = (".h", ".hpp", ".cuh")
LICENCE = re.compile(r"(?:.*_)?(?:LICEN[SC]E|COPYING|NOTICE)", re.IGNORECASE)  # and NUMPY_LICENSE
# Comments and strings of a Python source, in order; possessive, so that an open quote cannot backtrack.
COMMENT_OR_STRING = re.compile(
    r"""\#[^\n]*+
      | \"{3}(?:[^\\"]++|\\.|"(?!""))*+\"{3} | '{3}(?:[^\\']++|\\.|'(?!''))*+'{3}
      | "(?:[^"\\\n]++|\\.)*+" | '(?:[^'\\\n]++|\\.)*+'""",
    re.DOTALL | re.VERBOSE,
)


def installed() -> dict[str, Distribution | None]:
    """The distributions whose text is used, by name; None for those that are not installed."""
    packages: dict[str, Distribution | None] = dict.fromkeys(DISTRIBUTIONS)
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = distribution(name)
    return packages


def installed_versions() -> list[str]:
    """What the text depends on: the version of Python and of every distribution that is used."""
    versions = (f"{name} {package and package.version}" for name, package in installed().items())
    return [platform.python_version(), *versions]


def text_digest(text: str) -> bytes:
    """SHA-256 of a document: what makes it the same document, and what sorts it."""
    return hashlib.sha256(text.encode()).digest()


def split_fraction(digest: bytes) -> float:
    """A number in [0, 1) that decides on the split: a function of the text alone, so the same in every corpus."""
    return int.from_bytes(digest[-8:], "big") / 2**64


def docstrings(progress: bool = True) -> Iterator[str]:
    """The docstrings of the modules, classes and functions of a file, joined: a document a file.

    Sorted by the hash of the text, each docstring kept once: the same installed versions give the same
    documents, wherever, with whatever else and whenever they were installed.
    """
    documents: dict[bytes, list[str]] = {}
    for path in _shown(files_with(".py"), progress):
        parts = docstrings_of(text_of(path))
        documents[text_digest("\0".join(parts))] = parts
    seen: set[str] = set()
    for digest in sorted(documents):
        new = [part for part in dict.fromkeys(documents[digest]) if part not in seen]
        seen.update(new)
        document = "\n\n".join(new)
        if len(document) >= MIN_CHARACTERS:
            yield document


def sources(progress: bool = True) -> Iterator[str]:
    """The Python sources, a document a file, sorted by the hash of the text."""
    return _read(files_with(".py"), progress)


def everything(progress: bool = True) -> Iterator[str]:
    """Python sources, C and C++ headers, and .rst, .md and .txt files: no licences, no data."""
    return _read(files_with(".py", *HEADERS, *PROSE), progress)


def docstrings_of(source: str) -> list[str]:
    """The docstrings of a Python source in order: triple-quoted, first in the file or on a line after a colon.

    Found by a scan over comments and strings, ten times faster than by parsing (seconds instead of a minute for
    all of site-packages) and all but equal to it. Escapes stay as they are written.
    """
    return list(filter(None, (inspect.cleandoc(match.group()[3:-3]) for match in docstring_matches(source))))


def definitions_of(source: str) -> Iterator[tuple[str, str, str]]:
    """The classes, functions and methods of a Python source that have a docstring: (kind, name, docstring), in order.

    A method's name has its class before it. Found by the same scan as `docstrings_of`: what does not stand right after
    a header whose last line alone ends with a colon is left out.
    """
    headers = list(HEADER.finditer(source))
    for match in docstring_matches(source):
        before = headers[: bisect(headers, match.start(), key=re.Match.start)]
        text = inspect.cleandoc(match.group()[3:-3])
        if not before or not text:
            continue
        between = source[before[-1].start() : match.start()].rstrip(" \t\nrRuU")
        if [line.rstrip()[-1:] for line in between.splitlines()].count(":") != 1 or not between.endswith(":"):
            continue
        indent, kind, name = before[-1].groups()
        outer = next((header for header in reversed(before) if not header[1]), None)
        if kind == "class":
            yield "class", name, text
        elif indent and outer is not None and outer[2] == "class":
            yield "method", f"{outer[3]}.{name}", text
        else:
            yield "function", name, text


def docstring_matches(source: str) -> Iterator[re.Match[str]]:
    """The docstrings of a Python source where they stand, quotes included."""
    first = True
    for match in COMMENT_OR_STRING.finditer(source):
        if not match.group().startswith(('"""', "'''")):
            continue
        line = source.rfind("\n", 0, match.start()) + 1
        if source[line : match.start()].strip(" \trRuU"):  # part of an expression
            continue
        before = source[:line].rstrip()
        last = before[before.rfind("\n") + 1 :]
        after_colon = last.endswith(":") or last.partition("#")[0].rstrip().endswith(":")
        if after_colon or (first and all(text.strip()[:1] in ("", "#") for text in before.splitlines())):
            yield match
        first = False


def files_with(*suffixes: str) -> list[Path]:
    """The files with these suffixes, without licences, of the standard library and of the installed distributions.

    Of a distribution those that its RECORD lists: they came in its wheel, whatever else lies in its folders. Not
    scripts (outside its folders) nor *-info folders (records of the installation).
    """
    files = list(_standard_library())
    missing = []
    for name, package in installed().items():
        if package is None:
            missing.append(name)
            continue
        for file in package.files or ():
            top = file.parts[0]
            if top != ".." and not top.endswith("-info") and file.as_posix() not in OF_THE_BUILD:
                files.append(Path(str(file.locate())))
    if missing:
        lacking = f"the embedded text lacks {', '.join(missing)}, so its hash is another one"
        advice = "install what constraints.txt pins (pip install -c constraints.txt '.[text]')"
        warnings.warn(f"{lacking}: {advice}, or bring a file of pack_corpus", stacklevel=2)
    return [path for path in files if path.name.lower().endswith(suffixes) and not LICENCE.match(path.name)]


def _standard_library() -> Iterator[Path]:
    """The files of the running Python's own modules, without their tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for top in root.iterdir():
        if top.stem in sys.stdlib_module_names:
            files = top.rglob("*") if top.is_dir() else [top]
            yield from (file for file in files if PRUNED.isdisjoint(file.relative_to(root).parts[:-1]))


def _shown(paths: list[Path], progress: bool) -> Iterable[Path]:
    return tqdm(paths, desc="reading sources", unit="file", disable=not progress, leave=False)


def _read(paths: list[Path], progress: bool) -> Iterator[str]:
    """The texts of the files that are UTF-8, long enough and not generated, each once, sorted by the hash."""
    unique: dict[bytes, Path] = {}
    for path in _shown(paths, progress):
        text = text_of(path)
        if len(text) >= MIN_CHARACTERS and "@generated" not in text[:256]:
            unique[text_digest(text)] = path
    for digest in sorted(unique):  # read a second time rather than kept: the text is hundreds of megabytes
        yield text_of(unique[digest])


def text_of(path: Path) -> str:
    """The text of a file; empty where it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError):
        return ""
