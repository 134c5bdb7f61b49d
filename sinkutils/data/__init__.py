"""Text, tokens, chunks, probes."""
