"""The study: configs, presets, experiments and records. The training itself is in `training`."""
