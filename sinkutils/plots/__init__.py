"""The figures that several notebooks share, three interactive pictures, and one page about a model."""

from sinkutils.plots.attention import attention_map, token_label
from sinkutils.plots.heads import heads_by_block

__all__ = ["attention_map", "heads_by_block", "token_label"]
