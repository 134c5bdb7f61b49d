"""The decoder: attention, its fast forms, position terms and norms."""
