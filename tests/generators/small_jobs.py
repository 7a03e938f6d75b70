"""Inputs of small computed jobs: a function, a model, and a tokenizer of three words."""

from __future__ import annotations

import json

STEPS = b"""
def length(row):
    return {"length": len(row["text"])}
"""
MODEL = b"""
import numpy as np

def factory():
    return lambda batch: np.array([[len(text), 1.0] for text in batch["text"]], "float32")
"""
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"row": 0, "word": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
    }
).encode()
