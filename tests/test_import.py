"""Importing is cheap: nothing is loaded before it is used."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gemmery as gm
from gemmery.errors import EXTRAS, not_installed

pytestmark = pytest.mark.sampled(3)

PTX = Path(__file__).parents[1] / "packages/gemmery-emulator/tests" / "data" / "ptx" / "triton_add.ptx"


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded once `code` has run."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.process
def test_importing_loads_neither_numpy_nor_anything_heavier():
    added = modules_after("import gemmery; gemmery.GemmeryError") - modules_after("")
    assert not added & {"numpy", "typing", "llvmlite", "ctypes", "torch", "matplotlib", "rich", "typer", "ml_dtypes"}
    assert {name for name in added if name.startswith("gemmery")} == {"gemmery", "gemmery.errors"}


@pytest.mark.process
def test_llvm_is_loaded_by_the_first_product_that_is_compiled():
    assert "llvmlite" not in modules_after("import gemmery; gemmery.matmul; gemmery.explain")
    compiled = modules_after(
        "import os, tempfile\n"
        "os.environ['GEMMERY_CACHE_DIR'] = tempfile.mkdtemp()\n"
        "import gemmery\n"
        "gemmery.matmul([[1.0]], [[1.0]])"
    )
    assert "llvmlite" in compiled
    assert not compiled & {"torch", "matplotlib", "rich", "typer", "ml_dtypes"}


@pytest.mark.process
def test_a_product_defines_no_dataclass():
    """One takes 0.5 ms to define where a NamedTuple takes 0.07, and the first product needs twenty of them."""
    added = modules_after("import gemmery; gemmery.matmul") - modules_after("import numpy")
    assert "gemmery.api.compute" in added
    assert "dataclasses" not in added


@pytest.mark.process
def test_a_ladder_of_the_cpu_loads_nothing_of_a_gpu():
    """Neither what measures nor what reports it: the emulator and CUDA's bindings take as long as a small ladder."""
    loaded = modules_after(
        "import contextlib, io\n"
        "from gemmery_lab.cli.parser import run\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):\n"
        "    code = run(['ladder', '--rungs', 'direct', '--sizes', '16', '--no-html'])\n"
        "assert code == 0 and 'direct' in out.getvalue()"
    )
    assert {"gemmery_lab", "gemmery_lab.report"} <= loaded
    assert not loaded & {"gemmery.cuda", "gemmery_emulator.ptx", "gemmery_emulator.run", "gemmery_lab.inspection"}
    assert "cuda.bindings" not in loaded
    assert not loaded & {
        "gemmery.ladder.cuda",
        "gemmery_lab.report.emulated_tables",
        "gemmery_lab.report.page",
        "jinja2",
        "matplotlib",
    }


@pytest.mark.process
def test_emulating_ptx_needs_nothing_of_cuda():
    loaded = modules_after(
        "import pathlib, numpy, gemmery\n"
        "sys.modules['cuda'] = None  # as where the bindings are not installed\n"
        f"ptx = pathlib.Path({str(PTX)!r})\n"
        "x = numpy.ones(256, numpy.float32)\n"
        "out = numpy.zeros_like(x)\n"
        "gemmery.emulate(ptx, 'add', 1, 128, [x, x, out, numpy.int32(256), None, None])\n"
        "assert (out == 2).all()"
    )
    assert "gemmery_emulator.machine" in loaded
    assert not loaded & {"cuda.bindings", "torch", "matplotlib", "rich", "typer", "ml_dtypes"}
    assert "gemmery_lab" not in loaded


@pytest.mark.process
def test_inspecting_loads_nothing_that_measures_or_draws():
    loaded = modules_after("import gemmery; gemmery.inspect")
    assert "gemmery_lab.inspection.gather" in loaded
    assert not loaded & {"matplotlib", "rich", "jinja2", "ml_dtypes", "threadpoolctl", "gemmery_lab.measure.timing"}


HIDDEN = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"cuda", "matplotlib", "ml_dtypes", "nvidia", "rich", "threadpoolctl", "typer"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
import numpy, gemmery
def message(call):
    try:
        call()
    except gemmery.GemmeryError as error:
        return str(error)
"""


@pytest.mark.process
def test_without_the_extras_errors_name_the_command_that_installs_them():
    modules_after(
        HIDDEN + "lab, cuda = (f\"run pip install '.[{extra}]' in a checkout\" for extra in ('lab', 'cuda'))\n"
        "assert cuda in message(lambda: gemmery.inspect('simt_smem', device='h200'))\n"
        "from gemmery_lab.inspection.notebook import NotebookInspection\n"
        "assert lab in message(lambda: object.__new__(NotebookInspection)._repr_html_())\n"
        "assert lab in message(lambda: __import__('gemmery_lab').ladder())\n"
        "assert lab in message(lambda: __import__('gemmery_lab.on_cpu'))\n"
        "code = '__global__ void f(float *x) { x[0] = 1; }'\n"
        "assert cuda in message(lambda: gemmery.emulate(code, 'f', 1, 1, [numpy.zeros(1, 'f4')]))\n"
        "x = numpy.eye(3)\n"
        "assert (gemmery.matmul(x, x) == x).all() and str(gemmery.explain(x, x)) and gemmery.tensor_map\n"
    )


@pytest.mark.process
def test_the_library_alone_says_how_to_install_the_rest():
    modules_after(
        HIDDEN.replace('"cuda",', '"gemmery_emulator", "gemmery_lab",')
        + "lab = \"run pip install '.[lab]' in a checkout\"\n"
        "for name in ('emulate', 'device_memory', 'tensor_map', 'texture', 'inspect'):\n"
        "    assert f'gemmery.{name} needs gemmery_' in message(lambda: getattr(gemmery, name)), name\n"
        "    assert lab in message(lambda: getattr(gemmery, name)), name\n"
        "from gemmery.__main__ import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as error:\n"
        "    assert 'the command needs gemmery_lab: ' + lab in error.code, error.code\n"
        "x = numpy.eye(3)\n"
        "assert (gemmery.matmul(x, x) == x).all() and str(gemmery.explain(x, x))\n"
    )


@pytest.mark.process
def test_without_jax_its_module_says_how_to_install_it():
    modules_after(
        HIDDEN.replace('"cuda",', '"jax",') + "words = message(lambda: __import__('gemmery.jax'))\n"
        "assert words == 'gemmery.jax needs JAX: run pip install jax', words\n"
    )


def test_an_error_for_a_package_of_ours_is_an_install_error_and_no_other():
    ours = ModuleNotFoundError("No module named 'rich.table'", name="rich.table")
    found = not_installed(ours, "a table")
    assert isinstance(found, gm.InstallError)
    assert str(found) == "a table needs rich: run pip install '.[lab]' in a checkout of gemmery"
    other = ModuleNotFoundError("No module named 'numpyy'", name="numpyy")
    assert not_installed(other, "a table") is other


def test_the_extras_in_messages_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = {name: " ".join(lines) for name, lines in project["optional-dependencies"].items()}
    assert set(extras) == set(EXTRAS)
    for extra, packages in EXTRAS.items():
        for package in packages:
            assert package.replace("_", "-") in extras[extra].replace("_", "-") or package in (
                "gemmery_emulator",
                "gemmery_lab",
            )


def test_every_public_name_is_there_and_documented():
    assert set(gm.__all__) <= set(dir(gm))
    for name in gm.__all__:
        assert getattr(gm, name).__doc__, name
    assert gm.__version__


def test_an_unknown_name_is_an_attribute_error():
    try:
        gm.matmull  # noqa: B018
    except AttributeError as error:
        assert "matmull" in str(error)  # noqa: PT017
    else:
        raise AssertionError


@pytest.mark.process
def test_without_the_parser_of_cuda_a_kernel_is_refused_with_what_to_install():
    loaded = modules_after(
        "sys.modules['tree_sitter_cuda'] = None\n"
        "import gemmery\n"
        "try:\n"
        "    gemmery.emulate('__global__ void f() {}', 'f', 1, 1, [])\n"
        "except gemmery.errors.InstallError as error:\n"
        "    print(str(error).replace(' ', '_'))"
    )
    said = "emulating CUDA C++ needs tree_sitter_cuda: run pip install '.[lab]' in a checkout of gemmery"
    assert said.replace(" ", "_") in loaded
