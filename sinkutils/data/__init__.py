"""The data: corpora, tokenizers, chunks to train on, and probes to measure with."""
