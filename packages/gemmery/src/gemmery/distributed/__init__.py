"""Products of matrices that many ranks hold in parts: on torch.distributed, MPI and Dask.

>>> import gemmery.distributed as gd
>>> a, b = gd.even((8192, 4096), (4,), (gd.Shard(0),)), gd.even((4096, 4096), (4,), (gd.Replicate(),))
>>> gd.explain(a, b, dtype="bf16").received
0

Nothing here imports PyTorch, mpi4py or Dask until a function that needs it is called.
"""

from gemmery import load_lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gemmery.distributed.layouts import Distribution as Distribution
    from gemmery.distributed.layouts import Part as Part
    from gemmery.distributed.layouts import Partial as Partial
    from gemmery.distributed.layouts import Replicate as Replicate
    from gemmery.distributed.layouts import Shard as Shard
    from gemmery.distributed.layouts import even as even
    from gemmery.distributed.overlap import all_gather_matmul as all_gather_matmul
    from gemmery.distributed.overlap import matmul_reduce_scatter as matmul_reduce_scatter
    from gemmery.distributed.plan import CORE as CORE
    from gemmery.distributed.plan import H200 as H200
    from gemmery.distributed.plan import ProductPlan as ProductPlan
    from gemmery.distributed.plan import Speeds as Speeds
    from gemmery.distributed.products import explain as explain
    from gemmery.distributed.products import matmul as matmul
    from gemmery.distributed.styles import parallelize as parallelize

_HOMES = {
    "gemmery.distributed.layouts": ("Part", "Distribution", "Partial", "Replicate", "Shard", "even"),
    "gemmery.distributed.overlap": ("all_gather_matmul", "matmul_reduce_scatter"),
    "gemmery.distributed.plan": ("CORE", "H200", "Speeds", "ProductPlan"),
    "gemmery.distributed.products": ("explain", "matmul"),
    "gemmery.distributed.styles": ("parallelize",),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605

if not TYPE_CHECKING:
    _attribute = load_lazily(__name__, _HOMES)

    def __getattr__(name):
        if name == "dask":  # a module, which imports Dask
            from importlib import import_module

            return import_module("gemmery.distributed.dask")
        return _attribute(name)

    def __dir__():
        return [*__all__, "dask"]
