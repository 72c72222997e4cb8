"""The server for assistants, through the in-memory client of its SDK."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

from gemmery.errors import ArgumentError, EmulationError
from gemmery_emulator.kernels import mcp_server
from gemmery_emulator.run import progress

RACE = """__global__ void f(float* x, int n) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x == 0) printf("n is %d", n);
  x[threadIdx.x] = s[63 - threadIdx.x];
}
"""
MENDED = RACE.replace("  x[", "  __syncthreads();\n  x[")
LAUNCH = {"grid": "1", "block": "64", "args": ["f32[64]=arange", "n=5"]}


@pytest.fixture(scope="module")
def ask():
    pytest.importorskip("mcp.server.mcpserver", reason="the SDK is not installed")
    from mcp import Client

    async def asked(name, arguments):
        async with Client(mcp_server.server()) as client:
            if not name:
                return (await client.list_tools()).tools
            return await client.call_tool(name, arguments)

    return lambda name="", **arguments: asyncio.run(asked(name, arguments))


def test_the_tools(ask):
    tools = {tool.name: tool for tool in ask()}
    assert set(tools) == {"run", "faults", "counters", "predict", "diff"}
    assert all(tool.description and tool.input_schema["properties"] for tool in tools.values())
    assert set(tools["faults"].input_schema["required"]) == {"source", "grid", "block", "args"}


def test_run_and_faults(ask, capsys):
    answer = ask("run", source=RACE, **LAUNCH).structured_content
    assert answer["arrays"]["argument 0"][:3] == [63, 62, 61]
    assert answer["printed"] == "n is 5"
    assert [each["line"] for each in answer["findings"]] == ["kernel.cu:5"]
    assert ask("faults", source=RACE, **LAUNCH).structured_content["findings"] == answer["findings"]
    assert ask("faults", source=MENDED, **LAUNCH).structured_content["faultless"]
    assert "n is 5" not in capsys.readouterr().out  # which is the protocol's


def test_counters_and_times(ask):
    column = MENDED.replace("s[threadIdx.x]", "s[threadIdx.x * 32 % 2048]").replace("s[64]", "s[2048]")
    answer = ask("counters", source=column, **LAUNCH).structured_content
    assert answer["total"]["bank_conflicts"] == 62
    assert answer["lines"][0]["instructions"] == max(line["instructions"] for line in answer["lines"])
    predicted = ask("predict", source=MENDED, card="a100", **LAUNCH).structured_content
    assert (predicted["card"], predicted["bound"]) == ("a100", "launch")
    assert 1e-6 < predicted["seconds"] < 1e-5


def test_diff(ask):
    answer = ask("diff", old=RACE, new=MENDED, card="h100", **LAUNCH).structured_content
    assert answer["same_results"]
    assert answer["largest_difference"] == 0
    assert [answer["faults"][name]["faultless"] for name in ("old", "new")] == [False, True]
    assert answer["moved"]["instructions of warps"]["old"] != answer["moved"]["instructions of warps"]["new"]
    times = [answer["predicted"][name]["seconds"] for name in ("old", "new")]
    assert abs(answer["speedup"] - times[0] / times[1]) <= 1e-12
    other = ask("diff", old=MENDED, new=MENDED.replace("63 -", "1 +").replace("1 + t", "0 + t"), **LAUNCH)
    assert not other.structured_content["same_results"]
    assert other.structured_content["largest_difference"] == 63


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("run", {"source": RACE, **LAUNCH, "args": ["f32[64"]}, "--arg f32"),
        ("run", {"source": "int main() {}", **LAUNCH}, "no __global__ function"),
        ("run", {"source": "/etc/passwd", **LAUNCH}, r"path of a \.cu"),
        ("faults", {"source": RACE.replace("s[63", "t[63"), **LAUNCH}, r"kernel\.cu\(5\)"),
        ("predict", {"source": RACE, **LAUNCH, "card": "abacus"}, "abacus"),
    ],
)
def test_errors_that_an_assistant_can_read(ask, name, arguments, words):
    answer = ask(name, **arguments)
    assert answer.is_error
    assert re.search(words, answer.content[0].text), answer.content[0].text


def test_without_the_sdk(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    with pytest.raises(ModuleNotFoundError, match="pip install 'mcp>=2'"):
        mcp_server.server()


TWICE = "__global__ void f(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }"


def test_a_grid_that_would_run_for_hours_ends_in_words(monkeypatch):
    monkeypatch.setattr(mcp_server, "SECONDS", 1.0)
    with pytest.raises(EmulationError, match=r"of 2,147,483,647 blocks ran in 1 seconds: pass fewer blocks"):
        mcp_server.run(TWICE, "2147483647", "32", ["f32[32]=arange", "n=32"])
    assert progress.get() is None


@pytest.mark.parametrize(("fill", "new", "largest"), [
    ("nan", TWICE, 0.0), ("3e38", TWICE, 0.0), ("1", TWICE.replace("*= 2", "= nanf(\"\")"), "nan"),
    ("nan", TWICE.replace("x[threadIdx.x] *= 2", "x[threadIdx.x] = threadIdx.x ? nanf(\"\") : 1"), "nan"),
    ("1", TWICE.replace("*= 2", "*= 5"), 3.0),
])  # fmt: skip
def test_the_largest_difference_is_of_numbers_that_are_not_equal(fill, new, largest):
    answer = mcp_server.diff(TWICE, new, "1", "32", [f"f32[32]={fill}", "n=32"])
    assert (answer["same_results"], answer["largest_difference"]) == (largest == 0, largest)


def test_a_prediction_prints_nothing_and_bfloat16_is_shown_as_numbers(ask, capsys):
    ask("predict", source=RACE, card="h200", **LAUNCH)
    assert capsys.readouterr().out == ""  # which is the protocol's
    halves = "__global__ void f(unsigned short* x) { x[1] = 0xc040; }"
    answer = mcp_server.run(halves, "1", "1", ["bf16[3]=ones"])
    assert answer["arrays"]["argument 0"] == [1, -3, 1]
    other = mcp_server.diff(halves, halves.replace("0xc040", "0x3f80"), "1", "1", ["bf16[3]=ones"])
    assert other["largest_difference"] == 4


def test_a_path_that_cannot_be_one_is_refused():
    with pytest.raises(ArgumentError, match="cannot be read"):
        mcp_server.run("a\0b.cu", "1", "32", [])
