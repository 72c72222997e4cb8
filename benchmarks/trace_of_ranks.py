"""Draw what four ranks do in a product of blocks, from a trace: who sends what to whom, and when.

torchrun --nproc-per-node 4 benchmarks/trace_of_ranks.py docs/pictures/ranks.svg
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import gemmery.distributed as gd
from gemmery.distributed.plan import RankEvent
from gemmery.distributed.products import explain

SIDE, STEPS, WIDTH, HEIGHT, LEFT = 2048, 4, 760, 46, 70
COLORS = {"wait": "#c9c9c9", "multiply": "#4477aa", "add": "#cc6677"}


def drawn(traces: list[list[RankEvent]], links: dict[tuple[int, int], int]) -> str:
    """Return the picture: a line of time for each rank, and below it which blocks it receives."""
    start = min(event.start for trace in traces for event in trace)
    end = max(event.end for trace in traces for event in trace)
    foot = HEIGHT * len(traces) + 24
    scale = (WIDTH - LEFT - 10) / (end - start)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {foot + 10}" font-size="11">',
        f'<rect width="{WIDTH}" height="{foot + 10}" fill="white"/>',
        '<g font-family="sans-serif">',
    ]
    for rank, trace in enumerate(traces):
        top = 8 + HEIGHT * rank
        lines.append(f'<text x="8" y="{top + 14}">rank {rank}</text>')
        for event in trace:
            x, width = LEFT + (event.start - start) * scale, max(0.5, (event.end - event.start) * scale)
            lines.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="20" fill="{COLORS[event.what]}"/>')
            if event.what == "multiply":
                lines.append(f'<text x="{x + 4:.1f}" y="{top + 14}" fill="white">step {event.part}</text>')
        senders = ", ".join(
            f"{count / 2**20:.0f} MiB from rank {sender}" for (sender, to), count in links.items() if to == rank
        )
        lines.append(f'<text x="{LEFT}" y="{top + 33}">{senders}, a part before each step</text>')
    foot = HEIGHT * len(traces) + 24
    lines.append(
        f'<text x="{LEFT}" y="{foot}">blue: multiplies; gray: waits; {(end - start) * 1e3:.0f} ms in all</text>'
    )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    half, blocks = SIDE // 2, (gd.Shard(0), gd.Shard(1))
    a, b = torch.randn(half, half), torch.randn(half, half)
    for _ in range(3):
        events: list[RankEvent] = []
        gd.matmul(a, b, placements=(blocks, blocks), mesh=(2, 2), steps=STEPS, trace=events)
    every: list[list[RankEvent]] = [[]] * 4
    dist.all_gather_object(every, events)
    if rank == 0:
        whole = gd.even((SIDE, SIDE), (2, 2), blocks)
        plan = explain(whole, whole, dtype="f32", speeds=gd.CORE, steps=STEPS)
        Path(sys.argv[1]).write_text(drawn(every, plan.links), encoding="utf-8")
    dist.destroy_process_group()
