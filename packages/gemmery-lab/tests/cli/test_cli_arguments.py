"""Arguments of the command line: one spelling everywhere, mistakes named at once, results kept after Ctrl-C."""

import ast
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer

import gemmery as gm
import gemmery_lab as lab
import records
from gemmery.cuda import driver
from gemmery.errors import ArgumentError
from gemmery_lab import asked, cli, measurements
from gemmery_lab.climb import estimate
from gemmery_lab.inspection.gather import inspect_rung
from gemmery_lab.measure import record, suite

pytestmark = pytest.mark.sampled(3)

HEAVY = (
    "matplotlib",
    "gemmery_emulator.machine",
    "gemmery.verify",
    "gemmery_lab.on_cpu",
    "gemmery_lab.report.terminal",
)


MISTAKES = (
    "ladder --rungs nosuch",
    "ladder --sizes 0",
    "ladder --dtype float33",
    "ladder --device emulator --rungs nosuch",
    "bench nosuch",
    "bench --rivals nosuch",
    "sweep nosuch",
    "inspect nosuch",
    "exhibit nosuch",
)


@pytest.mark.process
def test_a_mistake_is_found_before_anything_heavy_is_loaded():
    """In one process for all: what a line loads shows from that line on."""
    script = (
        "import sys; from gemmery_lab import cli\n"
        "for line in sys.argv[1:]:\n"
        f"    print(line, cli.run(line.split()), [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, *MISTAKES], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{line} 2 []" for line in MISTAKES]


@pytest.mark.parametrize(
    ("device", "card", "expected"),
    [
        ("cpu", "", "cpu"),
        ("CPU", "", "cpu"),
        ("cuda", "", "cuda:0"),
        ("CUDA:1", "", "cuda:1"),
        ("emulator", "", "h200"),
        ("Emulator", "RTX3090", "rtx3090"),
        ("A100", "", "a100"),
        ("sm_90", "", "h200"),
    ],
)
def test_a_place_is_spelled_one_way(device, card, expected):
    assert str(asked.place(device, card)) == expected


@pytest.mark.parametrize(
    ("device", "card", "said"),
    [
        ("cudda", "", "cuda:N"),
        ("cuda:x", "", "'cuda:x'"),
        ("cuda", "a100", "only the emulator"),
        ("emulator", "b2", "b2"),
    ],
)
def test_another_place_is_refused(device, card, said):
    with pytest.raises(ArgumentError, match=said):
        asked.place(device, card)


@pytest.mark.parametrize(
    ("name", "kind", "short"),
    [("float32", "cpu", "f32"), ("F64", "cpu", "f64"), ("tf32", "cuda", "tf32"), ("bfloat16", "emulator", "bf16")],
)
def test_an_element_type_is_spelled_one_way(name, kind, short):
    assert asked.element_type(name, kind) == short


def test_tf32_is_listed_where_it_is_taken():
    with pytest.raises(ArgumentError, match="tf32"):
        asked.element_type("int4", "cuda")
    with pytest.raises(ArgumentError, match=r"dtype 'tf32' is for rungs of a GPU"):
        asked.element_type("tf32", "cpu")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ladder --rungs pakced", "did you mean 'packed'?"),
        ("ladder --rungs simt_naive", "runs on a GPU: the device must be cuda, or emulator"),
        ("ladder --device cuda --rungs packed", "runs on the CPU"),
        ("bench smal", "did you mean 'small'?"),
        ("sweep blok", "did you mean 'block'?"),
        ("inspect simt_naiv", "did you mean 'simt_naive'?"),
        ("exhibit bank_strid", "did you mean 'bank_stride'?"),
        ("ladder --size 3", "--sizes"),
        ("lader", "'ladder'"),
        ("ladder --device h20", "did you mean 'h200'?"),
        ("ladder --html p.html --no-html", "give one of them"),
        ("ladder --html /proc/nowhere/p.html", "page '/proc/nowhere/p.html': "),
        ("bench --html /proc/nowhere/p.html", "choose another place with --html"),
        ("sweep size --html .", "it is a folder"),
        ("exhibit --html p.html", "name an exhibit"),
        ("exhibit bank_stride --device emulator --store kept", "measures no times"),
        ("sweep size --device emulator", "it runs threads, tile, stages"),
        ("sweep block --as a100", "it runs threads, tile, stages"),
        ("sweep tile --device emulator --store kept", "measures no times"),
        ("sweep tile --device emulator --n 2048", "sides of 1 to 1024"),
        ("sweep tile --device emulator --rungs simt_naive", "no tile to vary"),
        ("bench --rivals nump", "known: numpy"),
        ("bench small --store kept --no-store", "give one of them"),
        ("ladder --threads x", "Invalid value for '--threads': it must be an integer; see `gemmery ladder --help`"),
        ("ladder --threads -1", "it must be greater than or equal to 0; see"),
        ("ladder --threads 100000 --sizes 64 --no-html", "threads=100000 must be an integer from 1 to "),
        ("bench skinny --threads 100000 --no-html", "threads=100000 must be an integer from 1 to "),
        ("ladder --seconds x", "it must be a number; see"),
        ("bench small --seconds inf", "seconds=inf: the time to measure must be above 0 and finite"),
        ("bench small --seconds nan", "seconds=nan: the time to measure must be above 0 and finite"),
        (f"ladder --sizes {'9' * 5000}", "--sizes: a number of 5,000 digits; 18 digits are the most"),
        (f"inspect simt_naive --config bm={'9' * 19}", "--config bm: a number of 19 digits; 18 digits"),
        ("bench --workload chian", "workload 'chian' is not known; there are chain and distributed"),
        ("exhibit bank_stride --device cuda --as a100", "only the emulator runs as a named card"),
        ("inspect simt_naive --html /proc/nowhere/p.html", "page '/proc/nowhere/p.html': "),
        ("inspect simt_naive --svg /proc/nowhere", "choose another place with --svg"),
        ("inspect simt_naive packed", "packed a CPU rung: compare two rungs of one device"),
        ("inspect simt_naive bank_stride", "compare two rungs of one device, or two exhibits"),
        ("inspect simt_naive --config x", "'x' is not KEY=NUMBER"),
        ("inspect simt_naive --config bm=128", "simt_naive has no such key"),
        ("inspect simt_smem --config tile=16,tile=32", "tile is given twice; give it once"),
        ("inspect wgmma_cluster --config bn=0", "wgmma_cluster takes whole numbers >= 1, such as 64, 128, 256"),
        ("inspect wgmma_epilogue --config band=-1", "config band=-1: wgmma_epilogue takes whole numbers >= 0, such as"),
        ("inspect wgmma_tma --config bm=192", "use 64, 128 or 256 rows"),
        ("inspect simt_naive --dtype int8", "rung simt_naive takes f32"),
        ("emulate nowhere.cu", "nowhere.cu: there is no such file; give the path of a .cu or .ptx file"),
        ("emulate nowhere.cu --grid 4,x", "--grid 4,x: write one to three whole numbers >= 1"),
        ("emulate nowhere.cu --card vx1", "card 'vx1' is not known: times are predicted for h200, h100, a100"),
        ("emulate nowhere.cu --block 0", "--block 0: write one to three whole numbers >= 1"),
        ("emulate nowhere.cu --arg f33[4]", "--arg f33[4]: 'f33' is no element type; known: f16, f32"),
        ("emulate nowhere.cu --arg f32[4]=full", "'full' cannot fill an array of f32; take a number or zeros, ones"),
        ("emulate nowhere.cu --arg f32[0]", "sides are whole numbers >= 1"),
        ("emulate nowhere.cu --arg n=four", "'four' is no number; write f32[64,32]=random"),
        ("emulate nowhere.cu --arg x.npy", "x.npy cannot be read (No such file or directory)"),
        ("emulate nowhere.cu --check reference.py", "write the file and a function in it, such as reference.py:add"),
        ("emulate nowhere.cu --check reference.py:add", "there is no file reference.py"),
        ("emulate /proc", "/proc: it is a folder; give the path of a .cu or .ptx file"),
        ("emulate nowhere.cu --shared -1", "it must be greater than or equal to 0"),
        ("emulate nowhere.cu --html /proc/nowhere/p.html", "there is no such file"),
        ("inspect simt_naive --device sm_20", "did you mean 'sm_120a'? known: cuda"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(line, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "missing", lambda: "no driver here")
    assert cli.run(line.split()) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"gemmery: [^\n]+\n", err)
    assert said in err
    assert not (tmp_path / "p.html").exists()


def commands(command, words=()):
    """Each command with the words that call it."""
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*words, name))


VALUES = [
    pytest.param(words, each, id="_".join([*words, each.name]))
    for words, command in commands(typer.main.get_command(cli.app))
    for each in command.params
    if not getattr(each, "is_flag", False) and (*words, each.name) not in {("run", "arguments"), ("emulate", "arg")}
]


@pytest.mark.parametrize("value", ["", " ,"])
@pytest.mark.parametrize(("words", "each"), VALUES)
def test_an_empty_value_is_refused(words, each, value, capsys):
    flag = each.opts[0] if each.opts[0].startswith("-") else ""
    before = [flag] if flag else ["x"] * (each.name in ("new", "other"))
    assert cli.run([*words, *before, value]) == 2
    said = f"gemmery: {flag or each.metavar} {value!r}: the value is empty; write {f'{flag} {each.metavar}'.strip()}"
    assert capsys.readouterr().err.startswith(said if flag else said.removesuffix(each.metavar))


def test_a_script_and_a_program_may_take_an_empty_word(capsys):
    assert cli.run(["run", "nowhere.py", ""]) == cli.run(["emulate", "nowhere.cu", "--run", "--arg", ""]) == 2
    assert re.findall("nowhere.c?[a-z]+'?: (.*);", capsys.readouterr().err) == ["there is no such file"] * 2


def test_the_card_may_be_named_alone_and_in_any_case(capsys):
    counts = []
    for options in ("--device emulator --as RTX3090", "--as rtx3090", "--device RTX3090"):
        assert cli.run(["ladder", *options.split(), "--rungs", "simt_naive", "--sizes", "16,16", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["device"]["name"] == "rtx3090"
        counts.append([one["counts"] for one in found["rungs"]])
    assert counts[0] == counts[1] == counts[2]
    assert len(counts[0]) == 1  # 16,16 is one size


@pytest.mark.parametrize("options", ["--device emulator --as T4", "--device t4", "--as t4"])
def test_inspect_takes_the_same_words(options, capsys):
    assert cli.run(["inspect", "simt_naive", "--n", "64", "--dtype", "float64", *options.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"]["name"], found["problem"]["dtype"]) == ("t4", "f64")


def test_an_exhibit_on_the_emulator_has_a_page_and_json(capsys, tmp_path):
    page = tmp_path / "one.html"
    assert cli.run(["exhibit", "bank_stride", "--as", "A100", "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["arch"] == "sm_80"
    assert "bank conflicts" in page.read_text()
    assert cli.run(["exhibit", "--json"]) == 0
    assert "bank_stride" in [one["name"] for one in json.loads(capsys.readouterr().out)]


@pytest.mark.parametrize("options", ["--device emulator --as A100", "--as a100", "--device a100"])
def test_a_sweep_of_a_config_is_counted_on_the_emulator(options, capsys):
    assert cli.run(["sweep", "tile", "--n", "32", *options.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["name"] == "a100"
    assert [one["rung"] for one in found["rungs"]] == [f"simt_smem tile={2**power}" for power in range(1, 7)]
    assert [bool(one["refused"]) for one in found["rungs"]] == [False] * 5 + [True]
    sectors = [one["counts"]["sectors"] for one in found["rungs"][:4]]
    assert sectors == sorted(sectors, reverse=True)


def test_a_counted_sweep_has_a_page(capsys, tmp_path):
    page = tmp_path / "tile.html"
    assert cli.run(["sweep", "tile", "--n", "16", "--as", "a100", "--html", str(page)]) == 0
    text = page.read_text()
    assert "The sweep, emulated" in text
    assert "simt_smem tile=8" in text
    assert "Rungs under their parents" not in text


def test_a_size_is_measured_once():
    assert asked.sides([64, 8, 64]) == (8, 64)


def test_the_time_that_it_takes_is_told_first():
    assert estimate(33, 3.0) == "33 measurements, about 100 s"
    assert estimate(1, 3.0) == "1 measurement, about 3 s"
    assert estimate(60, 9.0) == "60 measurements, about 9 min"


def interrupted(run, after):
    """A stand-in for a command of lab that Ctrl-C ends after so many measurements."""

    def measure(*_, on_event=None, **__):
        on_event = on_event or _[-1]
        for done, m in enumerate(run.measurements[:after], 1):
            so_far = record.Run(run.machine, run.started, run.measurements[:done])
            on_event(lab.RunEvent(m.kernel, done, len(run.measurements), m, so_far))
        raise KeyboardInterrupt

    return measure


@pytest.mark.parametrize("line", ["ladder", "sweep block", "bench small --no-store"])
def test_an_interrupted_command_shows_what_it_has(line, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    name = line.split()[0]
    run = {"ladder": records.ladder, "sweep": records.sweep_block, "bench": records.bench}[name]()
    monkeypatch.setattr(lab, name, interrupted(run, 5))
    assert cli.run(line.split()) == 130
    out, err = capsys.readouterr()
    assert err.endswith("gemmery: interrupted; the results so far are above\n")
    path = re.search(r"^page: (.+)$", out, re.MULTILINE)[1]
    assert (tmp_path / path).read_text().startswith("<!doctype html>")
    assert {"ladder": "packed", "sweep": "128", "bench": "8 × 1024"}[name] in out
    assert cli.run([*line.split(), "--json"]) == 130
    assert len(json.loads(capsys.readouterr().out)["measurements"]) == 5


def test_an_interrupt_before_the_first_result_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(lab, "ladder", interrupted(records.ladder(), 0))
    assert cli.run(["ladder", "--no-html"]) == 130
    assert capsys.readouterr().err == "gemmery: interrupted\n"


def test_an_interrupted_emulator_shows_the_rungs_so_far(monkeypatch, capsys):
    ladder = lab.emulated_ladder(["simt_naive", "simt_smem"], [16])

    def count(*arguments):
        arguments[-1]("simt_naive", 1, 2, ladder.rungs[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "emulated_ladder", count)
    assert cli.run(["ladder", "--device", "a100", "--rungs", "simt_naive,simt_smem", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert [one["rung"] for one in found["rungs"]] == ["simt_naive"]
    assert found["device"]["name"] == "a100"


def test_too_many_threads_are_noted(monkeypatch, capsys):
    def measure(*_, **__):
        _[-1](lab.RunEvent("packed", 0, 1))
        return records.ladder()

    monkeypatch.setattr(lab, "ladder", measure)
    assert cli.run(["ladder", "--no-html", "--threads", "4096"]) == 0
    assert re.search(r"about \d+ (s|min); 4096 threads share \d+ cores?\n", capsys.readouterr().err)


def test_a_locale_without_the_signs_gets_question_marks(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["gemmery", "exhibit"])
    with pytest.raises(SystemExit):
        cli.main()
    out.write("2 × 3")
    out.flush()
    assert out.buffer.getvalue().endswith(b"2 ? 3")


def test_what_was_too_slow_is_told_with_the_option_that_raises_the_limit(monkeypatch, capsys):
    run = records.ladder()
    slow = replace(run.measurements[0], seconds=0.0, refused=measurements.too_slow(68.0, 5.0))
    monkeypatch.setattr(lab, "ladder", lambda *_, **__: replace(run, measurements=(slow,)))
    assert cli.run(["ladder", "--no-html"]) == 0
    out, err = capsys.readouterr()
    assert "scalar_naive did not run: predicted to take 68 s a call, above the limit of 5 s" in re.sub(r"\s+", " ", out)
    assert "raise the limit with --seconds" in err


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(Path(lab.__file__).parent.glob("*.py")) if path.stem != "experiments"],
    ids=lambda path: path.stem,
)
def test_the_library_speaks_of_no_option_of_the_command(path):
    said = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    assert [text for text in said if isinstance(text, str) and re.search(r"(?<![-!<])--[a-z]", text)] == []


def test_the_library_takes_the_same_words():
    found = inspect_rung("simt_naive", n=32, dtype="float64", device="RTX3090", counters=False)
    assert (found.problem.dtype, found.device.name) == ("f64", "rtx3090")
    assert inspect_rung("simt_naive", n=32, device="emulator", counters=False).device.name == "h200"
    ladder = lab.emulated_ladder(["simt_naive"], [16, 16], "float64", "A100")
    assert [(one.dtype, one.size) for one in ladder.rungs] == [("f64", 16)]
    assert lab.emulated_exhibit("bank_stride", device="A100")[0].arch == "sm_80"
    with pytest.raises(ArgumentError, match="emulated_ladder"):
        lab.ladder(device="emulator")


def test_a_suite_takes_the_same_words(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[[product]]\nsquare = [4]\ndtype = ["float32"]\nout = "double"')
    (work,) = suite.load(file).works
    assert (work.dtype, work.out) == ("f32", "f64")


def test_all_suites_tell_how_long_they_take(monkeypatch, capsys):
    def measure(*_, **__):
        _[-1](lab.RunEvent("gm.matmul", 0, 1))
        return records.bench()

    monkeypatch.setattr(lab, "bench", measure)
    assert cli.run(["bench", "--no-html", "--no-store", "--seconds", "10"]) == 0
    assert re.search(r"^\d+ measurements, about \d+ min\n", capsys.readouterr().err)


def test_the_announced_number_of_measurements_is_that_of_the_run(capsys):
    assert cli.run(["ladder", "--rungs", "direct", "--sizes", "16", "--no-html"]) == 0
    announced, *progress = capsys.readouterr().err.splitlines()
    assert announced.startswith("2 measurements")
    assert [line.partition(" ")[0] for line in progress[:2]] == ["1/2", "2/2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"config": 5}, "config 5: pass a dict"),
        ({"config": {"tile": True}}, "config 'tile': True is not a whole number"),
        ({"config": np.ones(2)}, r"config array\(\[1., 1.\]\): pass a dict"),
        ({"device": 3}, "device 3: write its name"),
        ({"line": np.ones(2)}, r"line=array\(\[1., 1.\]\): pass FILE:LINE"),
        ({"other": np.ones(2)}, r"other=array\(\[1., 1.\]\): pass the name of a rung"),
    ],
)
def test_inspect_refuses_arguments_of_other_types(options, said):
    with pytest.raises(ArgumentError, match=said):
        gm.inspect("simt_smem", n=32, counters=False, **options)


@pytest.mark.process
def test_a_closed_stdout_is_one_line():
    command = [sys.executable, "-c", "import sys; sys.stdout = None; from gemmery_lab import cli; cli.main()", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = "gemmery: output: stdout is closed; leave it open, or send it to a file\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_run_that_times_nothing_fails(capsys):
    assert cli.run(["bench", "skinny", "--threads", "256", "--no-store", "--no-html"]) == 1
    assert capsys.readouterr().err.endswith("gemmery: nothing was timed; the reasons are above\n")
