"""Measuring attention sinks: from a model and token ids to a `Report`."""
