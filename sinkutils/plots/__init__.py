"""The figures that several notebooks share, three interactive pictures, and one page about a model."""

from sinkutils.plots.attention import attention_map, token_label
from sinkutils.plots.explorer import explore_maps
from sinkutils.plots.heads import heads_by_block

__all__ = ["attention_map", "explore_maps", "heads_by_block", "token_label"]
