"""Figures that several notebooks share, interactive pictures, and an HTML page about a model."""

from sinkutils.plots.figures import attention_map, heads_by_block, token_label

__all__ = ["attention_map", "heads_by_block", "token_label"]
