"""Show registers, spills and occupancy of GPU kernels, from the compiler: no GPU is needed.

`gemmery inspect RUNG` shows all of it, with the code.
"""

import gemmery as gm

print(f"{'f32, n = 4096, A100':19} registers  spilled  shared KiB  warps  operations a byte  limited by")
for rung in ("simt_naive", "simt_smem", "simt_threadtile", "simt_pipelined"):
    inspection = gm.inspect(rung, n=4096, dtype="f32", device="a100")
    kernel = inspection.kernels[-1]
    shared = (kernel.static_shared + kernel.dynamic_shared) / 1024
    print(
        f"{rung:19} {kernel.registers:9} {kernel.spilled:8} {shared:11.1f} {kernel.occupancy.warps:6} "
        f"{inspection.loads.intensity:18.1f}  {inspection.loads.by}"
    )

for device in ("t4", "a100", "h200", "b200"):  # the same kernel for other architectures
    (kernel,) = gm.inspect("simt_smem", n=4096, device=device).kernels
    print(f"{device:5} {kernel.arch:8} {kernel.registers} registers, {kernel.occupancy.share:.0%} of the warps")
