"""The shapes (m, n, k) on which kernels are tested."""

from gemmery.cpu.target import host, tile

EMPTY_SUMS = [(5, 3, 0), (1, 1, 0), (1, 33, 0), (33, 1, 0), (70, 130, 0)]
ONES = [(1, 1, 1), (1, 1, 7), (1, 7, 1), (7, 1, 1), (1, 5, 6), (5, 1, 6), (5, 6, 1)]
PRIMES = [(2, 3, 5), (7, 11, 13), (17, 19, 23), (29, 31, 37), (53, 41, 61), (97, 89, 101)]

_TILE = tile(host())
# Register tiles and blocks of this machine, and of others: 6 x 64 f32 with AVX-512, 6 x 16 with AVX2, 12 x 32 direct.
SIZES = sorted({4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 512, 1024, _TILE.mr, _TILE.mc, _TILE.kc, _TILE.nc})
ONE_OFF = sorted({size + step for size in SIZES for step in (-1, 0, 1)})
EDGES = [
    *((size, 5, 3) for size in ONE_OFF),
    *((5, size, 3) for size in ONE_OFF),
    *((3, 5, size) for size in ONE_OFF),
    *((size, size, size) for size in ONE_OFF if size <= 65),
]
TALL, WIDE, DEEP = (2003, 3, 17), (3, 2003, 17), (3, 5, 5003)
BLOCKS = [(101, 1027, 515), (197, 33, 1031), (33, 67, 2051)]  # more than one block of m, of n and of k

SMALL = [*EMPTY_SUMS, *ONES, *PRIMES, *EDGES]
LARGE = [TALL, WIDE, DEEP, *BLOCKS]
FEW = [(1, 1, 1), (5, 7, 3), (13, 35, 19), (26, 70, 33)]  # for what multiplies the cases: layouts, scalars, epilogues

# for rungs that compile a kernel for every shape
A_DOZEN = [
    *EMPTY_SUMS[:2],
    *ONES[1:4],
    (2, 3, 5),
    (3, 3, 3),
    (4, 4, 4),
    (7, 11, 13),
    (8, 8, 8),
    (15, 16, 17),
    (16, 32, 5),
    (31, 33, 32),
]

# gemv and the skinny products that libraries serve worst
SKINNY = [(8, 130, 131), (130, 8, 131), (130, 131, 8), (1, 260, 129), (260, 1, 129), (16, 257, 64), (257, 16, 64)]

# for operands that end where memory does: every kind of tail, few enough to compile for every element type
NEAR_THE_END = [
    (1, 1, 1),
    (1, 7, 5),
    (7, 1, 5),
    (5, 6, 1),
    (17, 19, 23),
    (13, 35, 19),
    (26, 70, 33),
    (1, 130, 129),
    (9, 3, 21),
]
