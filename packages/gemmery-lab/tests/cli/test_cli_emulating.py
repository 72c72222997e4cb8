"""`gemmery emulate`: arrays as a command line writes them, exit code, check, page, two runs side by side."""

import json
import os
import threading

import numpy as np
import pytest

import gemmery as gm
from gemmery.errors import ArgumentError, CheckError
from gemmery_emulator.kernels import source_kernels, written_arguments
from gemmery_emulator.pages.writing import check_page
from gemmery_lab import cli

ADD = """#include <iostream>
template <int N>
__global__ void add(const float* a, const float* b, float* c, int n) {
  __shared__ float tile[32 * N];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x % 32 * N] = a[i];
  BARRIER;
  if (i < n) c[i] = tile[threadIdx.x % 32 * N] + b[i];
}
int main() { add<4><<<4, 32>>>(0, 0, 0, 0); std::cout << 1; }
"""
REFERENCE = """
def add(a, b, c, n): return a + b
def in_place(a, b, c, n): c[:] = a + b
def wrong(a, b, c, n): return None, None, a - b
"""
LINE = ["--grid=4", "--block=32", "-af32[128]=random", "-af32[128]=arange", "-af32[128]=nan", "-a", "n=128"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "add.cu").write_text(ADD.replace("BARRIER", "__syncwarp()"))
    (tmp_path / "padded.cu").write_text(ADD.replace("BARRIER", "__syncthreads()").replace("% 32 * N", "% 32"))
    (tmp_path / "racy.cu").write_text(ADD.replace("BARRIER", "").replace("% 32 * N] + b[i]", "% 32 * N ^ N]"))
    (tmp_path / "reference.py").write_text(REFERENCE)
    return tmp_path


@pytest.mark.parametrize("function", ["add", "in_place"])
def test_a_file_is_run_and_checked(folder, function, capsys):
    assert cli.run(["emulate", "add.cu", *LINE, "--check", f"reference.py:{function}", "--html", "p.html"]) == 0
    output = capsys.readouterr().out
    for words in (
        "add<4>: grid 4 x 1 x 1",
        "no findings, 24 bank conflicts",
        "main() (line 10)",
        "checked:",
        "page: p",
    ):
        assert words in output
    page = (folder / "p.html").read_text()
    assert "    8    if (i &lt; n)" in page
    assert page.count("<svg") >= 2


def test_a_wrong_array_and_a_finding_are_exit_code_1(folder, capsys):
    assert cli.run(["emulate", "add.cu", *LINE, "--check", "reference.py:wrong"]) == 1
    assert "add.cu: argument 2 is wrong in 127 of 128 elements; the first is [1]" in capsys.readouterr().err
    assert cli.run(["emulate", "racy.cu", *LINE]) == 1
    assert "racy.cu:8  race: thread" in capsys.readouterr().out


def test_a_warning_is_printed_and_the_exit_code_stays_0(folder, capsys):
    (folder / "flag.cu").write_text('extern "C" __global__ void flag(int* n) { *n = 1; }')
    line = ["flag.cu", "--grid=2", "--block=32", "-ai32[1]=arange"]
    assert cli.run(["emulate", *line]) == 0
    assert "1 warning" in (output := capsys.readouterr().out)
    assert "equal stores: thread" in output


def test_two_files_side_by_side(folder, capsys):
    assert cli.run(["emulate", "add.cu", "--against", "padded.cu", *LINE, "--html", "p.html"]) == 0
    assert "Counters of both" in capsys.readouterr().out
    assert "add&lt;4&gt; of padded.cu" in (folder / "p.html").read_text()


def test_a_card_adds_the_predicted_time(folder, capsys):
    assert cli.run(["emulate", "add.cu", *LINE, "--card", "A100", "--html", "p.html"]) == 0
    output = capsys.readouterr().out
    assert "Predicted on a100" in output
    assert "µs, bound by launch" in output
    assert "Predicted on a100" in (folder / "p.html").read_text()
    assert cli.run(["emulate", "add.cu", *LINE, "--card", "h200", "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert predicted["seconds"] > predicted["terms"]["launch"] > 0
    assert sum(predicted["lines"].values()) == pytest.approx(1)


def test_json_has_the_lines_and_the_findings(folder, capsys):
    assert cli.run(["emulate", "racy.cu", *LINE, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["kernel"], record["grid"], record["left_out"]) == ("add<4>", [4, 1, 1], ["main() (line 10)"])
    assert {it["kind"] for it in record["findings"]} == {"race"}
    assert sum(line["bank_conflicts"] for line in record["lines"]) == record["total"]["bank_conflicts"] > 0
    assert cli.run(["emulate", "add.cu", "--against", "padded.cu", *LINE, "--json"]) == 0
    assert [it["total"]["bank_conflicts"] for it in json.loads(capsys.readouterr().out)] == [24, 0]


def test_the_kernel_is_named_where_there_are_several(folder, capsys):
    (folder / "two.cu").write_text("__global__ void f() {}\n__global__ void g() {}")
    assert cli.run(["emulate", "two.cu"]) == 2
    assert "two.cu has the kernels f, g: name one" in capsys.readouterr().err
    assert cli.run(["emulate", "two.cu", "-k", "g"]) == 0


def test_a_file_with_a_byte_order_mark_runs_and_others_are_refused_in_words(folder, capsys):
    kernel = "namespace a {\n__global__ void f(float* x) { x[threadIdx.x] = 1; }\n}\n"
    (folder / "bom.cu").write_bytes(b"\xef\xbb\xbf" + kernel.replace("\n", "\r\n").encode())
    assert cli.run(["emulate", "bom.cu", "-k", "a::f", "-a", "f32[32]"]) == 0
    assert cli.run(["emulate", "bom.cu", "-a", "f32[32]"]) == 0
    assert cli.run(["emulate", "bom.cu", "-k", "g", "-a", "f32[32]"]) == 2
    assert "kernel='g': bom.cu has the kernels a::f; name one of them" in capsys.readouterr().err
    (folder / "none.cu").write_text("int f() { return 1; }")
    assert cli.run(["emulate", "none.cu"]) == 2
    assert "none.cu has no kernel (no __global__ function): give a file that defines one" in capsys.readouterr().err
    (folder / "empty.cu").write_text("")
    assert cli.run(["emulate", "bom.cu", "--against", "empty.cu", "-k", "a::f", "-a", "f32[32]"]) == 1
    assert "empty.cu has no kernel: it has no __global__ function" in capsys.readouterr().err


def test_what_is_refused_late_prints_and_writes_nothing(folder, capsys):
    (folder / "two.cu").write_text("__global__ void f() {}\n__global__ void g() {}")
    assert cli.run(["emulate", "add.cu", *LINE, "--against", "two.cu", "--html", "p.html"]) == 2
    assert cli.run(["emulate", "add.cu", *LINE, "--line", "add.cu:1", "--html", "p.html"]) == 2
    assert cli.run(["emulate", "add.cu", *LINE, "--line", "add.cu:6"]) == 2
    out, err = capsys.readouterr()
    assert (out, (folder / "p.html").exists()) == ("", False)
    assert "--line add.cu:6: the line is drawn on the page; add --html PATH" in err


def test_a_compiler_shows_the_place_of_its_error(folder, capsys):
    (folder / "wrong.cu").write_text(ADD.replace("BARRIER", "barrier"))
    assert cli.run(["emulate", "wrong.cu", *LINE]) == 1
    first, line, caret, *_ = capsys.readouterr().err.split("\n")
    assert first.startswith("gemmery: kernel ")
    assert "wrong.cu(7): error: " in first
    assert line.strip() == "barrier;"
    assert caret.strip() == "^"


def test_a_run_draws_the_lines_of_its_source(folder):
    arrays = [np.zeros(128, np.float32) for _ in range(3)]
    run = gm.emulate(folder / "add.cu", "add<8>", 4, 32, [*arrays, 128])
    assert "add.cu:6" in run.svg(line="add.cu:6")
    assert run.html(folder / "own.html") == (folder / "own.html").read_text()
    with pytest.raises(ArgumentError, match=r"line 'add.cu:1': it has no memory access(.|\n)*add.cu:6, add.cu:8"):
        run.svg(line="add.cu:1")
    with pytest.raises(ArgumentError, match=r"line=6: name a line with its file, (.|\n)*add.cu:6, add.cu:8"):
        run.svg(line=6)
    for other in (None, np.ones(2)):
        with pytest.raises(ArgumentError, match=r"is no rung: pass the name of a rung .* or a run of gm.emulate"):
            gm.inspect(other)
    both = gm.inspect(run, gm.emulate(folder / "padded.cu", "add<8>", 4, 32, [*arrays, 128]))
    assert repr(both) == "<Comparison of add<8> of add.cu and add<8> of padded.cu>"
    assert "Counters of both" in both._repr_html_()
    assert gm.inspect(run).html() == run.html()
    with pytest.raises(ArgumentError, match="compare two runs, or two rungs"):
        gm.inspect(run, "simt_naive")
    unchecked = gm.emulate(folder / "add.cu", "add<8>", 4, 32, [*arrays, 128], check=False)
    with pytest.raises(ArgumentError, match="nothing to draw"):
        unchecked.svg()


@pytest.mark.parametrize(
    ("text", "dtype", "values"),
    [
        ("i32[4]=arange", "int32", [0, 1, 2, 3]),
        ("uint8[2, 2]", "uint8", [[0, 0], [0, 0]]),
        ("f64[3]=-1.5", "float64", [-1.5] * 3),
        ("i64=3", "int64", 3),
        ("f32=0.5", "float32", 0.5),
        ("bf16[2]=ones", "uint16", [0x3F80] * 2),
        ("bf16[3]=arange", "uint16", [0, 0x3F80, 0x4000]),
        ("bf16[1]=nan", "uint16", [0x7FFF]),
        ("bf16=0.5", "uint16", 0x3F00),
        ("i32=1e3", "int32", 1000),
        ("float32[2]=ones", "float32", [1, 1]),
        ("bfloat16=0.5", "uint16", 0x3F00),
        ("int64=3", "int64", 3),
    ],
)
def test_a_written_argument(text, dtype, values):
    value = written_arguments.argument(text)
    assert value.dtype == dtype
    assert value.tolist() == values


@pytest.mark.parametrize(
    "text", ["uint8[4]=300", "uint8=-1", "int8[2]=1.5", "i32=nan", "i32=99999999999", "bool=2", "f16[4]=1e9"]
)
def test_a_number_that_its_type_cannot_hold_is_refused(text):
    with pytest.raises(ArgumentError, match=r"holds (whole )?numbers .*; take one of these, or a wider type"):
        written_arguments.argument(text)


@pytest.mark.parametrize("text", ["i8[4]", "u8=1"])
def test_a_type_of_two_meanings_is_refused(text):
    with pytest.raises(ArgumentError, match=r"'[iu]8' is no element type; it counts bytes in NumPy .* write 'u?int64'"):
        written_arguments.argument(text)


def test_numbers_files_and_null(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(3))
    np.savez(tmp_path / "x.npz", key=np.ones(2))
    assert written_arguments.argument(f"{tmp_path}/x.npy").tolist() == [0, 1, 2]
    assert written_arguments.argument(f"{tmp_path}/x.npz:key").tolist() == [1, 1]
    with pytest.raises(ArgumentError, match=r"this file has key; write .*x.npz:key"):
        written_arguments.argument(f"{tmp_path}/x.npz:other")
    with pytest.raises(ArgumentError, match=r"one array, without a key; write .*x.npy"):
        written_arguments.argument(f"{tmp_path}/x.npy:key")
    assert [written_arguments.argument(text) for text in ("n=0x10", "7", "1e-3", "p=null")] == [16, 7, 1e-3, None]


def test_a_check_tells_nan_from_a_number():
    x, y = np.zeros(4, np.float32), np.full(4, np.nan, np.float32)
    with pytest.raises(CheckError, match=r"argument 0 is wrong in 4 of 4 elements"):
        written_arguments.check(lambda x: x, [x], [y])
    written_arguments.check(lambda x: (np.full(4, np.nan),), [x], [y])
    with pytest.raises(ArgumentError, match="return a tuple"):
        written_arguments.check(lambda x, y: x, [x, x], [y, y])


def test_a_reference_that_fails_is_told_in_a_line(tmp_path):
    x = np.zeros(4, np.float32)
    with pytest.raises(ArgumentError, match=r"fails with TypeError: .*it is called with the kernel's 2 arguments"):
        written_arguments.check(lambda x: x, [x, 4], [x, 4])
    with pytest.raises(ArgumentError, match=r"fails with SystemExit: 3 "):
        written_arguments.check(lambda x: exit(3), [x], [x])
    with pytest.raises(ArgumentError, match=r"argument 0 is an array of float32, and the reference has object"):
        written_arguments.check(lambda x: [[object()] * 4], [x], [x])
    with pytest.raises(ArgumentError, match=r"what it returns for argument 0 is no array"):
        written_arguments.check(lambda x: [[[1], [2, 3]]], [x], [x])
    (tmp_path / "r.py").write_text("\nraise SystemExit(5)")
    with pytest.raises(ArgumentError, match=r"r.py fails with SystemExit: 5 \(line 2 of r.py\); mend the file"):
        written_arguments.reference(f"{tmp_path}/r.py:f")


@pytest.mark.parametrize("name", ["m", "c", "N"])
def test_an_argument_that_names_another_parameter_is_refused(folder, name, capsys):
    assert cli.run(["emulate", "add.cu", *LINE[:-1], f"{name}=128"]) == 2
    message = capsys.readouterr().err
    assert f"--arg {name}=128: argument 3 of add<4>(a, b, c, n) is n; write one --arg for each parameter" in message


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("__global__ void k(int a, /* b, */ const float* __restrict__ c = nullptr, unsigned n) {}", ("a", "c", "n")),
        (
            "template <class T, int N> __global__ void __launch_bounds__(N, 2) k(T x[], T* const y, int) {}",
            ("x", "y", ""),
        ),
        ("struct P { int n; };\n__global__ void k(P p, int (*f)(int), Pair<int, 4> q) {}", ("p", "", "q")),
        ('extern "C" __global__ void k() {}', ()),
    ],
)
def test_the_names_of_parameters(source, names):
    assert source_kernels.names_of(source_kernels.declared(source, "k<4>")) == {names}


def test_a_name_of_one_of_several_kernels_of_that_name_is_taken():
    source = "__global__ void k(int a, int n) {}\n__global__ void k(float a, int m) {}"
    known = source_kernels.names_of(source_kernels.declared(source, "k"))
    assert known == {("a", "n"), ("a", "m")}
    written_arguments.check_names(["a=1", "m=2"], "k", known)
    written_arguments.check_names(["1", "f32=2", "x=3"], "k", known)  # one too many is refused when it is bound
    with pytest.raises(ArgumentError, match=r"argument 1 of k.* is m, n"):
        written_arguments.check_names(["a=1", "q=2"], "k", known)


def test_a_page_does_not_replace_another_file(folder, capsys):
    before = (folder / "add.cu").read_text()
    assert cli.run(["emulate", "add.cu", *LINE, "--html", "add.cu"]) == 2
    assert "it exists and is no page or picture; choose another place with --html" in capsys.readouterr().err
    assert (folder / "add.cu").read_text() == before
    for _ in range(2):  # a page replaces a page
        assert cli.run(["emulate", "add.cu", *LINE, "--html", "page.html"]) == 0


def test_a_page_may_go_to_a_pipe(tmp_path):
    """Which is not read first: nobody has written to it."""
    os.mkfifo(tmp_path / "page")
    reader = os.open(tmp_path / "page", os.O_RDWR | os.O_NONBLOCK)
    reading = threading.Thread(target=check_page, args=(tmp_path / "page",), daemon=True)
    reading.start()
    reading.join(10)
    assert not reading.is_alive()
    os.close(reader)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tolerance", "1"], "--tolerance 1.0: it needs --check"),
        (["--check", "reference.py:add", "--tolerance", "inf"], "--tolerance inf: it must be finite"),
    ],
)
def test_a_check_that_checks_nothing_is_refused(folder, options, said, capsys):
    assert cli.run(["emulate", "add.cu", *LINE, *options]) == 2
    assert said in capsys.readouterr().err


PROGRAM = """#include <iostream>
#define BLOCK 256
__global__ void saxpy(int n, float a, const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
int main() {
  const int n = 1000; float *x, *y;
  saxpy<<<(n + BLOCK - 1) / BLOCK, BLOCK>>>(n, 2.5f, x, y);
  std::cout << "done";
}
"""


def test_without_arguments_a_command_is_printed_that_runs(folder, capsys):
    (folder / "saxpy.cu").write_text(PROGRAM)
    assert cli.run(["emulate", "saxpy.cu", "--html", "page.html"]) == 2
    message = capsys.readouterr().err
    expected = "--grid 4 --block 256 -a n=1000 -a a=2.5 -a f32[1000]=random -a f32[1000]=zeros"
    assert f"saxpy(int n, float a, const float* x, float* y) takes arguments; for example {expected}" in message
    assert not (folder / "page.html").exists()
    assert cli.run(["emulate", "saxpy.cu", *expected.split()]) == 0
    assert "grid 4 x 1 x 1, block 256 x 1 x 1" in capsys.readouterr().out
    assert cli.run(["emulate", "saxpy.cu", *expected.split()[4:]]) == 0  # with the grid and block of main()
    assert "grid 4 x 1 x 1, block 256 x 1 x 1" in capsys.readouterr().out


def test_a_launch_of_numbers_alone_runs_as_in_main(folder, capsys):
    (folder / "hello.cu").write_text(
        '#include <cstdio>\n__global__ void hello(int n) { if (threadIdx.x < n) printf("hi %d\\n", threadIdx.x); }\n'
        "int main() { dim3 b(8, 4); hello<<<2, b>>>(3); }"
    )
    assert cli.run(["emulate", "hello.cu"]) == 0
    output = capsys.readouterr().out
    assert "grid 2 x 1 x 1, block 8 x 4 x 1" in output
    assert output.count("hi 2") == 8


@pytest.mark.parametrize(
    ("program", "launch"),
    [
        (
            "constexpr int N = 1 << 10; void m() { f<<<N / 256, dim3(16, 16)>>>(N, x, -1.5f); }",
            (4, (16, 16), (1024, None, -1.5)),
        ),
        ("void m() { size_t n = 3e3; f<<<(int)(100 - 1) * 2, 2>>>(n); }", (198, 2, (3000.0,))),
        ("void m() { int n = 4; n = argc; f<<<n, 1>>>(p->x, y[0], g(2)); }", (4, 1, (None, None, None))),
        ("void a() { int n = 4; } void b() { int n = 5; f<<<n, 1>>>(n); }", (None, 1, (None,))),
        ("void m() { f<<<N, N / 0>>>(); } int N = N;", (None, None, ())),
        ("// f<<<1, 2>>>();", (None, None, ())),
        ('void m() { f<4><<<__import__("os"), 2, 0, stream>>>(x); }', (None, 2, (None,))),
    ],
)
def test_the_launch_of_a_program(program, launch):
    assert source_kernels.launch_of(f"__global__ void f() {{}}\n{program}", "f") == launch


def test_the_count_of_arguments_is_told_in_c(folder, capsys):
    (folder / "saxpy.cu").write_text(PROGRAM)
    assert cli.run(["emulate", "saxpy.cu", "-a", "n=4"]) == 2
    assert "1 argument: saxpy(int n, float a, const float* x, float* y) takes 4" in capsys.readouterr().err


@pytest.mark.parametrize("card", ["T4", "RTX 3060", "rtx3070", "a6000", "a10", "rtx 4060", "L4"])
def test_the_cards_of_a_prediction(folder, card, capsys):
    (folder / "saxpy.cu").write_text(PROGRAM)
    line = ["-a", "n=1000", "-a", "a=2.5", "-af32[1000]", "-af32[1000]"]
    assert cli.run(["emulate", "saxpy.cu", *line, "--card", card]) == 0
    assert f"Predicted on {card.lower().replace(' ', '')}" in capsys.readouterr().out
