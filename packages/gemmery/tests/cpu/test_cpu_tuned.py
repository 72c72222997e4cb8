"""Tables of `gemmery tune`: which is used, which are named and ignored, and that no bit depends on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

import gemmery as gm
from gemmery import config, dispatch, verify
from gemmery.cpu import build, target, tuned
from gemmery.cpu.target import Constants, host
from operands import place, problem, random

pytestmark = pytest.mark.sampled(3)

OTHER = Constants(mc=36, nc=512, direct_few=0.02, direct_many=0.02, streamed_rows=20, large_c=0.02, worth=100, wakes=0)
OTHER = OTHER._replace(direct_int8=1, direct_int16=1)
TABLES = [  # what each constant may be, far from the model
    OTHER,
    OTHER._replace(
        mc=500,
        nc=100_000,
        direct_few=100.0,
        direct_many=100.0,
        large_c=1000.0,
        direct_int8=1 << 20,
        direct_int16=1 << 20,
    ),
    OTHER._replace(direct_few=0.02, direct_many=50.0, streamed_rows=400, worth=10**6),
    OTHER._replace(direct_few=50.0, direct_many=0.02, streamed_rows=8, large_c=0.02),
]


def forget():
    """Let the next look for constants read a table."""
    target._constants.cache_clear()


def table():
    return tuned.table(target.described(host()), target.modeled(host())._asdict())


@pytest.fixture
def place_of_table(monkeypatch, tmp_path):
    """The file in which this machine's table is looked for; none is there yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("GEMMERY_TABLE", raising=False)
    forget()
    file = tmp_path / "gemmery" / "tables" / tuned.name(target.described(host()))
    if sys.platform != "linux":
        monkeypatch.setattr(config, "table_folders", lambda: [str(file.parent)])
    file.parent.mkdir(parents=True)
    yield file
    forget()


@pytest.fixture
def in_force(monkeypatch):
    """A function that puts constants in force for new plans."""

    def put(constants):
        monkeypatch.setattr(target, "override", constants)
        for kept in (build.forget, dispatch.plan.cache_clear, dispatch.specialized.cache_clear):
            kept()

    yield put
    put(None)


def text(machine=None, **constants):
    return json.dumps(
        {
            "gemmery": {
                "machine": {**tuned.versioned(target.described(host())), **(machine or {})},
                "constants": constants,
            }
        }
    )


def test_without_a_table_the_model_serves(place_of_table):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table() == ({}, "", "")
    assert target.constants() == target.modeled(host())


def test_a_table_replaces_the_constants_that_it_has(place_of_table):
    place_of_table.write_text(text(mc=48, direct_few=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert target.constants() == target.modeled(host())._replace(mc=48, direct_few=3)
    assert table().path == str(place_of_table)


BAD = {
    "not JSON": ("{", "damaged"),
    "nested too deeply": ("[" * 100_000, "damaged"),
    "without constants": ('{"gemmery": {"machine": {}}}', "damaged"),
    "not an object": ("[1]", "damaged"),
    "bytes of another encoding": (b"\xff\xfe", "utf-8"),
    "an unknown constant": (text(kc=96), "damaged: 'kc' is 96"),
    "text for a number": (text(mc="96"), "damaged: 'mc' is '96'"),
    "a fraction of a row": (text(mc=96.5), "damaged: 'mc' is 96.5"),
    "true": (text(mc=True), "damaged: 'mc' is True"),
    "not a number": (text(large_c=float("nan")), "damaged: 'large_c' is nan"),
    "no work at all": (text(worth=0), "damaged: 'worth' is 0"),
    "more than memory": (text(nc=1 << 40), "damaged: 'nc' is"),
    "of another version": (text({"version": "9.9"}, mc=48), f"for version 9.9, not {gm.__version__}"),
    "of another layout": (text({"layout": 99}, mc=48), "for layout 99, not 2"),
    "of layout 1": (text({"layout": 1, "stepping": None}, mc=48), "for layout 1, not 2"),
    "of another CPU": (text({"model": "Z80"}, mc=48), "for model Z80, not "),
    "of earlier steppings": (text({"stepping": [-2, -1]}, mc=48), "for steppings -2 to -1, not "),
    "of no stepping": (text({"stepping": 2}, mc=48), "damaged (TypeError"),
    "of other instructions": (text({"instructions": "abacus"}, mc=48), "for instructions abacus, not "),
    "of other caches": (text({"l2": 1}, mc=48), "for l2 1, not "),
    "of another number of cores": (text({"cores": 999}, mc=48), "for cores 999, not "),
}


@pytest.mark.parametrize(("content", "why"), BAD.values(), ids=BAD)
def test_a_table_that_does_not_fit_is_named_once_and_ignored(place_of_table, content, why):
    place_of_table.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(RuntimeWarning) as warned:
        assert {target.constants() for _ in range(3)} == {target.modeled(host())}
    (message,) = (str(each.message) for each in warned)
    assert str(place_of_table) in message
    assert why in message
    assert "`gemmery tune` measures a new table" in message
    assert table() == ({}, "", message)


def test_a_table_serves_a_range_of_steppings_whatever_the_cpu_is_called(place_of_table):
    place_of_table.write_text(text({"stepping": [0, 999], "cpu": "Another Name"}, mc=48))
    assert table().constants == {"mc": 48}


def test_a_table_that_is_named_after_the_cpu_is_named_and_ignored(place_of_table):
    old = place_of_table.with_name(tuned.older(target.described(host()))[0].rpartition(os.sep)[2])
    assert old.name != place_of_table.name
    old.write_text(text({"layout": 1}, mc=48))
    with pytest.warns(RuntimeWarning, match=f"{old.name} is ignored: CPUs of several models are called"):
        assert target.constants() == target.modeled(host())
    place_of_table.write_text(text(mc=60))
    assert table() == ({"mc": 60}, str(place_of_table), "")


CPUINFO = """\
processor\t: 0
vendor_id\t: {vendor}
cpu family\t: {family}
model\t\t: {model}
model name\t: {name}
stepping\t: {stepping}
flags\t\t: avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 {more}

processor\t: 1
stepping\t: 99
"""
ZEN4 = {"vendor": "AuthenticAMD", "family": 25, "model": 17, "name": "AMD EPYC", "stepping": 1, "more": ""}
ZEN5 = {**ZEN4, "family": 26, "model": 2}
XEON = {"vendor": "GenuineIntel", "family": 6, "model": 207, "name": "Intel(R) Xeon(R) Processor", "stepping": 2}
XEON |= {"more": "avx512_fp16"}


def told(monkeypatch, tmp_path, **of):
    """The CPU of a machine that tells this."""
    (tmp_path / "cpuinfo").write_text(CPUINFO.format(**of))
    real = open
    monkeypatch.setattr(
        target, "open", lambda path, **how: real(str(path).replace("/proc", str(tmp_path), 1), **how), raising=False
    )
    monkeypatch.setattr(target, "_grants_tiles", lambda: True)
    monkeypatch.setattr(target, "_caches", lambda: (48 << 10, 2 << 20, 0))
    monkeypatch.setattr(config, "ON_ARM", False)
    monkeypatch.setattr(target.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("GEMMERY_ISA", raising=False)
    return target.host.__wrapped__()


def test_cpus_of_one_name_have_tables_apart(monkeypatch, tmp_path):
    amx = {**XEON, "more": "avx512_fp16 amx_tile amx_bf16 amx_int8"}
    machines = [told(monkeypatch, tmp_path, **of) for of in (ZEN4, ZEN5, XEON, amx, {**XEON, "model": 143})]
    assert [(each.model, each.stepping, each.cpu) for each in machines[:3]] == [
        ("AuthenticAMD 25 17", 1, "AMD EPYC"),
        ("AuthenticAMD 26 2", 1, "AMD EPYC"),
        ("GenuineIntel 6 207", 2, "Intel(R) Xeon(R) Processor"),
    ]
    monkeypatch.setattr(target, "cores", lambda: 2)
    described = [target.described(each) for each in machines]
    assert len({tuned.name(each) for each in described}) == len(described)
    for each in described:
        usual = target.modeled(machines[0])._asdict()
        content = json.dumps({"gemmery": {"machine": tuned.versioned(each), "constants": {"mc": 48}}})
        for other in described:
            if other is each:
                assert tuned.read(content, other, usual) == {"mc": 48}
            else:
                with pytest.raises(ValueError, match="it is for "):
                    tuned.read(content, other, usual)


def test_intels_cores_with_slow_products_of_bfloat16_widen_them_with_amx_or_without(monkeypatch, tmp_path):
    dots = {of: told(monkeypatch, tmp_path, **{**XEON, "more": of}).has_bf16_dot for of in ("", "avx512_fp16")}
    assert dots == {"": True, "avx512_fp16": False}
    assert told(monkeypatch, tmp_path, **{**ZEN5, "more": "avx512_fp16"}).has_bf16_dot


def test_a_variable_names_another_table_or_none(place_of_table, monkeypatch, tmp_path):
    place_of_table.write_text(text(mc=48))
    for value, mc in (("off", target.modeled(host()).mc), (str(tmp_path / "mine.json"), 60)):
        (tmp_path / "mine.json").write_text(text(mc=60))
        monkeypatch.setenv("GEMMERY_TABLE", value)
        forget()
        assert target.constants().mc == mc
    (tmp_path / "mine.json").unlink()
    forget()
    with pytest.warns(RuntimeWarning, match=r"mine\.json is ignored: there is no such file"):
        assert target.constants() == target.modeled(host())


@pytest.mark.skipif(sys.platform != "linux", reason="XDG_DATA_HOME is Linux's")
def test_a_product_without_a_table_reads_no_json(tmp_path):
    code = "import sys, numpy, gemmery; gemmery.matmul(numpy.eye(3), numpy.eye(3)); print('json' in sys.modules)"
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path)}
    environment.pop("GEMMERY_TABLE", None)
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def shapes(draw):
    """Shapes for which the tables choose different rungs, blocks and threads."""
    m, n, k = (int(x) for x in 2 ** draw.uniform(0, [9, 9, 11]))
    return m, n, k


@pytest.mark.parametrize("name", ["f32", "f64", "f16", "int8", "complex64", "complex128"])
def test_no_bit_depends_on_the_table(name, in_force):
    draw = np.random.default_rng(7)
    rungs, plans = set(), set()
    for shape in [(300, 700, 900), (40, 600, 500), (600, 600, 40), (1, 500, 700), *(shapes(draw) for _ in range(12))]:
        m, n, k = shape
        layout = str(draw.choice(["C", "F"]))
        a, b = place(random((1, m, k), name, 1), name), place(random((1, k, n), name, 2), name, layout)
        bits = set()
        for constants in [None, *TABLES]:
            in_force(constants)
            c = place(np.ones((1, m, n), a.array.dtype), name)
            rung, config, _ = dispatch.choice(problem(a, b, c))
            launch = rung.build(problem(a, b, c), config)
            launch(a.view, b.view, c.view, threads=3)
            bits.add(c.array.tobytes())
            rungs.add(rung.name)
            plans.add((shape, rung.name, launch.plan(1, m, n, k, 3)))
        assert len(bits) == 1, (shape, layout)
    assert len(plans) > 30
    assert name not in ("f32", "f64") or rungs - {"dots"} == {"packed", "direct", "streamed", "gemv"}


DIGESTS = """
import hashlib, numpy as np, gemmery as gm
from gemmery.cpu import target
draw = np.random.default_rng(5)
digest = hashlib.sha256()
for _ in range(60):
    m, n, k = (int(x) for x in 2 ** draw.uniform(0, [9.5, 9.5, 10.5]))
    dtype = draw.choice(["f4", "f8", "c8", "f2", "i1", "i2"])
    a, b = ((9 * draw.standard_normal(shape)).astype(dtype) for shape in ((m, k), (k, n)))
    for _ in range(3):  # the third is planned for threads
        digest.update(gm.matmul(a, b).tobytes())
    digest.update(gm.matmul(np.asfortranarray(a), np.asfortranarray(b)).tobytes())
    digest.update(gm.matmul(a, gm.pack(b)).tobytes())
print(target.constants().mc, digest.hexdigest())
"""


def test_products_of_processes_with_different_tables_are_equal(tmp_path):
    printed = set()
    for at, constants in enumerate([None, *TABLES]):
        file = tmp_path / f"{at}.json"
        file.write_text(text(**(constants or target.modeled(host()))._asdict()))
        environment = {**os.environ, "GEMMERY_TABLE": str(file) if constants else "off", "GEMMERY_NUM_THREADS": "2"}
        code = [sys.executable, "-W", "error", "-c", DIGESTS]
        mc, digest = subprocess.run(code, env=environment, capture_output=True, text=True, check=True).stdout.split()
        assert int(mc) == (constants or target.modeled(host())).mc
        printed.add(digest)
    assert len(printed) == 1


@pytest.mark.parametrize("constants", TABLES)
@pytest.mark.parametrize("name", ["f32", "f64"])
def test_products_with_a_table_are_right(name, constants, in_force):
    in_force(constants)
    for m, n, k in [(130, 270, 1100), (30, 400, 400), (1, 90, 2000), (700, 700, 16)]:
        a, b = place(random((1, m, k), name, 1), name), place(random((1, k, n), name, 2), name)
        c = place(np.full((1, m, n), np.nan, a.array.dtype), name)
        dispatch.plan(problem(a, b, c)).kernel(a.view, b.view, c.view, threads=2)
        assert c.untouched_around()
        assert verify.check(c.array, a.array, b.array, verify.blocked, most_flops=1e7).error_over_bound <= 1
