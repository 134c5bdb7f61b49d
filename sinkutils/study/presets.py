"""The scales of the study, as data/presets.yaml has them."""

from __future__ import annotations

from dataclasses import dataclass

from sinkutils.checks import choice
from sinkutils.data.packing import DataConfig
from sinkutils.model.decoder import LMConfig
from sinkutils.paths import LEDGER, read_yaml
from sinkutils.study.config import Json, TrainConfig, from_dict


@dataclass(frozen=True)
class Preset:
    """A scale: the same experiments on another model, text and budget. data/presets.yaml says what
    each field means.
    """

    name: str
    model: LMConfig
    data: DataConfig
    train: TrainConfig
    tuning: Json
    base: str
    four_epochs: float
    seconds: float
    device: str = "cpu"
    compile: bool = False
    parallel: str = "ddp"  # or fsdp
    keeps_weights: bool = False
    leaves_out: tuple[str, ...] = ()


PRESETS: dict[str, Preset] = {}
for _name, _values in read_yaml(LEDGER / "presets.yaml").items():
    PRESETS[_name] = from_dict(Preset, {"name": _name, **_values})


def preset(name: str) -> Preset:
    """The preset of that name. Raises ValueError that lists them."""
    choice("preset", name, PRESETS)
    return PRESETS[name]
