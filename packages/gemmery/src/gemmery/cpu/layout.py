"""The memory that the caller of a product and the workers share: a job, and the pool."""

from __future__ import annotations

from gemmery.cpu.abi import FIELDS, pointers, words

# The job that `run` reads, 8-byte words: a record whose alpha, beta and workspace `part` fills in, the two scalars
# (16 bytes each), and the cut. A part is `rows` x `columns` of C in `products` products of the batch.
JOB = (
    *FIELDS,
    *words("alpha_value", "alpha_high", "beta_value", "beta_high"),
    *pointers("kernel"),
    *words("at_once"),  # 1: the kernel runs `batch` products itself
    *words("threads"),
    *words("parts", "row_parts", "column_parts"),  # parts: row_parts * column_parts * groups of products
    *words("rows", "columns", "products", "workspace_bytes"),
    *words("wakes"),  # 1: enough work to wake sleepers for it alone
    *pointers("pool"),
    # The cut of a product of half the work: `symmetric.halve`; half_columns is 0 for one thread.
    *words("half_rows", "half_columns"),
    *words("half"),  # 1: the parts above the diagonal are mirrored
    # All threads pack B once, before: 0 or the function, the bytes of packed B, its strides and the columns of a part.
    *pointers("pack"),
    *words("shared_bytes", "shared_row", "shared_col", "pack_columns"),
)
JOB_AT = {name: 8 * i for i, (name, _) in enumerate(JOB)}

# The pool: functions of the C library, by address; then the state, which starts at zero. The state has pages of its
# own, which the system clears in a forked child, where there are no workers. Words that different threads write are
# 128 bytes apart: neighboring lines are fetched in pairs.
LIBC = (
    "pthread_create", "pthread_sigmask", "mmap", "munmap", "madvise", "syscall", "clock_gettime",
    "sched_yield", "sched_getcpu", "sched_getaffinity", "sched_setaffinity",
)  # fmt: skip
FUNCTIONS = {name: 8 * i for i, name in enumerate((*LIBC, "worker"))}
STATE = 1 << 16  # the largest page; the word: number of the newest job << 32 | its free places << 16 | workers in it
SLEEPING = STATE + 128  # workers that wait on the futex
BUSY = STATE + 256  # 1 while a caller uses the workers; the words up to MODE are that caller's
STARTED = BUSY + 8  # number of workers
OPEN_JOB = BUSY + 16
LAST = BUSY + 24  # when the last job ended, ns
MODE = BUSY + 32  # the floating-point mode of the caller of the open job
NEXT = STATE + 384  # index of the next part
WANTED = STATE + 512  # sleepers still to be woken
CPUS = STATE + 640  # a bit for each core on which a thread of the job runs
SLOTS = STATE + 768
# Bytes of a slot: 1 while taken (a worker's: the pool), address and size of a workspace; of a worker also its pauses
# since a job, and how many more than the least it makes before it sleeps.
SLOT = 64
CALLERS, WORKERS = 64, 255
WORKER_SLOTS = SLOTS + CALLERS * SLOT
SIZE = WORKER_SLOTS + WORKERS * SLOT

MASK = 128  # bytes of a set of cores
WIPE_ON_FORK = 18  # madvise: a forked child sees zeros (Linux 4.14); where it is not known, a copy
FUTEX = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98}  # system call, by machine
