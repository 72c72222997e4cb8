"""Run the ladder from Python and print every rung's record."""

import gemmery_lab as lab

run = lab.ladder(["scalar_naive", "scalar_reordered", "simd_row", "simd_blocked", "packed"], sizes=[256], threads=1)

print(run.machine.cpu)
for m in run.measurements:
    if m.refused:
        print(f"{m.kernel:18} not run: {m.refused}")
        continue
    against = "".join(f", {ratio:.2f}x {rival}" for rival, ratio in m.versus.items())
    print(f"{m.kernel:18} {m.gflops:8.2f} GFLOP/s, {m.gflops / m.peak_gflops:4.0%} of the peak{against}")
