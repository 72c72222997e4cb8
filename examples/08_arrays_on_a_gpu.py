"""Multiply arrays on a GPU, on the current stream: nothing waits, nothing is copied to the host."""

import gemmery as gm
from gemmery.cuda import driver

try:
    import torch
except ImportError:
    raise SystemExit("PyTorch is not installed: pip install torch") from None

missing = driver.missing() or ("" if torch.cuda.is_available() else "this PyTorch sees no CUDA device")
if missing:
    print("no GPU to use:", missing)
    raise SystemExit

a = torch.randn(1000, 500, device="cuda")
b = torch.randn(500, 300, device="cuda")
c = gm.matmul(a, b)
print("result:      ", type(c).__name__, c.dtype, c.device)

exact = a.double() @ b.double()
rounded = gm.matmul(a, b, precision="tf32")  # tensor cores, which keep 10 bits of fraction of A and B
for name, result in (("float32", c), ("tf32", rounded)):
    print(f"{name + ':':13} within {(result - exact).abs().max().item():.0e} of the exact product")

layer = gm.matmul(a.half(), b.half(), bias=torch.ones(300, device="cuda").half(), activation="gelu")
print("one launch:  ", layer.dtype, "with bias and gelu")

if torch.cuda.get_device_capability() == (9, 0):  # Hopper multiplies float8 and int8 too
    rows = a.abs().amax(1) / 448  # 448 is the largest float8_e4m3fn: a row of a is `rows` times its float8 numbers
    a8, b8 = (a / rows[:, None]).to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    result = gm.matmul(a8, b8, scale_a=rows, dtype="float32")
    print("float8:       within", f"{(result - exact).abs().max().item():.0e} of the exact product")
    first = gm.matmul(a8[:1], b8, scale_a=rows[:1], dtype="float32", batch_invariant=True)
    every = gm.matmul(a8, b8, scale_a=rows, dtype="float32", batch_invariant=True)
    print("one row:     ", torch.equal(first, every[:1]))

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    again = gm.matmul(a, b)  # queued behind earlier work on `side`
side.synchronize()
print("same bits:   ", torch.equal(again, c))

out = torch.empty_like(c)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    gm.matmul(a, b, out=out)
graph.replay()
print("captured:    ", torch.equal(out, c))

try:
    gm.matmul(a, b.cpu())
except gm.DeviceError as error:
    print("mixed:       ", error)
