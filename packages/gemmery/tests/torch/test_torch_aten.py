"""gemmery's kernels below PyTorch's own operators: values, gradients, what is passed on, and what a table says."""

import pytest

torch = pytest.importorskip("torch")

import gemmery.torch as gt  # noqa: E402
from gemmery.errors import ArgumentError, RefusedError  # noqa: E402
from gemmery.torch import aten  # noqa: E402

if not hasattr(torch.library, "get_kernel"):
    pytest.skip("this PyTorch has no torch.library.get_kernel", allow_module_level=True)

ALWAYS = {name: {"1x512x512": 9.0, "32x32x32": 9.0} for name in (*aten.TYPES, *aten.APART)}


@pytest.fixture
def served(monkeypatch):
    """The operators of which gemmery computes products, one name for each product."""
    names = []

    def noted(name, function):
        def call(*arguments, **options):
            names.append(name)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(aten, "_OURS", {name: noted(name, ours) for name, ours in aten._OURS.items()})
    with gt.install(ALWAYS):
        yield names
    assert not aten._libraries


def numbers(*shape, dtype):
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(-99, 99, shape, dtype=dtype)


@pytest.mark.parametrize("name", aten.TYPES)
def test_values(served, name):
    dtype = getattr(torch, name)
    a, b, c = (numbers(*shape, dtype=dtype) for shape in ((70, 64), (64, 50), (50,)))
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    turned, tolerance = numbers(64, 70, dtype=dtype).t(), 2e-2 if dtype.is_floating_point else 0
    exact, of_turned = (torch.from_numpy(x.to(wide).numpy() @ b.to(wide).numpy()) for x in (a, turned))
    results = [(a @ b, exact), (torch.bmm(a[None], b[None])[0], exact)]
    results += [(torch.addmm(c, a, b), c.to(wide) + exact), (torch.addmm(c, a, b, beta=0, alpha=2), 2 * exact)]
    results += [(a[:2] @ b, exact[:2]), (turned @ b, of_turned)]
    results += [(torch.baddbmm(c, a[None], b[None])[0], c.to(wide) + exact)]
    for result, expected in results:
        assert result.dtype == dtype
        assert torch.allclose(result.to(wide), expected.to(dtype).to(wide), rtol=tolerance, atol=tolerance * 20)
    assert served == ["mm", "bmm", "addmm", "addmm", "mm", "mm", "baddbmm"]


def test_int_mm(served):
    a = numbers(40, 64, dtype=torch.int8)
    assert torch.equal(torch._int_mm(a, a.t().contiguous()), a.int() @ a.int().t())
    assert served[0] == "_int_mm"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_groups_and_their_gradients(served, dtype):
    a, b = numbers(100, 64, dtype=dtype).requires_grad_(), numbers(3, 64, 48, dtype=dtype).requires_grad_()
    offsets, starts = torch.tensor([30, 30, 100], dtype=torch.int32), (0, 30, 30)
    result = torch._grouped_mm(a, b, offs=offsets)
    result.sum().backward()
    groups = list(zip(starts, offsets.tolist(), strict=True))
    expected = torch.cat([a[i:j].double() @ w.double() for (i, j), w in zip(groups, b, strict=True)])
    assert torch.allclose(result.double(), expected, rtol=2e-2, atol=0.4)
    for (i, j), gradient in zip(groups, b.grad, strict=True):
        wanted = a[i:j].double().sum(0)[:, None].expand(64, 48)
        assert torch.allclose(gradient.double(), wanted, rtol=2e-2, atol=0.4)
    assert served == ["_grouped_mm"] * 3
    torch._grouped_mm(a[:, :60], b[:, :60, :44], offs=offsets)  # rows of the result are padded
    assert served == ["_grouped_mm"] * 3


@pytest.mark.parametrize("scales", [((), ()), ((40, 1), (1, 48))])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scaled_float8(served, dtype, scales):
    a, b = numbers(40, 64, dtype=torch.float32).to(dtype), numbers(48, 64, dtype=torch.float32).to(dtype).t()
    scale_a, scale_b = (torch.rand(shape) + 0.5 for shape in scales)
    result = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)
    assert torch.allclose(result.double(), a.double() @ b.double() * scale_a * scale_b, rtol=1e-2, atol=1e-2)
    assert served == ["_scaled_mm"]


def test_gradients_and_layers(served):
    layer = torch.nn.Linear(64, 48).half()
    x = numbers(40, 64, dtype=torch.float16).requires_grad_()
    layer(x).sum().backward()
    ones = torch.ones(40, 48)
    assert torch.allclose(x.grad.float(), ones @ layer.weight.float(), atol=2e-2)
    assert torch.allclose(layer.weight.grad.float(), ones.t() @ x.float(), atol=5e-2)
    assert served == ["addmm", "mm", "mm"]


def test_what_is_passed_on(served):
    small, single = numbers(4, 4, dtype=torch.float16), numbers(64, 64, dtype=torch.float32)
    assert torch.equal(single @ torch.eye(64), single)
    torch.mm(
        numbers(64, 64, dtype=torch.int8), numbers(64, 64, dtype=torch.int8), out=torch.empty(64, 64, dtype=torch.int8)
    )
    with pytest.raises(RuntimeError, match="shape"):
        torch.mm(numbers(64, 64, dtype=torch.int8), numbers(63, 64, dtype=torch.int8))
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(numbers(64, 64, dtype=torch.int8), numbers(64, 64, dtype=torch.int16))
    i8, i32 = torch.int8, torch.int32
    for operation, arguments, options in (
        (torch.mm, [(2, 40, 64), (64, 40)], {}),
        (torch.bmm, [(1, 40, 64), (3, 64, 40)], {}),
        (torch._int_mm, [(40, 64), (64, 40)], {}),
        (torch.addmm, [(2, 40), (40, 64), (64, 40)], {"beta": 0}),
    ):
        with pytest.raises(RuntimeError):
            operation(*(numbers(*shape, dtype=i32) for shape in arguments), **options)
    c, a = numbers(64, 64, dtype=i8), numbers(64, 64, dtype=i8)
    torch.addmm(c, a, a, alpha=0.5)
    assert served == []
    small @ small  # thin
    assert served == ["mm"]


def test_limits():
    assert aten._limits({"1x512x512": 1.0, "32x32x32": 3.0, "128x128x128": 2.0}) == (False, 32**3)
    assert aten._limits({"1x512x512": 2.0, "32x32x32": 3.0, "128x128x128": 1.0}) == (True, 0)
    assert aten._limits({"32x32x32": 1.0, "128x128x128": 2.0}) == (False, 128**3)


@pytest.mark.parametrize(
    "ratios", [{"f99": {}}, 3, {"float16": 2.0}, {"float16": {"32": 2.0}}, {"int8": {"1x2x3": "2"}}]
)
def test_ratios_of_another_form_are_refused(ratios):
    with pytest.raises(ArgumentError, match=r"ratios=.*pass a dict of float16.*or leave it out"):
        gt.install(ratios)
    assert not aten._libraries


def test_ratios_are_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    asked = []
    monkeypatch.setattr(aten, "_ratio", lambda *args: asked.append(args) or 2.0)
    monkeypatch.setattr(aten.config, "cache_dir", lambda: str(tmp_path))
    tmp_path.chmod(0o700)
    first = aten.measured()
    count = len(asked)
    assert aten.measured() == first
    assert len(asked) == count == len((*aten.TYPES, *aten.APART)) * 4


def test_a_pytorch_without_kernels_to_pass_on_to_is_refused(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(RefusedError, match="get_kernel"):
        gt.install()
