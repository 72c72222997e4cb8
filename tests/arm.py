"""Run tests on aarch64, under QEMU's user emulation: `make test-arm` in a checkout, on a Debian with apt.

Debian's arm64 Python and the wheels of requirements.lock go into a folder of the user's cache, without root and without
installing anything. Where a package cannot be had, nothing runs, and the last line says why.
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
# QEMU's names of CPUs, each of another set of kernels: without dot products, with those of bytes, with all but SVE.
CPUS = {"cortex-a72": "neon", "neoverse-n1": "neon_dot", "max,sve=off,sme=off": "neon_mmla"}


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
        print(f"no test ran on aarch64: {error}\n{said[-1000:]}".rstrip())
        return 0
    failed = 0
    for cpu in asked.cpu or CPUS:
        begun = time.monotonic()
        print(f"-cpu {cpu}", flush=True)
        done = subprocess.run(
            emulated(home, cpu, "-m", "pytest", *(asked.arguments or chosen(cpu))), env=environment(home), cwd=ROOT
        )
        failed |= done.returncode
        print(f"-cpu {cpu}: {time.monotonic() - begun:.0f} s", flush=True)
    return failed


def chosen(cpu: str) -> list[str]:
    return ["-q", "packages/gemmery/tests/cpu/test_cpu_arm.py"]


def emulated(home: Path, cpu: str, *arguments: str) -> list[str]:
    """The command that runs the emulated Python."""
    qemu = home / "qemu/usr/bin/qemu-aarch64-static"
    return [str(qemu), "-cpu", cpu, "-L", str(home / "arm64"), str(home / "arm64/usr/bin/python3.11"), *arguments]


def environment(home: Path) -> dict[str, str]:
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "PYTHON"))}
    cache = str(home / "cache")
    return kept | {"PYTHONPATH": os.pathsep.join([str(home / "site"), *sources]), "GEMMERY_CACHE_DIR": cache}


def prepare(home: Path) -> None:
    """Fetch QEMU, Python and wheels, unless they are there."""
    lock = ROOT / "requirements.lock"
    stamp, asked = home / "prepared", f"{lock.read_text()}{Path(__file__).read_text()}"
    if stamp.exists() and stamp.read_text() == asked:
        return
    for tool in ("apt-get", "dpkg"):
        if not shutil.which(tool):
            raise OSError(f"there is no {tool}: QEMU and an arm64 Python come from Debian's packages")
    shutil.rmtree(home, ignore_errors=True)
    packages = home / "packages"
    for folder in ("lists/partial", "archives/partial"):
        (packages / folder).mkdir(parents=True)
    (packages / "status").touch()
    native = run("dpkg", "--print-architecture").strip()
    options = [
        "APT::Architecture=arm64", f"APT::Architectures=arm64,{native}", f"Dir::State={packages}",
        f"Dir::State::status={packages / 'status'}", f"Dir::Cache={packages}", "Debug::NoLocking=true",
    ]  # fmt: skip
    apt = ["apt-get", "--quiet", *(part for option in options for part in ("-o", option))]
    run(*apt, "update")
    run(*apt, "--yes", "--no-install-recommends", "--download-only", "install", "python3.11", "libstdc++6")
    unpack(packages / "archives", home / "arm64")
    (home / "native").mkdir()
    run(*apt, "download", f"qemu-user-static:{native}", cwd=home / "native")
    unpack(home / "native", home / "qemu")
    pins = re.split(r"^(?=\S)", lock.read_text(), flags=re.MULTILINE)
    (home / "pins").write_text("".join(pin for pin in pins if pin.partition("==")[0] in WHEELS))
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile",
        "--only-binary=:all:", "--python-version=3.11", "--implementation=cp", f"--target={home / 'site'}",
        *(f"--platform={platform}" for platform in PLATFORMS), "--no-deps", "--require-hashes",
        f"--requirement={home / 'pins'}",
    )  # fmt: skip
    stamp.write_text(asked)


def unpack(folder: Path, to: Path) -> None:
    for package in folder.glob("*.deb"):
        run("dpkg", "-x", str(package), str(to))


def run(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(command, check=True, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout


if __name__ == "__main__":
    sys.exit(main())
