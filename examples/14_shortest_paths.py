"""Shortest paths, and the likelihood of a hidden Markov model: products in semirings.

`semiring="min_plus"` adds where a product multiplies, and takes the least where it adds.
"""

import numpy as np

import gemmery as gm

draw = np.random.default_rng(0)
n = 300
length = np.where(draw.random((n, n)) < 0.02, draw.random((n, n)), np.inf)  # of edges; inf: there is none
np.fill_diagonal(length, 0)

paths, edges = length, 1  # of so many edges at most
while edges < n - 1:
    paths, edges = gm.matmul(paths, paths, semiring="min_plus"), 2 * edges
reached = paths[np.isfinite(paths)]
print(f"{np.isfinite(length).sum()} edges, {reached.size} pairs with a path, the longest {reached.max():.3f}")
assert (paths <= length).all()
assert np.allclose(paths, np.minimum(paths, paths[:, :1] + paths[:1]))  # no detour by point 0 is shorter

# Logarithms of probabilities far below the smallest number: log(sum(exp(...))) of a + b.
step = np.log(draw.dirichlet(np.ones(20), 20))  # from state to state
seen = -draw.exponential(10, (1000, 20))  # of 1000 observations in each state
state = np.full((1, 20), -np.log(20))
for each in seen:
    state = gm.matmul(state, step, semiring="log_sum_exp") + each
total = gm.matmul(state, np.zeros((20, 1)), semiring="log_sum_exp")[0, 0]
print(f"log-likelihood {total:.1f}")
assert np.isclose(total, np.logaddexp.reduce(state[0]))
