"""The figures that several notebooks share, three interactive pictures, and one page about a model."""

from sinkutils.plots.attention import attention_map, attention_maps, token_label
from sinkutils.plots.curves import training_curves
from sinkutils.plots.effects import forest
from sinkutils.plots.explorer import explore_maps
from sinkutils.plots.heads import heads_by_block

__all__ = [
    "attention_map",
    "attention_maps",
    "explore_maps",
    "forest",
    "heads_by_block",
    "token_label",
    "training_curves",
]
