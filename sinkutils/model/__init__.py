"""The decoder: attention, its fast forms, positions."""
