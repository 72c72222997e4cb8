"""gemmery.jax on four devices: cut operands stay where they are, and gradients inside shard_map are jnp's.

XLA reads the number of devices when it starts, so one process of its own runs each case: values and shardings of
`matmul` beside those of `jax.numpy.matmul`, and the collectives of the compiled program.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax", reason="JAX is not installed")

START = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from gemmery.jax import matmul

mesh, typed = Mesh(np.array(jax.devices()), ("d",)), jax.make_mesh((4,), ("d",))
square, typed_square = Mesh(np.array(jax.devices()).reshape(2, 2), ("d", "e")), jax.make_mesh((2, 2), ("d", "e"))
draw = lambda *shape: np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype("f4")
x, w = draw(8, 12), draw(12, 16)  # small integers: float32 has every sum of three products exactly

def put(array, mesh, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))

def gradients(f):
    return jax.grad(lambda a, b: (f(a, b) ** 2).sum(), (0, 1))

def same(build, shardings=True):
    for got, expected in zip(*(jax.tree.leaves(build(f)) for f in (matmul, jnp.matmul)), strict=True):
        assert np.array_equal(got, expected), (got, expected)
        assert not shardings or got.sharding == expected.sharding, (got.sharding, expected.sharding)

def collectives(f, *operands):
    text = jax.jit(f).lower(*operands).compile().as_text()
    return set(re.findall("all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute", text))
"""

CASES = {
    "jit": """
        cuts = [(), ("d",), (None, "d")]
        for of_x in cuts:
            for of_w in cuts:
                a, b = put(x, mesh, *of_x), put(w, mesh, *of_w)
                for step in (lambda f: f, gradients):
                    same(lambda f: jax.jit(step(f))(a, b))
                    if of_x != (None, "d") or of_w:  # there the sums are added, and jnp gathers an operand
                        assert collectives(step(matmul), a, b) == collectives(step(jnp.matmul), a, b)
        rows = put(x, mesh, "d")
        assert jax.jit(matmul)(rows, w).sharding.spec == P("d")
        assert not collectives(matmul, rows, w)
        assert not collectives(matmul, x, put(w, mesh, None, "d"))
        assert collectives(gradients(matmul), rows, put(w, mesh)) == {"all-reduce"}
    """,
    "batches": """
        a, b, c = draw(4, 6, 12), draw(2, 4, 12, 10), draw(12, 10)
        for m in (square, typed_square):
            operands = [
                (put(a, m, "d", "e"), put(c, m)),
                (put(a, m, "d"), put(b, m, None, "d", None, "e")),
                (put(a, m, "d"), put(b, m, "e", "d")),
                (put(x, m, "d"), put(c[:, 0], m)),
            ]
            for step in (lambda f: f, gradients):
                for each in operands:
                    same(lambda f: jax.jit(step(f))(*each))
                same(lambda f: jax.jit(step(jax.vmap(f, (0, None))))(*operands[0]))
    """,
    "sides_that_the_devices_do_not_divide": """
        cut = lambda z: jax.lax.with_sharding_constraint(z, NamedSharding(mesh, P("d")))
        same(lambda f: jax.jit(lambda x: f(cut(x[:7]), w))(x))
        same(lambda f: jax.jit(lambda w: f(x[:, :10], cut(w[:10])))(w))
    """,
    "sums_of_half_precision_are_rounded_once": """
        for dtype in ("bfloat16", "float16"):
            a = np.zeros((2, 4096), dtype)
            a[:, ::1024] = [[256, 1, 1, -256]] * 2
            b = np.ones((4096, 2), dtype)
            assert (jax.jit(matmul)(put(a, mesh, None, "d"), put(b, mesh, "d")) == 2).all(), dtype
    """,
    "typed": """
        for of_x, of_w in ((("d",), ()), ((), (None, "d")), (("d",), ("d",)), ((), ("d",))):
            a, b = put(x, typed, *of_x), put(w, typed, *of_w)
            same(lambda f: (jax.jit(f)(a, b), jax.jit(gradients(f))(a, b)))
            with jax.set_mesh(typed):
                same(lambda f: (f(a, b), gradients(f)(a, b), jax.jit(gradients(f))(a, b)))
                same(lambda f: jax.jit(jax.jacrev(lambda a: gradients(f)(a, b)[1]))(a))
        assert (jax.jit(matmul)(put(x, typed, None, "d"), put(w, typed, "d")) == x @ w).all()
        assert jax.typeof(matmul(put(x, typed, "d"), w)) == jax.typeof(matmul(put(x, typed, "d"), put(w, typed)))
    """,
    "shard_map": """
        over = lambda f, *of, **more: jax.shard_map(f, mesh=mesh, in_specs=of[:-1], out_specs=of[-1], **more)
        loss = lambda f: lambda w, x: jax.lax.pmean((f(x, w) ** 2).sum(), "d")
        same(lambda f: jax.jit(over(jax.grad(loss(f), (0, 1)), P(), P("d"), (P(), P("d"))))(w, x))
        rows = lambda f: over(f, P("d"), P(), P("d"))
        same(lambda f: (rows(f)(x, w), gradients(rows(f))(x, w), rows(f)(x, w[:, 0])))
        same(lambda f: gradients(over(f, P("d"), P(), P("d"), check_vma=False))(x, w))
        same(lambda f: jax.jacrev(lambda w: gradients(rows(f))(x, w)[0])(w))
        same(lambda f: gradients(over(lambda a, b: jax.lax.psum(f(a, b), "d"), P(None, "d"), P("d"), P()))(x, w))
        b = draw(8, 5, 12)
        same(lambda f: gradients(over(jax.vmap(f, (0, None)), P("d"), P(), P("d")))(b, w))
        same(lambda f: gradients(jax.vmap(rows(f), (1, None)))(b, w))
        some = lambda f: jax.shard_map(f, mesh=square, in_specs=(P("d"), P()), out_specs=P("d"), axis_names={"d"})
        a, c = put(x, square, "d"), put(w, square, None, "e")
        same(lambda f: (jax.jit(some(f))(a, c), jax.jit(gradients(some(f)))(a, c)), shardings=False)
        same(lambda f: jax.pmap(f, in_axes=(0, None))(x.reshape(4, 2, 12), w), shardings=False)
    """,
    "the_older_partitioner": """
        jax.config.update("jax_use_shardy_partitioner", False)
        result = jax.jit(matmul)(put(x, mesh, "d"), w)
        assert result.sharding.spec == P("d")
        assert (result == x @ w).all()
        assert (jax.jit(matmul)(put(x, mesh, None, "d"), put(w, mesh, "d")) == x @ w).all()
    """,
}


@pytest.mark.process
@pytest.mark.many(4)
@pytest.mark.parametrize("case", CASES)
def test_on_four_devices(case):
    lines = [line.removeprefix("        ") for line in CASES[case].splitlines()]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", START + "\n".join(lines)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
