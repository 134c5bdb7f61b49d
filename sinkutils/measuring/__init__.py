"""From a model to its numbers."""
