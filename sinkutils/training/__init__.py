"""From a config to a record."""
