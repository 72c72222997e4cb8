"""Suite files: the ones shipped load, and each mistake is named."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import gemmery_lab
from gemmery.cuda import driver
from gemmery.cuda.geometry import refusal
from gemmery.errors import ArgumentError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery_lab.measure import suite
from gemmery_lab.measure.record import Measurement
from gemmery_lab.measure.work import Work
from gemmery_lab.session import PRODUCT, entrant
from gemmery_lab.suites import refuse_slower

SHIPPED = [suite.find(name) for name in suite.names()]


def written(tmp_path, text):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_suite_loads_and_says_what_it_is(path):
    found = suite.load(path)
    assert found.name == path.stem
    assert found.about
    assert found.works
    assert len(set(found.works)) == len(found.works)


def test_the_suites_are_there():
    names = {path.stem for path in SHIPPED}
    assert names >= {"square_f32", "square_f64", "small", "mid", "skinny", "lowp", "batched", "gemv", "first_call"}


def untaken(label: str, work: Work, name: str = "h200") -> str:
    """Why a device would not run what a suite calls `label`; "" when it would. No device is asked."""
    one = entrant(label, CUDA)
    if one.rung is None:
        return ""
    problem = work.problem._replace(device=name, alignments=(16, 16, 16))
    if problem.dtype not in one.rung.dtypes:
        return f"{problem.dtype} is not of its types"
    reason = one.rung.refuses(problem)
    return reason or refusal(one.rung.geometry(problem, {**one.rung.default, **one.config}), driver.find(name))


ON_A_GPU = [found for found in map(suite.load, SHIPPED) if found.device == "cuda"]


@pytest.mark.parametrize("found", ON_A_GPU, ids=lambda found: found.name)
def test_a_gpu_takes_each_rung_of_a_shipped_suite(found):
    labels = [(label, work) for work in found.works for label in found.rungs.get(work.name, (PRODUCT,))]
    assert labels
    assert [(label, str(work), why) for label, work in labels if (why := untaken(label, work))] == []


def test_a_config_that_a_gpu_does_not_take_is_found():
    work = Work(4096, 4096, 4096, "f16", "f16")
    assert untaken("mma_pipelined stages=4", work) == ""
    assert "294912 bytes of shared memory" in untaken("mma_pipelined stages=6", work)
    assert "sm_80" in untaken("mma_pipelined stages=2", work, "t4")
    assert "4096 x 4096" in untaken("gemv_warp", work)
    assert untaken("mma_f64", work) == "f16 is not of its types"
    with pytest.raises(ArgumentError, match="stages=3"):
        untaken("simt_naive stages=3", work)


def test_every_combination_of_the_lists_is_a_product(tmp_path):
    text = '[[product]]\nshapes = [[2, 3, 4], [5, 1, 6]]\ndtype = ["f32", "int8"]\nout = "int32"\ncall = ["out", "new"]'
    works = suite.load(written(tmp_path, text)).works
    assert len(works) == 8
    assert works[0] == Work(2, 3, 4, "f32", "int32")
    assert works[-1] == Work(5, 1, 6, "int8", "int32", call="new")


def test_each_number_of_rows_meets_each_weight(tmp_path):
    works = suite.load(written(tmp_path, "[[product]]\nrows = [2, 3]\nweights = [[5, 7], [7, 5]]")).works
    assert [(work.m, work.n, work.k) for work in works] == [(2, 5, 7), (3, 5, 7), (2, 7, 5), (3, 7, 5)]


def test_contestants_on_a_gpu_may_rest_or_not(tmp_path):
    text = "device = 'cuda'\nrest = 0.05\nsustained = 1.2\n[[product]]\nsquare = [7]"
    found = suite.load(written(tmp_path, text))
    assert (found.rest, found.sustained) == (0.05, 1.2)
    assert suite.load(written(tmp_path, "[[product]]\nsquare = [7]")).rest == 0


def test_products_on_a_gpu_may_have_factors_and_groups(tmp_path):
    row = "square = [128]\ndtype = ['e4m3']\nout = 'bf16'\nscales = 'blocks'\ngroups = [2, 4]"
    works = suite.load(written(tmp_path, f"device = 'cuda'\n[[product]]\n{row}")).works
    assert [(work.dtype, work.scales, work.groups) for work in works] == [("e4m3", "blocks", 2), ("e4m3", "blocks", 4)]


def test_rungs_run_the_products_of_their_name(tmp_path):
    text = '[[product]]\nname = "which"\nsquare = [7]\nrungs = ["packed kc=8", "direct"]\n[[product]]\nsquare = [7]'
    found = suite.load(written(tmp_path, text))
    assert found.rungs == {"which": ("packed kc=8", "direct")}
    assert [work.case for work in found.works] == ["which", ""]


def test_products_on_a_gpu_may_be_in_tf32(tmp_path):
    text = "device = 'cuda'\n[[product]]\nsquare = [7]\nprecision = 'tf32'\n[[product]]\nsquare = [7]"
    found = suite.load(written(tmp_path, text))
    assert found.device == "cuda"
    assert [str(work) for work in found.works] == ["7x7x7 tf32", "7x7x7 f32"]
    assert [work.problem.precision for work in found.works] == ["tf32", ""]


def test_defaults(tmp_path):
    found = suite.load(written(tmp_path, "[[product]]\nsquare = [7]"))
    assert (found.kind, found.threads, found.rivals, found.device) == ("product", (1,), (), "cpu")
    assert found.works == (Work(7, 7, 7, "f32", "f32"),)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("about = 'no product'", "product"),
        ("product = []", "product"),
        ("product = [1]", "product"),
        ("[[product]]\nsquare = [4]\nshapes = [[4, 4, 4]]", "square"),
        ("[[product]]\ndtype = ['f32']", "square"),
        ("[[product]]\nsquare = 4", "square"),
        ("[[product]]\nsquare = [0]", "square: 0"),
        ("[[product]]\nsquare = [99999999999999999999]", "at most 1099511627776 elements"),
        ("[[product]]\nsquare = [64]\nbatch = [1000000000]", "at most 1099511627776 elements"),
        ("[[product]]\nsquare = [true]", "square: True"),
        ("[[product]]\nsquare = []", "square"),
        ("[[product]]\nshapes = [[4, 4]]", r"shapes: \[4, 4\]"),
        ("[[product]]\nshapes = [4]", "shapes"),
        ("[[product]]\nrows = [4]", "weights"),
        ("[[product]]\nsquare = [4]\ngroups = [2]", "groups: only"),
        ("device = 'cuda'\n[[product]]\nsquare = [4]\ngroups = [2]\nbatch = [2]", "neither batch"),
        ("device = 'cuda'\n[[product]]\nsquare = [4]\nscales = 'rows'", "scales = 'rows'"),
        ("rest = 1\n[[product]]\nsquare = [4]", "cuda"),
        ("device = 'cuda'\nrest = -1\n[[product]]\nsquare = [4]", "number of seconds"),
        ("device = 'cuda'\nsustained = true\n[[product]]\nsquare = [4]", "number of seconds"),
        ("[[product]]\nrows = [4]\nweights = [[4, 4, 4]]", r"must be \[n, k\]"),
        ("[[product]]\nrows = [4]\nweights = [[4, 4]]\nsquare = [4]", "either square"),
        ("[[product]]\nsquare = [4]\ndtype = 'f32'", "dtype"),
        ("[[product]]\nsquare = [4]\ndtype = ['float8']", "'float8'"),
        ("[[product]]\nsquare = [4]\nout = 'float8'", "'float8'"),
        ("[[product]]\nsquare = [4]\ncall = ['in']", "'in'"),
        ("[[product]]\nsquare = [4]\na = 'diagonal'", "'diagonal'"),
        ("[[product]]\nsquare = [4]\nvector = true", "vector"),
        ("[[product]]\nsquare = [4]\nvector = 1", "vector"),
        ("[[product]]\nsquare = [4]\nbatches = [1]", "'batches'"),
        ("[[product]]\nsquare = [4]\nbatch = 1", "batch"),
        ("[[product]]\nsquare = [4]\n[[product]]\nsquare = [-1]", "product 2"),
        ("kind = 'gpu'\n[[product]]\nsquare = [4]", "'gpu'"),
        ("device = 'gpu'\n[[product]]\nsquare = [4]", "device = 'gpu'"),
        ("kind = 'call'\n[[product]]\nsquare = [4]", "only for suites with device"),
        ("[[product]]\nsquare = [4]\nprecision = 'tf32'", "only for suites with device"),
        ("device = 'cuda'\n[[product]]\nsquare = [4]\nprecision = 'tf16'", "'tf16'"),
        ("device = 'cuda'\n[[product]]\nsquare = [4]\ndtype = ['f64']\nprecision = 'tf32'", "only for products of f32"),
        ("threads = 2\n[[product]]\nsquare = [4]", "threads"),
        ("rivals = 'numpy'\n[[product]]\nsquare = [4]", "rivals"),
        ("rivals = [1]\n[[product]]\nsquare = [4]", "rivals"),
        ("kind = 'emulator'\nrivals = ['numpy']\n[[product]]\nsquare = [4]", "there are no rivals"),
        ("about = 1\n[[product]]\nsquare = [4]", "about"),
        ("speed = 9\n[[product]]\nsquare = [4]", "'speed'"),
        ("[[product]]\nsquare = [4]\nrungs = ['packed']", "name"),
        ("[[product]]\nsquare = [4]\nname = 'a'\nrungs = []", "at least one"),
        ("[[product]]\nsquare = [4]\nname = 'a'\nrungs = ['packed', 'packed']", "none twice"),
        ("[[product]]\nsquare = [4]\nname = 'a'\nrungs = [1]", "rungs = 1"),
        ("[[product]]\nsquare = [4]\nname = 'a'\nrungs = ['packed']\ncall = ['out']", "call"),
        (2 * "[[product]]\nsquare = [4]\nname = 'a'\nrungs = ['packed']\n", "product 2: name = 'a'"),
        ("kind = 'calls'\n[[product]]\nsquare = [4]\ncall = ['a @ c']", "'a @ c': it must be one of a @ b, "),
        ("kind = 'calls'\n[[product]]\nsquare = [4]\narrays = 'cupy'", "'cupy': it must be one of numpy, torch"),
        ("kind = 'calls'\n[[product]]\nsquare = [4]\narrays = 'torch'\ncall = ['f32 by f64']", "'f32 by f64'"),
        ("kind = 'calls'\n[[product]]\nsquare = [4]\ndtype = ['f64']", "'dtype' is not known"),
        ("kind = 'calls'\n[[product]]\nsquare = [99999999999]", "at most 1099511627776 elements"),
        ("device = 'cuda'\nkind = 'calls'\n[[product]]\nsquare = [4]", 'only for suites with device = "cpu"'),
        ("[[product]]\nsquare = [4]\narrays = 'torch'", "'arrays' is not known"),
        ("kind = 'new_shapes'\n[[product]]\ncount = 4", "largest: 0 must be"),
        ("kind = 'new_shapes'\n[[product]]\ncount = 4\nlargest = [8]", r"largest: \[8\] must be"),
        ("kind = 'new_shapes'\n[[product]]\ncount = 4\nlargest = 8\nsquare = [4]", "'square' is not known"),
        ("kind = 'new_shapes'\n[[product]]\ncount = 99999999\nlargest = 9999", "at most 1099511627776 elements"),
        ("threads = ['some']\n[[product]]\nsquare = [4]", "threads: 'some' must be"),
        ("threads = []\n[[product]]\nsquare = [4]", "threads: the list is empty"),
        ("[[product", "not TOML"),
    ],
)
def test_a_mistake_is_named_with_its_file(tmp_path, text, named):
    with pytest.raises(ArgumentError, match=rf"mine\.toml.*{named}"):
        suite.load(written(tmp_path, text))


def test_a_missing_suite(tmp_path):
    with pytest.raises(ArgumentError, match=r"absent\.toml"):
        suite.load(tmp_path / "absent.toml")


def test_suites_come_with_the_package():
    assert all(path.is_relative_to(Path(gemmery_lab.__file__).parent) for path in SHIPPED)


@pytest.mark.parametrize(("name", "said"), [("smal", "did you mean 'small'?"), ("zzz", "known: batched, ")])
def test_an_unknown_suite_is_named_with_the_one_that_was_meant(name, said):
    with pytest.raises(ArgumentError, match=re.escape(said)):
        suite.find(name)


def test_suites_of_the_cpu_take_every_rival():
    loaded = [suite.load(path) for path in SHIPPED]
    some = {found.name: found.rivals for found in loaded if found.device == "cpu" and found.rivals}
    assert some == dict.fromkeys(("findings", "first_call", "new_shapes", "tiers"), ("numpy",)) | {
        "calls": ("numpy", "torch"),
        "decode": ("torch",),  # NumPy takes minutes for the largest of 16-bit and 8-bit types
        "numpy": ("numpy", "numpy_installed"),
        "narrow": ("torch",),  # NumPy takes minutes for its largest
    }


class Rival:
    def __init__(self, name, missing=""):
        self.name, self.missing = name, lambda: missing


RIVALS = [Rival("numpy"), Rival("torch"), Rival("mkl"), Rival("absent", "absent is not installed")]


@pytest.mark.parametrize(
    ("own", "wanted", "chosen", "left_out"),
    [
        ((), (), ("numpy", "torch", "mkl", "absent"), {}),
        (("numpy",), (), ("numpy",), dict.fromkeys(("torch", "mkl"), "suite mine leaves it out")),
        ((), ("numpy",), ("numpy",), dict.fromkeys(("torch", "mkl"), "not among the rivals asked for: numpy")),
        (("numpy",), ("numpy", "torch"), ("numpy", "torch"), {"mkl": "not among the rivals asked for: numpy, torch"}),
    ],
)
def test_rivals_that_are_left_out_are_named(own, wanted, chosen, left_out):
    mine = suite.Suite("mine", "", "product", (Work(4, 4, 4, "f32", "f32"),), (1,), own)
    assert suite.taking_part(mine, wanted, RIVALS) == (chosen, left_out)


def test_a_first_product_is_compared_with_numpys():
    mine = suite.Suite("mine", "", "first_call", (Work(4, 4, 4, "f32", "f32"),), (1,), ())
    chosen, left_out = suite.taking_part(mine, ("torch",), RIVALS)
    assert chosen == ()
    assert left_out["torch"] == "only NumPy's first product is timed"


def test_a_choice_that_loses_to_another_rung_is_refused(tmp_path):
    labels = ("gm.matmul", "simt_smem", "simt_naive")
    own = Measurement("s", "gm.matmul", 4, 5, 6, "f32", "f32", 1, 1, 0.5, 0.4, 0.6, 9, 240, 100, note="simt_smem")
    even = replace(own, versus={"simt_smem": 0.98, "simt_naive": 3.0, "cublas": 0.5}, spread={"simt_smem": 0.0})
    refuse_slower([even], labels)
    noisy = replace(even, versus={"simt_smem": 0.9}, spread={"simt_smem": 0.08})
    refuse_slower([noisy], labels)
    with pytest.raises(RefusedError, match=r"1\.11 of the time of simt_smem"):
        refuse_slower([replace(noisy, spread={"simt_smem": 0.01})], labels)
    file = tmp_path / "mine.toml"
    file.write_text('kind = "choices"\ndevice = "cuda"\n[[product]]\nname = "x"\nrungs = ["simt_smem"]\nsquare = [4]\n')
    with pytest.raises(ArgumentError, match=r"begin with 'gm\.matmul'"):
        suite.load(file)
