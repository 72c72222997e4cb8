"""The command line: what it hands on, what it prints where, and its exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import gemmery_lab as lab
import records
from gemmery.cuda import driver
from gemmery.errors import ArgumentError, CacheError, CompileError
from gemmery_lab import cli
from gemmery_lab.measure import record

pytestmark = pytest.mark.sampled(3)

ENDLESS = """
import time
from gemmery_lab import cli
import gemmery_lab as lab
lab.doctor = lambda: print("ready", flush=True) or time.sleep(60)
"""


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The arguments that reach `lab`, which answers with made-up records; the current folder is empty."""
    seen = {}

    def answer(name, records_of):
        def stand_in(*arguments, **named):
            *given, on_event = arguments
            seen[name] = [*given, *named.values()]
            run = records_of()
            if named.get("store") is not None:
                record.append(record.path(named["store"], run.machine.name), run)
            for done, m in enumerate(run.measurements, 1):
                on_event(lab.RunEvent(m.kernel, done, len(run.measurements), m))
            return run

        monkeypatch.setattr(lab, name, stand_in)

    answer("ladder", records.ladder)
    answer("bench", records.bench)
    answer("sweep", records.sweep_block)
    answer("chain", records.bench)
    monkeypatch.chdir(tmp_path)
    return seen


def command(*arguments, script="", **more):
    """A process of its own that runs one command line, after `script`."""
    program = f"{script}\nimport sys\nfrom gemmery_lab import cli\nsys.exit(cli.run(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )


def test_ladder_hands_its_options_on(asked):
    assert cli.run(["ladder", "--no-html"]) == 0
    assert asked["ladder"] == [(), (), "f32", 0, 5.0, "cpu", None]
    line = "ladder --rungs simd_row,packed --sizes 64,128 --dtype f64 --threads 2 --seconds 0.5 --no-html"
    assert cli.run(line.split()) == 0
    assert asked["ladder"] == [("simd_row", "packed"), (64, 128), "f64", 2, 0.5, "cpu", None]


def test_bench_hands_its_options_on(asked, tmp_path):
    (tmp_path / "own.toml").write_text("[[product]]\nsquare = [4]")
    line = f"bench square_f32 own.toml --rivals numpy,torch --threads 1 --seconds 2 --store {tmp_path} --no-html"
    assert cli.run(line.split()) == 0
    assert asked["bench"] == [["square_f32", "own.toml"], ("numpy", "torch"), 1, 2.0, tmp_path, ""]
    assert cli.run(["bench", "--no-store", "--no-html"]) == 0
    assert asked["bench"] == [(), (), 0, 3.0, None, ""]


def test_a_workload_takes_the_place_of_suites(asked):
    assert cli.run(["bench", "--workload", "chain", "--no-html", "--store", "kept"]) == 0
    assert asked["chain"] == [(2048, 4096), 10, "f32", "cuda", 3.0, Path("kept")]
    line = "bench --workload chain --n 64,128 --repeats 3 --dtype f16 --device cuda:1 --seconds 1 --no-store --no-html"
    assert cli.run(line.split()) == 0
    assert asked["chain"] == [(64, 128), 3, "f16", "cuda:1", 1.0, None]
    assert "bench" not in asked


@pytest.mark.parametrize(
    "line",
    ["bench --workload chains", "bench gpu_square --workload chain", "bench --workload chain --rivals numpy"],
)
def test_a_workload_that_is_not_there_is_named(asked, line, capsys):
    assert cli.run([*line.split(), "--no-html"]) == 2
    said = (
        "workload 'chains' is not known; there are chain and distributed" if "chains" in line else "it takes no suites"
    )
    assert said in capsys.readouterr().err


def test_ladder_runs_on_the_device_that_is_named(asked, monkeypatch):
    monkeypatch.setattr(driver, "missing", lambda: "")
    assert cli.run(["ladder", "--device", "cuda:1", "--dtype", "tf32", "--no-html"]) == 0
    assert asked["ladder"] == [(), (), "tf32", 0, 5.0, "cuda:1", None]


@pytest.mark.parametrize("device", ["gpu", "cuda:x"])
def test_a_device_that_there_is_not_is_bad_usage(device, capsys):
    assert cli.run(["ladder", "--device", device, "--no-html"]) == 2
    assert "or cpu, cuda, cuda:N for the Nth GPU, emulator" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "announced"),
    [
        ("--device emulator", ""),
        (
            "--device cuda",
            "gemmery: no CUDA device (gone): using the emulator as h200 instead, ",
        ),
    ],
)
def test_the_emulator_climbs_when_asked_and_where_there_is_no_gpu(line, announced, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(driver, "missing", lambda: "gone")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["ladder", *line.split(), "--rungs", "simt_naive,simt_smem", "--sizes", "32"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(announced or "2 measurements, about 2 s\n1/2 simt_naive")
    assert "2/2 simt_smem, n = 32, f32" in err
    assert all(
        word in out
        for word in (
            "The ladder at n = 4096, predicted on h200",
            "Counters and roofs",
            "bank",
            "sectors",
            "2 of 2 results are right",
            "h200: sm_90a",
        )
    )
    path = tmp_path / re.search(r"^page: (.+)$", out, re.MULTILINE)[1]
    assert path.read_text().startswith("<!doctype html>")
    assert "The ladder at n = 4096, predicted for h200" in path.read_text()


def test_no_time_is_predicted_where_every_rung_is_refused(monkeypatch, capsys, tmp_path):
    """Not those of all rungs, which nobody asked for."""
    monkeypatch.chdir(tmp_path)
    cli.run(
        ["ladder", "--device", "emulator", "--rungs", "mma_pipelined", "--dtype", "e4m3", "--sizes", "64", "--no-html"]
    )
    out = capsys.readouterr().out
    assert "No rung ran: mma_pipelined" in out
    assert "predicted on" not in out


def test_what_the_emulator_counted_as_json(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "ladder --device emulator --as t4 --rungs simt_smem,mma_pipelined --sizes 16,32 --dtype f16 --json"
    assert cli.run(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["name"] == "t4"
    ran = [one for one in found["rungs"] if not one["refused"]]
    assert [(one["rung"], one["n"]) for one in ran] == [("simt_smem", 16), ("simt_smem", 32)]
    assert [one["counts"]["flops"] for one in ran] == [2 * 16**3, 2 * 32**3]
    assert "sm_80" in next(one["refused"] for one in found["rungs"] if one["refused"])
    assert list(tmp_path.iterdir()) == []
    assert [one["rung"] for one in found["predicted"]] == ["simt_smem", "mma_pipelined"]
    assert cli.run([*line.replace("t4", "a100").split()]) == 0
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert [(one["rung"], one["n"]) for one in predicted] == [("simt_smem", 4096), ("mma_pipelined", 4096)]
    assert all(one["prediction"]["seconds"] > 0 for one in predicted)


def test_a_wrong_rung_on_the_emulator_fails(monkeypatch, capsys):
    wrong = replace(lab.emulated_ladder(["simt_naive"], [16]).rungs[0], error=3.0, findings=("a.cu:7: race: both",))
    run = replace(lab.emulated_ladder(["simt_naive"], [16]), rungs=(wrong,))
    monkeypatch.setattr(lab, "emulated_ladder", lambda *_: run)
    assert cli.run(["ladder", "--device", "emulator", "--rungs", "simt_naive", "--no-html"]) == 1
    err = capsys.readouterr().err
    assert "gemmery: simt_naive, n = 16, f32: it is outside its error bound: 3 times it" in err
    assert "it has a finding at a.cu:7: race: both" in err


@pytest.mark.skipif(not driver.missing(), reason="there is a GPU")
@pytest.mark.parametrize("line", ["ladder --device cuda --store kept", "bench gpu_square", "bench --workload chain"])
def test_without_a_gpu_one_line_says_what_is_missing(line, capsys):
    assert cli.run([*line.split(), "--no-html"]) == 1
    error = capsys.readouterr().err
    assert driver.missing() in error
    assert error.count("\n") == 1


def test_sweep_hands_its_options_on(asked):
    assert cli.run(["sweep", "block", "--n", "2048", "--no-html"]) == 0
    assert asked["sweep"] == ["block", (), (2048,), "f32", 0, 5.0, "", None]
    assert cli.run(["sweep", "size", "--sizes", "32,64", "--rungs", "packed", "--no-html"]) == 0
    assert asked["sweep"] == ["size", ("packed",), (32, 64), "f32", 0, 5.0, "", None]
    assert cli.run(["sweep", "threads", "--device", "cuda:1", "--n", "64", "--no-html"]) == 0
    assert asked["sweep"] == ["threads", (), (64,), "f32", 0, 5.0, "cuda:1", None]


def test_records_are_stored_where_asked(asked, tmp_path):
    assert cli.run(["ladder", "--no-html", "--store", "kept"]) == 0
    (run,) = record.read(tmp_path / "kept" / f"{records.MACHINE.name}.jsonl")
    assert run == records.ladder()


def test_a_place_that_cannot_be_written_is_one_line(asked, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for line in ("ladder", "bench small", "sweep size", "exhibit bank_stride", "bench --workload chain"):
        asked.clear()
        assert cli.run([*line.split(), "--store", "file"]) == 2
        assert (
            capsys.readouterr().err == "gemmery: store 'file': it is not a folder; choose another folder with --store\n"
        )
        assert not asked  # nothing was measured


def test_a_table_and_a_page_whose_path_is_printed(asked, tmp_path, capsys):
    assert cli.run(["ladder"]) == 0
    out = capsys.readouterr().out
    assert "packed_threaded" in out
    path = tmp_path / re.search(r"^page: (.+)$", out, re.MULTILINE)[1]
    assert path.read_text().startswith("<!doctype html>")
    assert path.parent.name == "out"


def test_the_page_goes_where_it_is_told(asked, tmp_path, capsys):
    assert cli.run(["ladder", "--html", "a/b.html"]) == 0
    assert (tmp_path / "a" / "b.html").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_no_html_writes_nothing(asked, tmp_path, capsys):
    assert cli.run(["ladder", "--no-html"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert "page:" not in capsys.readouterr().out


def test_json_is_all_there_is_on_stdout(asked, tmp_path, capsys):
    assert cli.run(["ladder", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["measurements"]) == len(records.ladder().measurements)
    assert list(tmp_path.iterdir()) == []
    assert cli.run(["ladder", "--json", "--html", "page.html"]) == 0
    json.loads(capsys.readouterr().out)
    assert (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_one_line(asked, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.run(["ladder", "--html", "file/page.html"]) == 2
    assert re.search(r"^gemmery: page 'file/page.html': .*--html$", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize("error", [1.2, float("nan")])
def test_a_result_outside_its_bound_fails(monkeypatch, capsys, error):
    run = records.ladder()
    wrong = replace(run.measurements[4], error=error)
    monkeypatch.setattr(lab, "ladder", lambda *_, **__: replace(run, measurements=(wrong,)))
    assert cli.run(["ladder", "--no-html"]) == 1
    assert "gemmery: packed is outside its error bound at n = 512, f32" in capsys.readouterr().err


def test_doctor_fails_when_something_is_wrong(monkeypatch, capsys):
    fine = lab.Diagnosis("cores", "2")
    wrong = lab.Diagnosis("environment", "OPENBLAS_CORETYPE=Haswell", ok=False, advice="unset OPENBLAS_CORETYPE")
    monkeypatch.setattr(lab, "doctor", lambda: (fine,))
    assert cli.run(["doctor"]) == 0
    monkeypatch.setattr(lab, "doctor", lambda: (fine, wrong))
    assert cli.run(["doctor"]) == 1
    assert "unset OPENBLAS_CORETYPE" in capsys.readouterr().out
    assert cli.run(["doctor", "--json"]) == 1
    assert [one["ok"] for one in json.loads(capsys.readouterr().out)] == [True, False]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("frobnicate", "frobnicate"),
        ("ladder --color", "--color"),
        ("ladder --sizes 12,x", "'x' is not a whole number"),
        ("ladder --sizes 0", "size 0"),
        ("ladder --seconds soon", "soon"),
        ("ladder --threads -1", "-1"),
        ("ladder --rungs nosuch", "'nosuch'"),
        ("ladder --dtype float8", "'float8'"),
        ("ladder --device cuda --threads 2", "leave it out on cuda:0"),
        ("ladder --device emulater", "cuda:N for the Nth GPU, emulator"),
        ("ladder --device cpu --as a100", "only the emulator runs as a named card"),
        ("ladder --device cuda --as a100", "only the emulator runs as a named card"),
        ("ladder --device h200 --as a100", "the device 'h200' is an emulated card already"),
        ("ladder --device emulator --as vx1", "known: h200, h100, a100"),
        ("ladder --device emulator --sizes 2048", "sides of 1 to 1024"),
        ("ladder --device emulator --sizes 0", "size 0: a side must be"),
        ("ladder --device emulator --rungs packed", "'packed'"),
        ("ladder --device emulator --threads 2", "leave it out"),
        ("ladder --device emulator --seconds 2", "leave it out"),
        ("ladder --device emulator --store kept", "leave it out"),
        ("ladder --as t4 diff simt_smem simt_naive", "--as: `ladder diff` runs no rungs"),
        ("ladder --sizes 64 diff simt_smem simt_naive", "--sizes: `ladder diff` runs no rungs"),
        ("sweep", "EXPERIMENT"),
        ("sweep nosuch", "'nosuch'"),
        ("sweep size --n 64", "--sizes 64"),
        ("sweep threads --n 64 --sizes 64", "one of them"),
        ("sweep block --device cuda", "runs on cpu"),
        ("sweep threads --device cpu", "runs on cuda"),
        ("sweep tile --rungs simt_naive", "no tile to vary"),
        ("inspect packed --device h200", "packed runs on the CPU of this machine; leave out device and line"),
        ("inspect packed --n 2048", "n=2048: accesses of a CPU rung are counted for sides of at most 1024"),
        ("inspect simt_nosuch", "'simt_nosuch'"),
        ("inspect simt_smem --config tile", "'tile' is not KEY=NUMBER"),
        ("inspect simt_smem --config side=3", "its keys are tile"),
        ("inspect simt_smem --config tile=0", "config tile=0: "),
        ("inspect simt_smem --device vx1", "'vx1' is neither present nor known"),
        ("inspect simt_smem --device cuda:x", "cuda, or cuda:N for the Nth GPU"),
        ("inspect simt_smem --n 0", "'--n'"),
        ("inspect simt_smem --svg -", "--svg -: stdout is for tables and JSON"),
        ("inspect simt_smem --html -", "--html -: stdout is for tables and JSON"),
        ("ladder --html -", "--html -: stdout is for tables and JSON"),
        ("ladder diff simt_smem simt_naive --html -", "--html -: stdout is for tables and JSON"),
        ("bench --store -", "--store -: stdout is for tables and JSON"),
        ("inspect simt_smem bank_stride", "simt_smem is a GPU rung and bank_stride an exhibit"),
        (
            "inspect simt_smen bank_stride",
            "nor an exhibit; did you mean 'simt_smem'? known: ",
        ),
        ("inspect simt_smem simt_padded --sass", "--sass: "),
        ("inspect bank_stride --m 3", "leave out m, k and dtype"),
        ("inspect bank_stride --config side=3", "its keys are stride, width, steps"),
        ("inspect copy_coalesced --config stride=7", "config stride=7: "),
        ("inspect simt_smem --dtype e4m3", "rung simt_smem takes f32"),
        ("ladder diff simt_smem simt_smem", "compared with itself"),
        ("bench nosuch --no-store", "nosuch"),
        ("bench --n 64 --no-store", "for --workload chain"),
        ("bench --dtype f16 --no-store", "for --workload chain"),
        ("bench --repeats 4 --no-store", "for --workload chain"),
        ("bench --workload chain --repeats 0", "'--repeats'"),
        ("exhibit nosuch", "'nosuch'"),
        ("exhibit bank_stride --device cpu", "exhibits run on a GPU"),
        ("exhibit bank_stride --seconds 0", "must be above 0"),
    ],
)
def test_bad_usage_is_one_line(line, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(line.split()) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"gemmery: [^\n]+\n", err)
    assert said in err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ArgumentError("a\nvalue"), 2, "a value"),
        (CacheError("a\nfolder"), 1, "a folder"),
        (CompileError("a kernel:\n  x = y;\n      ^\n"), 1, "a kernel:\n  x = y;\n      ^"),
    ],
)
def test_an_error_is_one_line_but_for_a_compilers(monkeypatch, capsys, error, code, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(lab, "ladder", fail)
    assert cli.run(["ladder", "--no-html"]) == code
    assert capsys.readouterr().err == f"gemmery: {said}\n"


def test_too_little_memory_is_one_line(monkeypatch, capsys):
    def fail(*_, **__):
        raise MemoryError("Unable to allocate 35.5 PiB")

    monkeypatch.setattr(lab, "ladder", fail)
    assert cli.run(["ladder", "--no-html"]) == 1
    assert capsys.readouterr().err == "gemmery: out of memory: Unable to allocate 35.5 PiB; take smaller sizes\n"


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr(lab, "doctor", fail)
    with pytest.raises(ZeroDivisionError):
        cli.run(["doctor"])


@pytest.mark.parametrize(
    "name", ["", "ladder", "ladder diff", "bench", "sweep", "inspect", "exhibit", "doctor", "verify", "warm"]
)
def test_help(name, capsys):
    assert cli.run([*name.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage: gemmery" in out
    assert not name or f"gemmery {name}" in out.split("Examples:")[1]
    assert max(len(line) for line in out.splitlines()) <= 80


def test_the_line_that_the_help_of_inspect_draws_has_an_access(capsys):
    pytest.importorskip("cuda.bindings")
    cli.run(["inspect", "--help"])
    ((rung, line),) = re.findall(r"gemmery inspect (\w+) --line (\S+)", capsys.readouterr().out)
    assert cli.run(["inspect", rung, "--line", line, "--n", "32"]) == 0, capsys.readouterr().err


def test_alone_it_shows_what_there_is(capsys):
    assert cli.run([]) == 0
    known = {"ladder", "bench", "sweep", "inspect", "exhibit", "doctor", "verify", "warm"}
    out = capsys.readouterr().out
    assert set(re.findall(r"^  ([a-z]+) ", out, re.MULTILINE)) >= known
    assert "..." not in out.split("Commands:")[1]


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert re.fullmatch(r"gemmery \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.process
def test_interrupted():
    process = command("doctor", script=ENDLESS)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == "gemmery: interrupted\n"


@pytest.mark.process
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_is_quiet(options):
    many = "import gemmery_lab as lab\nlab.doctor = lambda: (lab.Diagnosis('x' * 90, 'y'),) * 5000"
    process = command("doctor", *options, script=many)
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(timeout=120) == 141


@pytest.mark.process
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_one_line(options):
    line = [sys.executable, "-m", "gemmery", "exhibit", *options]
    with open("/dev/full", "w") as full:
        process = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr == "gemmery: output: No space left on device; write it to another place\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("typer", "doctor"),
        ("rich", "doctor"),
        ("matplotlib", "ladder --sizes 8"),
        ("threadpoolctl", "doctor"),
        ("jinja2", "ladder --sizes 8"),
        ("jinja2", "ladder diff simt_smem simt_naive --html page.html"),
        ("jinja2", "inspect simt_naive --html page.html"),
    ],
)
def test_without_the_extra_one_line_says_what_to_install(module, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = command(*line.split(), script=f"import sys\nsys.modules[{module!r}] = None")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert re.fullmatch(
        rf"gemmery: .* needs? .*{module}[^:]*: run pip install '\.\[lab\]' in a checkout of gemmery\n", err
    )


@pytest.mark.process
def test_without_the_extra_the_version_is_shown():
    process = command("--version", script="import sys\nsys.modules['typer'] = None")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert re.fullmatch(r"gemmery \d+\.\d+\.\d+\S*\n", out)


@pytest.mark.process
def test_python_m_gemmery():
    environment = {**os.environ, "COLUMNS": "80"}
    found = subprocess.run(
        [sys.executable, "-m", "gemmery", "--version"], capture_output=True, text=True, env=environment, check=True
    )
    assert found.stdout.startswith("gemmery ")
