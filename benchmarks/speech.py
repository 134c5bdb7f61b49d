"""What Whisper hears and reads in whisper.py: sentences, a synthesiser that speaks them, noise and a chirp."""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np

from sinkutils.study import sources

TEXTS, LENGTH, RATE = 8, 60, 16_000


def sentences(tokenizer: Any) -> list[str]:
    """Plain sentences of the docstrings, joined until each has LENGTH tokens."""
    texts: list[str] = []
    words = ""
    for text in sorted(set(sources.docstrings()), key=sources.split_fraction):
        sentence = " ".join(text.split("\n\n")[0].split())
        plain = sentence.replace(",", "").replace(".", "").replace(" ", "").isalpha()
        if not plain or len(sentence.split()) < 8:
            continue
        words += " " + sentence
        if len(tokenizer.encode(words, add_special_tokens=False).ids) >= LENGTH:
            texts.append(words)
            words = ""
        if len(texts) == TEXTS:
            break
    return texts


def spoken(text: str) -> np.ndarray:
    """What espeak-ng says, at RATE, from its 22,050 Hz."""
    wave = subprocess.run(["espeak-ng", "--stdout", text], capture_output=True, check=True).stdout
    sound = np.frombuffer(wave[44:], "<i2").astype(np.float32) / 32768
    times = np.arange(0, len(sound) / 22050, 1 / RATE)
    return np.interp(times, np.arange(len(sound)) / 22050, sound).astype(np.float32)


def heard_sounds(texts: list[str]) -> dict[str, list[np.ndarray]]:
    """By name: one noise, one chirp of 30 seconds, and each text spoken."""
    seconds = np.arange(30 * RATE) / RATE
    return {
        "noise": [0.1 * np.random.default_rng(0).standard_normal(30 * RATE)],
        "chirp": [0.3 * np.sin(2 * np.pi * (100 + 60 * seconds) * seconds)],
        "speech": [spoken(text) for text in texts],
    }
