"""Every CUDA rung compiles for the architectures it claims, without spills, small enough to run; no GPU is needed."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from gemmery import cache, config, dtypes
from gemmery.cuda import nvrtc
from gemmery.cuda.choose.data import INSTANCES
from gemmery.cuda.device import ARCHS, KNOWN, STATIC_SHARED
from gemmery.cuda.geometry import refusal
from gemmery.errors import CompileError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem

pytest.importorskip("cuda.bindings")

KERNELS = Path(nvrtc.__file__).with_name("kernels")
DEVICES = {device.arch: device for device in KNOWN.values()}
FULL = "sm_90a"  # every element type here; on the others one each, so that all types meet all generations
SHAPES = [(512, 512, 512), (512, 1, 512), (1, 512, 512), (24, 24, 24), (32, 32, 32)]


def launches(rung, name, arch, **options):
    """The geometries of a small problem that the rung takes in this element type; none where it refuses the device."""
    refusals = []
    precisions = ("", "tf32") if name == "f32" else ("",)
    for (m, n, k), b_layout, precision in itertools.product(SHAPES, ("row", "col"), precisions):
        problem = Problem(
            m,
            n,
            k,
            name,
            "int32" if name == "int8" else dtypes.written(name),
            b_layout=b_layout,
            device=DEVICES[arch].name,
            precision=precision,
            **options,
        )
        reason = rung.refuses(problem)
        if not reason:
            try:
                geometry = rung.geometry(problem, rung.default)
                reason = refusal(geometry, DEVICES[arch])
            except RefusedError as error:
                reason = str(error)
        if not reason:
            return [*geometry.before, geometry]
        refusals.append(reason)
    assert all(len(reason.split()) > 3 for reason in refusals), refusals
    return []


def check(geometry, arch):
    """It compiles, spills nothing, and one block of it fits on a multiprocessor."""
    limits = DEVICES[arch].limits
    report = nvrtc.code(geometry.source, geometry.kernel, arch).report
    what = f"{geometry.kernel} for {arch}: {report}"
    assert report.registers > 0, what
    assert report.spill_stores == report.spill_loads == 0, what
    warps = -(-geometry.threads // 32)
    assert -(-report.registers // 8) * 8 * 32 * warps <= limits.registers_sm, what  # given out by 8 a thread
    assert report.shared <= STATIC_SHARED, what
    assert report.shared + geometry.shared <= limits.shared, what


@pytest.mark.compiler
@pytest.mark.many
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rung", CUDA, ids=lambda rung: rung.name)
def test_a_rung_compiles(rung, arch, sample):
    names = rung.dtypes if arch == FULL else rung.dtypes[ARCHS.index(arch) % len(rung.dtypes) :][:1]
    for name in sample(names, 3):
        found = launches(rung, name, arch)
        assert found or arch != FULL, f"{rung.name} takes no problem in {name}"
        for geometry in found:
            check(geometry, arch)


@pytest.mark.compiler
@pytest.mark.many
@pytest.mark.parametrize("rung", CUDA, ids=lambda rung: rung.name)
def test_a_rung_compiles_with_all_that_may_happen_to_a_sum(rung):
    for geometry in launches(rung, rung.dtypes[0], FULL, epilogue="bias+gelu", scaled=True):
        check(geometry, FULL)


@pytest.mark.parametrize("rung", CUDA, ids=lambda rung: rung.name)
def test_a_rung_says_what_it_is(rung):
    assert rung.source == f"cuda/kernels/{launches(rung, rung.dtypes[0], FULL)[-1].source}"
    assert rung.parent is None or rung.parent in {other.name for other in CUDA}
    assert rung.parent != rung.name
    assert rung.idea
    assert rung.lesson
    for key, values in rung.space.items():
        assert rung.default[key] in values, key


def test_a_kernel_file_opens_with_its_idea_and_needs_no_other_header():
    for path in sorted(KERNELS.iterdir()):
        lines = path.read_text().splitlines()
        comment = next((at for at, line in enumerate(lines) if not line.startswith("//")), len(lines))
        assert 1 <= comment <= 12, path
        own = path.name not in ("ptx.cuh", "ptx_hopper.cuh")
        wrong = r"\s*#\s*include\s*<|.{121}" + (r"|.*\basm\b" if own else "")
        assert [line for line in lines if re.match(wrong, line)] == [], path


def test_every_kernel_file_is_launched_by_something():
    python = "".join(path.read_text() for path in KERNELS.parents[1].rglob("*.py"))
    assert [path.name for path in KERNELS.glob("*.cu") if path.stem not in python] == []


SPILLING = """
template <int N> __global__ void __launch_bounds__(1024) spilling(float* x) {
  float held[N];
#pragma unroll
  for (int i = 0; i < N; ++i) held[i] = x[threadIdx.x * N + i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) x[threadIdx.x * N + i] = held[N - 1 - i];
}
"""


@pytest.mark.compiler
def test_a_spill_is_seen(monkeypatch):
    monkeypatch.setattr(nvrtc, "text", lambda source: SPILLING)
    program = nvrtc.compiled("spilling.cu", "spilling<80>", "sm_80")
    report = nvrtc.report(program.log, program.entry)
    assert report.spill_stores > 0
    assert report.spill_loads > 0
    assert report.registers == 64


@pytest.mark.compiler
def test_what_does_not_compile_says_why(monkeypatch):
    monkeypatch.setattr(nvrtc, "text", lambda source: "template <int N> __global__ void broken() { undeclared = N; }")
    with pytest.raises(CompileError, match=r"broken<1> of broken\.cu did not compile for sm_80(.|\n)*undeclared"):
        nvrtc.compiled("broken.cu", "broken<1>", "sm_80")


KERNEL = ("simt_naive.cu", "simt_naive<float, float, 0>", "sm_80")


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """The compilations done from now on, with an empty cache."""
    done = []
    compiled = nvrtc.compiled

    def counted(*given):
        done.append(given)
        return compiled(*given)

    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "compiled", counted)
    return done


@pytest.mark.compiler
def test_an_architecture_that_the_compiler_lacks_is_named_with_those_it_has():
    with pytest.raises(
        CompileError, match=r"did not compile for sm_35: NVRTC [0-9.]+ does not support it; use one of .*sm_90"
    ):
        nvrtc.compiled("simt_naive.cu", "simt_naive<float, float, 0, 32>", "sm_35")


@pytest.mark.compiler
def test_a_kernel_is_compiled_once(compilations):
    assert nvrtc.code(*KERNEL) == nvrtc.code(*KERNEL)
    with_code = nvrtc.ptx(*KERNEL)
    assert len(compilations) == 1
    for entry in Path(config.cache_dir()).iterdir():
        entry.unlink()
    assert nvrtc.ptx(*KERNEL) == with_code  # the same without ptxas
    assert len(compilations) == 2


@pytest.mark.compiler
def test_another_instance_or_architecture_is_compiled_anew(compilations):
    source, kernel, _ = KERNEL
    assert nvrtc.code(*KERNEL).cubin != nvrtc.code(source, "simt_naive<double, double, 0>", "sm_80").cubin
    assert nvrtc.code(*KERNEL).cubin != nvrtc.code(source, kernel, "sm_90a").cubin
    assert len(compilations) == 3


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("old", "new"), [("int j = ", "int j = 1 + "), ("S sum = ZeroOf<S>::value();", "S sum = S(1);")]
)
def test_a_changed_source_is_compiled_anew(compilations, monkeypatch, old, new):
    """The file itself, or that of its parent, which it includes."""
    before, text = nvrtc.code(*KERNEL), nvrtc.text
    assert (old in text("simt_naive.cu")) != (old in text("simt_single_block.cu"))
    monkeypatch.setattr(nvrtc, "text", lambda source: text(source).replace(old, new))
    assert nvrtc.code(*KERNEL).cubin != before.cubin
    assert len(compilations) == 2


@pytest.mark.compiler
def test_a_changed_header_is_compiled_anew(compilations, monkeypatch):
    nvrtc.code(*KERNEL)
    headers = {**nvrtc.headers(), "epilogue.cuh": nvrtc.headers()["epilogue.cuh"] + "// more\n"}
    monkeypatch.setattr(nvrtc, "headers", lambda: headers)
    nvrtc._shared.cache_clear()
    try:
        nvrtc.code(*KERNEL)
    finally:
        nvrtc._shared.cache_clear()
    assert len(compilations) == 2


@pytest.mark.compiler
@pytest.mark.parametrize("damage", [lambda old: old[:-1], lambda old: old[:100] + b"\xff" + old[101:], lambda old: b""])
def test_a_damaged_entry_is_a_miss(compilations, damage):
    before = nvrtc.code(*KERNEL)
    (entry,) = (path for path in Path(config.cache_dir()).iterdir() if path.name.startswith("cuda-"))
    damaged = damage(entry.read_bytes())
    assert damaged != entry.read_bytes()
    entry.write_bytes(damaged)
    assert cache.read(config.cache_dir(), entry.name) is None
    assert nvrtc.code(*KERNEL) == before
    assert len(compilations) == 2


# A warpgroup that adds to the sums of products that may still be under way, and one that reads them by an index.
PRODUCTS = """
using u64 = unsigned long long;
template <int EARLY, int LOCAL> __global__ void multiply(u64 a, u64 b, int steps, float* out) {
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = 0;
  for (int step = 0; step < steps; ++step) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "l"(a + step), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (EARLY) sum[0] += 1;
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  float copy[64];
  for (int i = 0; i < LOCAL; ++i) copy[i] = sum[i % 4] + out[i];
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = LOCAL ? copy[steps * i % 64] : sum[i];
}
"""


@pytest.mark.compiler
def test_products_by_wgmma_that_wait_for_each_other_fail_the_build():
    def build(instance, arch="sm_90a"):
        return nvrtc.compiled("multiply.cu", instance, arch, texts={"multiply.cu": PRODUCTS}, alone=True)

    assert nvrtc.report(build("multiply<0, 0>").log, build("multiply<0, 0>").entry).registers > 0
    with pytest.raises(CompileError, match=r"multiply<1, 0> of multiply.cu .* slow on sm_90a: \(C75\d\d\)"):
        build("multiply<1, 0>")
    with pytest.raises(CompileError, match=r"bytes of local memory.*make the tile smaller"):
        build("multiply<0, 64>")
    assert "wgmma.mma_async" in build("multiply<1, 0>", "compute_90a").ptx  # which the emulator runs


def test_the_report_of_a_kernel_begins_where_ptxas_compiles_it():
    """Warnings before it name the kernel too."""
    log = (
        "ptxas info    : (C7517) wgmma.wait_group is injected in function 'f'\n"
        "ptxas info    : Compiling entry function 'f' for 'sm_90a'\n"
        "ptxas         .     8 bytes stack frame, 4 bytes spill stores, 2 bytes spill loads\n"
        "ptxas info    : Used 30 registers, used 0 barriers, 16 bytes smem\n"
    )
    assert nvrtc.report(log, "f") == nvrtc.Report(30, 16, 8, 4, 2)
    assert nvrtc.serialized(log, "f").startswith("(C7517) wgmma.wait_group is injected")
    for code in (7507, 7520):
        assert "bytes of local memory" in nvrtc.serialized(log.replace("C7517", f"C{code}"), "f")


@pytest.mark.compiler
@pytest.mark.many
@pytest.mark.parametrize(("name", "out", "epilogue"), [("bf16", "bf16", "bias"), ("int8", "int32", "")])
def test_the_largest_tile_of_the_library_has_registers_for_its_end(name, out, epilogue):
    """192 sums a thread, and either every step of an epilogue or results of 32 bits."""
    tile = max(INSTANCES, key=lambda tile: tile.bm * tile.bn)
    config = {key: getattr(tile, key) for key in ("bm", "bn", "stages", "cm", "cn")}
    problem = Problem(4096, 4096, 4096, name, out, b_layout="col", epilogue=epilogue, device="h200")
    rung = find(CUDA, "wgmma_epilogue")
    launch = rung.geometry(problem, {**rung.default, **config})
    assert nvrtc.code(launch.source, launch.kernel, "sm_90a").report.registers == 168


@pytest.mark.compiler
def test_three_warpgroups_have_registers_for_a_finished_tile_beside_the_next_one():
    """Of 192 rows; the largest need is that of A and B whose sides are adjacent."""
    problem = Problem(3000, 3000, 3000, "bf16", "bf16", a_layout="col", b_layout="row", device="h200")
    rung = find(CUDA, "wgmma_epilogue")
    launch = rung.geometry(problem, {**rung.default, "bm": 192, "bn": 192, "stages": 4, "cm": 2, "cn": 1})
    assert launch.block[0] == 512
    assert nvrtc.code(launch.source, launch.kernel, "sm_90a").report.registers == 128
