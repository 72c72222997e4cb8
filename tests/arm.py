"""Run tests on aarch64, under QEMU's user emulation: `make test-arm` in a checkout, on a Debian with apt.

Debian's arm64 Python and the wheels of requirements.lock go into a folder of the user's cache, without root and without
installing anything. Kernels are compiled on this machine, for the CPU that is emulated, into a cache that the tests
read, since LLVM is slow under emulation. Where a package cannot be had, nothing runs, and the last line says why.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEELS = (
    "numpy", "llvmlite", "platformdirs", "pytest", "iniconfig", "packaging", "pluggy", "pygments", "hypothesis",
    "sortedcontainers", "ml-dtypes",
)  # fmt: skip
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)] + ["manylinux2014_aarch64"]
# QEMU's names of CPUs, with the kernels that each has: without dot products, with those of bytes, with blocks,
# and with registers of SVE.
CPUS = {
    "cortex-a72": "neon", "neoverse-n1": "neon_dot", "max,sve128=on,sve256=on": "sve_256", "max,sve512=on": "sve_512",
    "max,sve256=on": "neon_mmla",
}  # fmt: skip
CPU_TESTS = "packages/gemmery/tests/cpu"
# What runs on every CPU, and what on the last one alone. The code of the kernels is tested on every machine.
KERNELS = (f"{CPU_TESTS}/test_cpu_arm.py", "-k", "not inner_loop and not limited")
OTHERS = (
    f"{CPU_TESTS}/test_cpu_packed.py", f"{CPU_TESTS}/test_cpu_threads.py", "packages/gemmery/tests/api/test_api.py",
    "packages/gemmery/tests/api/test_api_out.py", "packages/gemmery/tests/api/test_api_wrong_arguments.py",
)  # fmt: skip
ALWAYS = ("-q", "-p", "no:cacheprovider", "--few")
COMPILE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from gemmery import dtypes
from gemmery.api.warm import _pairs
from gemmery.cpu import build, entry_code, images as texts, jit, pool_code
from gemmery.cpu.target import Target
target = eval(sys.argv[1])
build.host = texts.host = lambda: target
pairs = [pair for name in dtypes.BY_NAME for pair in _pairs(name)]
images = {"pool": lambda: pool_code.module(target)}
if sys.version_info[:2] == (3, 11):  # it knows the layout of Python's objects
    images["entry"] = lambda: entry_code.module(target)
images |= {name: image for pair in pairs for name, image in texts.serving(*pair)}
images = {name: image for name, image in images.items() if not jit.stored(target, name)}
with ThreadPoolExecutor() as pool:
    list(pool.map(lambda name: jit.store(target, name, images[name]), images))
print(len(images))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="append", choices=CPUS, help="the emulated CPU, repeatable (default: each)")
    parser.add_argument("arguments", nargs="*", help="after --, pytest's arguments instead of the chosen tests'")
    asked = parser.parse_args()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemmery-arm"
    try:
        prepare(home)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or ""
        say(f"no test ran on aarch64: {error}\n{said[-1000:]}".rstrip())
        return 0
    failed = 0
    for cpu in asked.cpu or CPUS:
        begun = time.monotonic()
        count = compile_kernels(home, cpu)
        say(f"-cpu {cpu}: {count} kernels compiled in {time.monotonic() - begun:.0f} s")
        for tests in [asked.arguments] if asked.arguments else chosen(cpu):
            asks = ("--isa", "sve_256") if CPUS[cpu] == "sve_256" else ()  # else it has registers of 128 bits
            failed |= emulated(home, cpu, "-m", "pytest", *ALWAYS, *asks, *tests).returncode
        say(f"-cpu {cpu}: {time.monotonic() - begun:.0f} s in all")
    return failed


def chosen(cpu: str) -> list[tuple[str, ...]]:
    """The arguments of each run of pytest."""
    others = ("-m", "not process and not compiler", *OTHERS)
    return [KERNELS, others] if cpu == list(CPUS)[-1] else [KERNELS]


def emulated(home: Path, cpu: str, *arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the emulated Python."""
    qemu, system = home / "qemu-aarch64-static", home / "arm64"
    command = [str(qemu), "-cpu", cpu, "-L", str(system), str(system / "usr/bin/python3.11"), *arguments]
    env = environment(home, str(home / "site")) | {"EMULATED_ISA": CPUS[cpu]}
    if CPUS[cpu] == "sve_256":  # for what is no test
        env["GEMMERY_ISA"] = "sve_256"
    return subprocess.run(
        command, env=env, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE if capture else None
    )


def environment(home: Path, *more: str) -> dict[str, str]:
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "PYTHON", "GEMMERY_"))}
    return kept | {"PYTHONPATH": os.pathsep.join([*more, *sources]), "GEMMERY_CACHE_DIR": str(home / "kernels")}


def compile_kernels(home: Path, cpu: str) -> int:
    """Compile the kernels of all element types for the emulated CPU, and return how many were missing."""
    host = emulated(home, cpu, "-c", "from gemmery.cpu.target import host; print(host())", capture=True).stdout
    command = [sys.executable, "-c", COMPILE, host]
    return int(subprocess.run(command, env=environment(home), check=True, capture_output=True, text=True).stdout)


def prepare(home: Path) -> None:
    """Fetch QEMU, Python and wheels, unless they are there."""
    lock = ROOT / "requirements.lock"
    pins = [
        pin for pin in re.split(r"^(?=\S)", lock.read_text(), flags=re.MULTILINE) if pin.partition("==")[0] in WHEELS
    ]
    stamp, asked = home / "prepared", f"{''.join(pins)}{PLATFORMS}"
    if stamp.exists() and stamp.read_text() == asked:
        return
    for tool in ("apt-get", "dpkg"):
        if not shutil.which(tool):
            raise OSError(f"there is no {tool}: QEMU and an arm64 Python come from Debian's packages")
    shutil.rmtree(home, ignore_errors=True)
    packages = home / "packages"
    for folder in ("lists/partial", "archives/partial", "native"):
        (packages / folder).mkdir(parents=True)
    (packages / "status").touch()
    native = run("dpkg", "--print-architecture").strip()
    options = [
        "APT::Architecture=arm64", f"APT::Architectures=arm64,{native}", f"Dir::State={packages}",
        f"Dir::State::status={packages / 'status'}", f"Dir::Cache={packages}", "Debug::NoLocking=true",
        "APT::Sandbox::User=",
    ]  # fmt: skip
    apt = ["apt-get", "--quiet", *(part for option in options for part in ("-o", option))]
    run(*apt, "update")
    run(*apt, "--yes", "--no-install-recommends", "--download-only", "install", "python3.11", "libstdc++6")
    unpack(packages / "archives", home / "arm64")
    run(*apt, "download", f"qemu-user-static:{native}", cwd=packages / "native")
    unpack(packages / "native", packages / "qemu")
    (packages / "qemu/usr/bin/qemu-aarch64-static").rename(home / "qemu-aarch64-static")
    (home / "pins").write_text("".join(pins))
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile",
        "--only-binary=:all:", "--python-version=3.11", "--implementation=cp", f"--target={home / 'site'}",
        *(f"--platform={platform}" for platform in PLATFORMS), "--no-deps", "--require-hashes",
        f"--requirement={home / 'pins'}",
    )  # fmt: skip
    shutil.rmtree(packages)
    stamp.write_text(asked)


def unpack(folder: Path, to: Path) -> None:
    for package in folder.glob("*.deb"):
        run("dpkg", "-x", str(package), str(to))


def run(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(command, check=True, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
