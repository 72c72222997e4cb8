"""Products over ranks that are processes: of torch.distributed on Gloo, and of MPI."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
SHARED = Path(__file__).parents[1] / "shared"
pytestmark = pytest.mark.process


def environment():
    path = os.pathsep.join([str(SHARED), *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)])
    return {**os.environ, "PYTHONPATH": path, "GEMMERY_NUM_THREADS": "1"}


def gloo(ranks, cases, folder):
    pytest.importorskip("torch.distributed")
    program, meeting = str(PROGRAMS / "gloo_ranks.py"), str(folder / "meeting")
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(ranks), meeting, cases],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(said)


@pytest.mark.many(4)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_of_gloo_until_one_dies_which_is_an_error_on_the_others(tmp_path, ranks):
    """All in one group: to start a rank takes longer than all its products."""
    gloo(ranks, f"products,{'pairs,' if ranks > 3 else ''}overlapped,block,one_dies", tmp_path)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.many(2))])
def test_ranks_of_mpi(ranks):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install mpi4py mpich")
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("there is no mpiexec: pip install mpich")
    command = [mpiexec, "-n", str(ranks), sys.executable, str(PROGRAMS / "mpi_ranks.py")]
    done = subprocess.run(command, check=False, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_imported_before_it_is_asked_for():
    packages = [name for name in ("torch", "mpi4py", "dask", "distributed") if importlib.util.find_spec(name)]
    code = f"import sys, gemmery.distributed as gd; gd.explain; print([n for n in {packages} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
