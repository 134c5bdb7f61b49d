"""Tables, figures, notebooks, README."""
