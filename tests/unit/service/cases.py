"""Datums for tests of the training service."""

import numpy as np

from rl_megatron.service.datums import Datum
from rl_megatron.service.losses import LOSSES

VOCAB_SIZE = 37


def random_datums(count, name, kind, seed, vocab_size=VOCAB_SIZE, longest=12):
    """Return datums for the loss `name`; `kind` says which targets they have."""
    rng, data = np.random.default_rng(seed), []
    for _ in range(count):
        length = int(rng.integers(1, longest))
        tokens = rng.integers(0, vocab_size, length)
        shape = (length, 3) if kind == "several targets" else (length,)
        targets = rng.integers(0, vocab_size, shape)
        if kind == "next tokens":
            targets[:-1] = tokens[1:]
        inputs = {"target_tokens": targets}
        values = {
            "weights": rng.random(shape) * rng.integers(0, 2, shape),
            "logprobs": np.log(rng.random(shape) * 0.2 + 0.01),
            "advantages": rng.standard_normal(shape),
            "sequence_ratio_mask": rng.integers(0, 2, shape).astype(float),
        }
        if kind == "thresholds of each token":
            values |= {"clip_low_threshold": rng.random(shape), "clip_high_threshold": 1 + rng.random(shape)}
        inputs |= {key: values[key].astype(np.float32) for key in LOSSES[name].inputs if key in values}
        data.append(Datum(tokens, inputs))
    return data
