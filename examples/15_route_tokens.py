"""A layer of experts: each token goes to two of them, and the index arrays of the routing are all that is moved."""

import numpy as np

import gemmery as gm

rng = np.random.default_rng(0)
tokens, up, down = (rng.standard_normal(s, np.float32) for s in ((96, 64), (8, 64, 128), (8, 128, 64)))
scores = tokens @ rng.standard_normal((64, 8), np.float32)
chosen = np.argsort(scores)[:, -2:]  # experts of each token

order = np.argsort(chosen.reshape(-1), kind="stable")  # expert by expert
token, ends = order // 2, np.searchsorted(chosen.reshape(-1)[order], np.arange(8), "right")

hidden = gm.grouped_matmul(tokens, up, offsets=ends, gather=token, activation="silu")
slots = np.zeros((96, 64), np.float32)
result = gm.grouped_matmul(hidden, down, offsets=ends, scatter=token, out=slots)


def silu(x):
    """The activation of the experts."""
    return x / (1 + np.exp(-x))


expected = np.stack([sum(silu(t @ up[e]) @ down[e] for e in own) for t, own in zip(tokens, chosen, strict=True)])
print("two experts a token:", np.allclose(result, expected, rtol=1e-3, atol=1e-2), result.shape)
again = gm.grouped_matmul(hidden, down, offsets=ends, scatter=token, out=slots.copy())
print("the same bits again:", np.array_equal(again, result))
