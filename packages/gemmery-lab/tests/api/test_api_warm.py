"""warm(): what is compiled and stored, that nothing is left to compile, and where nothing can be stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import gemmery as gm
from gemmery import cache
from gemmery.api import warm
from gemmery.cpu import jit, pool
from gemmery.cpu.target import host
from gemmery.cuda import driver, nvrtc
from gemmery_lab import cli

stores = pytest.mark.skipif(not jit.keeps(host()), reason="no kernels of this machine are stored")
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes are POSIX's")

# Products of random shapes, strides and options, and the names of the kernels that were compiled for them.
PRODUCTS = """
import random, sys
import numpy as np
import gemmery as gm
from gemmery import tiers
from gemmery.cpu import jit
compiled, genuine = [], jit._object
jit._object = lambda target, name, text: compiled.append(name) or genuine(target, name, text)
draw = random.Random(10)
def side():
    return int(2 ** draw.uniform(0, 8))
def array(*shape):
    x = np.ones([2 * length for length in shape], dtype)
    view = x[tuple(slice(length) for length in shape)]
    turned = np.ascontiguousarray(view.swapaxes(-1, -2)).swapaxes(-1, -2)
    return draw.choice([view, view.copy(), turned, x[tuple(slice(0, 2 * length, 2) for length in shape)]])
for number in range(150):
    dtype = draw.choice(sys.argv[1].split(","))
    m, n, k, threads = side(), side(), side(), draw.choice([None, 1, 2])
    a, b = array(m, k), array(k, n)
    gm.matmul(a, b, threads=threads)
    gm.matmul(a, b, out=np.empty((n, m), dtype).T)
    gm.gemm(2, a, b, beta=1, c=np.ones((m, n), dtype))
    gm.gemv(a, np.ones(2 * k, dtype)[::2])
    gm.matmul(np.ones(k, dtype), b)
    gm.matmul(array(3, m, 5), array(3, 5, n))
    if np.dtype(dtype).kind == "f":
        gm.matmul(a, b, bias=np.ones(n, dtype), activation=draw.choice(["relu", "gelu", "silu"]))
    else:
        gm.matmul(a, b, dtype=draw.choice(["int16", "int32", "int64"]))
gm.matmul(np.ones((3, 5000), dtype), np.ones((5000, 2000), dtype))
gm.matmul(np.ones((70, 5000), dtype), np.ones((5000, 2000), dtype))
started = set(compiled)
print(sorted(name for name in started if not name.startswith(("batched", "direct_f64_", "direct_f32_"))))
"""


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """A folder with the kernels of f64 and int8, what warm() returned, and the calls of `progress`."""
    folder, calls = str(tmp_path_factory.mktemp("warm")), []
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GEMMERY_CACHE_DIR", folder)
        result = gm.warm([np.float64, "int8"], progress=lambda *call: calls.append(call))
    return folder, result, calls


@stores
def test_the_summary_counts_what_is_on_disk(warmed, monkeypatch):
    folder, result, calls = warmed
    assert result.folder == folder
    assert (result.compiled > 15, result.there) == (True, 0)
    kernels = [entry for entry in cache.listing(folder) if entry.version == jit.version()]
    assert len(kernels) >= result.compiled
    assert result.bytes <= sum(entry.size for entry in kernels)
    assert [done for done, _, _ in calls] == list(range(result.compiled + 1))
    assert {total for _, total, _ in calls} == {result.compiled}
    assert {"pool", "direct_f64"} <= {name for _, _, name in calls}
    monkeypatch.setenv("GEMMERY_CACHE_DIR", folder)
    again = gm.warm("int8")
    assert (again.compiled, 0 < again.there < result.compiled) == (0, True)


@pytest.mark.process
@stores
def test_afterwards_no_product_of_these_types_compiles(warmed):
    environment = {**os.environ, "GEMMERY_CACHE_DIR": warmed[0]}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS, "float64,int8"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@stores
def test_a_kernel_that_was_loaded_without_a_folder_is_stored(warmed, monkeypatch):
    pool.entries()
    monkeypatch.setenv("GEMMERY_CACHE_DIR", warmed[0])
    (entry,) = [name for name in os.listdir(warmed[0]) if name == jit._key(host(), "pool")]
    os.unlink(os.path.join(warmed[0], entry))
    assert gm.warm("int8").compiled == 1
    assert jit.stored(host(), "pool")


@stores
def test_the_command_prints_the_summary(warmed, monkeypatch, capsys):
    monkeypatch.setenv("GEMMERY_CACHE_DIR", warmed[0])
    assert cli.run(["warm", "--dtype", "float64,int8", "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("compiled 0 kernels in ")
    assert (out.endswith(f" KiB in {warmed[0]}\n"), err) == (True, "")
    assert cli.run(["warm", "--dtype", "f64", "--dtype", "int8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["there"] == warmed[1].compiled


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("f32", "f32 f32, f32 f64"),
        ("bf16", "bf16 bf16, bf16 f32, bf16 f64"),
        ("complex64", "complex64 complex64"),
        ("uint8", "uint8 uint8, uint8 uint16, uint8 uint32, uint8 uint64"),
        ("int64", "int64 int64"),
        ("bool", "uint8 uint8, uint8 uint32"),
    ],
)
def test_a_type_is_multiplied_into_itself_and_wider_ones(name, pairs):
    assert ", ".join(" ".join(pair) for pair in warm._pairs(name)) == pairs


@posix
@stores
def test_without_a_folder_to_store_in_the_error_tells_the_way_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("GEMMERY_CACHE_DIR", "~nobody-of-that-name")
    with pytest.raises(gm.CacheError, match="set HOME, or GEMMERY_CACHE_DIR to a folder"):
        gm.warm("int8")
    tmp_path.chmod(0o777)
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    with pytest.raises(gm.CacheError, match=r"a folder that only you can write .*GEMMERY_CACHE_DIR"):
        gm.warm("int8")
    assert cli.run(["warm"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@stores
def test_a_full_disk_is_an_error(monkeypatch, tmp_path):
    """The folder takes a small file but no kernel."""
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm, "_of_cpu", lambda names: iter([warm.WarmImage("pool", lambda: 0, list)]))
    with pytest.raises(gm.CacheError, match="make room"):
        gm.warm("int8")


def test_an_error_of_a_compiler_ends_the_others(monkeypatch, tmp_path):
    made = []

    def fail():
        raise gm.CompileError("no")

    images = [
        warm.WarmImage("first", lambda: 0, fail),
        *(warm.WarmImage(f"{i}", lambda: 0, lambda: made.append(0)) for i in range(99)),
    ]
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm, "_of_cpu", lambda names: iter(images))
    with pytest.raises(gm.CompileError, match="no"):
        gm.warm(threads=1)
    assert len(made) < 99


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"dtypes": "float23"}, gm.DTypeError, "did you mean 'f32'"),
        ({"dtypes": ["float32", 7]}, gm.DTypeError, "not supported"),
        (
            {"dtypes": "int8", "device": "a100"},
            gm.DTypeError,
            "no kernels of int8 for a100, only of f16, bf16, f32, f64",
        ),
        ({"dtypes": "float8_e4m3fn", "device": "a100"}, gm.DTypeError, "no kernels of e4m3 for a100"),
        ({"device": "h2000"}, gm.DeviceError, "did you mean 'h200'"),
        ({"device": 0}, gm.ArgumentError, "must be a name"),
        ({"threads": 0}, gm.ArgumentError, "threads=0"),
        ({"progress": True}, gm.ArgumentError, "progress=True: pass a function"),
    ],
)
def test_a_wrong_argument_is_named(arguments, error, said):
    with pytest.raises(error, match=said):
        gm.warm(**arguments)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--dtype f23", "--dtype: dtype 'f23' is not supported; did you mean"),
        ("--dtype ,", "the value is empty"),
        ("--device h2000", "did you mean 'h200'"),
        ("--threads many", "'--threads'"),
        ("f32", "unexpected extra argument"),
    ],
)
def test_a_wrong_option_is_bad_usage(line, said, capsys):
    assert cli.run(["warm", *line.split()]) == 2
    assert said in capsys.readouterr().err


def test_without_a_gpu_one_is_to_be_named(monkeypatch):
    monkeypatch.setattr(driver, "missing", lambda: "no CUDA driver is installed")
    warm.driver.find.cache_clear()
    with pytest.raises(gm.DeviceError, match="name a card instead, such as h200"):
        gm.warm(device="cuda")


def test_kernels_of_a_gpu_are_made_without_one(monkeypatch, tmp_path):
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm, "_SIDES", ())
    monkeypatch.setattr(warm, "_LAYOUTS", ("row",))
    monkeypatch.setattr(warm, "ACTIVATIONS", ())
    first = gm.warm("float64", "a100", threads=2)
    assert (first.compiled > 0, first.there) == (True, 0)
    assert {entry.version for entry in cache.listing(str(tmp_path)) if entry.kind == "cuda"} <= nvrtc.versions()
    again = gm.warm("float64", "a100")
    assert (again.compiled, again.there, again.bytes) == (0, first.compiled, first.bytes)


def test_a_kernel_that_does_not_compile_in_a_process_of_its_own_says_why():
    pytest.importorskip("cuda.bindings")
    with pytest.raises(gm.CompileError, match="kernel nothing<int> of simt_naive"):
        warm._in_a_process("simt_naive.cu", "nothing<int>", "sm_80")


def test_the_kernels_of_a_gpu_are_those_of_its_products():
    names = [name for name, _, _ in warm.images(("bf16",), "a100")]
    assert len(set(names)) == len(names)
    assert any(name.startswith("mma_pipelined<bf16, bf16, 0, Access<ROW, ROW") for name in names)
    assert any(name.startswith("gemv_") for name in names)
    for activation in range(0, 16, 4):  # none, relu, gelu, silu
        for tile in (64, 128):
            for out in ("bf16", "float"):
                assert any(
                    name.startswith(f"mma_general<bf16, {out}, {activation}, WarpTiles<{tile}, ") for name in names
                )


def test_kernels_for_many_shapes_are_made_for_every_layout_and_type(monkeypatch):
    monkeypatch.setattr(warm, "_MANY_SIDES", (64, 4096))
    assert warm.types("a100") == ("f16", "bf16", "f32", "f64")
    assert {"e4m3", "int8"} < set(warm.types("h200"))
    names = [launch.kernel for launch in warm._shared(("bf16", "e4m3", "int8"), "h200")]
    for layouts in ("ROW, COL", "ROW, ROW", "COL, COL", "COL, ROW"):
        for fused in (0, 2):  # plain, and with a bias
            tiles = {name for name in names if f"<bf16, bf16, {fused}, WgmmaTiles<bf16, {layouts}, 128" in name}
            assert tiles, (layouts, fused)
    for b, warpgroups in (("COL", 2), ("ROW", 3)):  # with every eighth row of A
        tile = f"192, 192, 4, Consumers<{warpgroups}, 32, 2>, 2, 1, 1"
        assert any(f"<bf16, bf16, 0, WgmmaTiles<bf16, ROW, {b}, {tile}>>" in name for name in names)
    assert any("<e4m3, bf16, 16, WgmmaTiles<e4m3, ROW, COL" in name for name in names)
    assert any("<i8, int, 0, WgmmaTiles<i8, ROW, COL" in name for name in names)
    assert any(name.startswith("wgmma_pack") for name in names)
    assert list(warm._shared(("bf16",), "a100")) == []
