"""What is trained: configs, presets, experiments, records. No training here."""
