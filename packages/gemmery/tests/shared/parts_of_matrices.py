"""The parts of matrices that ranks hold, and the matrix that parts make."""

import math
from itertools import product

import numpy as np

import gemmery.distributed as gd
from gemmery.distributed import layouts


def uneven(shape, mesh, placements, seed):
    """A layout whose parts have any sizes, also none."""
    boxes = []
    for rank in range(math.prod(mesh)):
        ends = [[0, shape[0]], [0, shape[1]]]
        for dim, (at, size, place) in enumerate(zip(layouts.coordinates(rank, mesh), mesh, placements, strict=True)):
            if isinstance(place, gd.Shard):
                start, stop = ends[place.dim]
                cuts = np.random.default_rng([seed, dim, place.dim, start, stop]).integers(start, stop + 1, size - 1)
                edges = [start, *np.sort(cuts).tolist(), stop]
                ends[place.dim] = edges[at : at + 2]
        boxes.append(layouts.Part(*ends[0], *ends[1]))
    return layouts.Distribution(shape, mesh, tuple(placements), tuple(boxes))


def parts(whole, layout, rng):
    """What each rank holds of a matrix of small integers, of which any sums are exact."""
    dims = [dim for dim, place in enumerate(layout.placements) if isinstance(place, gd.Partial)]
    summands = {at: rng.integers(-2, 3, whole.shape) for at in product(*(range(layout.mesh[dim]) for dim in dims))}
    first = (0,) * len(dims)
    summands[first] = whole - sum(summand for at, summand in summands.items() if at != first)
    found = []
    for rank, box in enumerate(layout.boxes):
        place = layouts.coordinates(rank, layout.mesh)
        summand = summands[tuple(place[dim] for dim in dims)]
        found.append(summand[box.top : box.bottom, box.left : box.right].astype(whole.dtype))
    return found


def joined(found, layout, dtype):
    """The whole matrix of what ranks hold, after a check that copies are equal."""
    whole = np.zeros(layout.shape, np.complex128)
    seen = {}
    for rank, (box, part) in enumerate(zip(layout.boxes, found, strict=True)):
        assert part.shape == box.shape
        assert part.dtype == dtype
        place = layouts.coordinates(rank, layout.mesh)
        copies = [d for d, p in enumerate(layout.placements) if isinstance(p, gd.Replicate)]
        first = layouts.rank_at([0 if d in copies else c for d, c in enumerate(place)], layout.mesh)
        if first != rank:
            assert part.tobytes() == seen[first].tobytes()
            continue
        seen[rank] = part
        whole[box.top : box.bottom, box.left : box.right] += part.astype(np.complex128)
    return whole
