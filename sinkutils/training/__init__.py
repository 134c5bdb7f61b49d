"""The training: it takes a config and writes a record."""
