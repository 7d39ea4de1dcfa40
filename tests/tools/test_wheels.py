"""Which wheels are built for which interpreters, and which are tried with which."""

import itertools
import sys
from pathlib import Path

import pytest
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

import wheels

VERSIONS = [(3, minor) for minor in range(11, 16)]
PLATFORM = "manylinux_2_28_x86_64"
NAMES = (
    f"quire-0.1.0-cp311-cp311-{PLATFORM}.whl",
    f"quire-0.1.0-cp312-cp312-{PLATFORM}.whl",
    f"quire-0.1.0-cp312-abi3-{PLATFORM}.whl",
    f"quire-0.1.0-cp312-abi3-manylinux_2_27_x86_64.{PLATFORM}.whl",
    "quire-0.1.0-py3-none-any.whl",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_wheel_is_for_the_versions_on_which_pip_takes_it(name):
    _, _, _, tags = parse_wheel_filename(name)
    for version in VERSIONS:
        taken = {*cpython_tags(version, platforms=[PLATFORM]), *compatible_tags(version, "cp", [PLATFORM])}
        assert wheels.is_for(Path(name), version) == bool(tags & taken)


def test_every_version_gets_a_compiled_wheel_and_none_gets_two():
    subsets = itertools.chain.from_iterable(
        itertools.combinations(VERSIONS, size) for size in range(1, 1 + len(VERSIONS))
    )
    for versions in subsets:
        compiled_for = wheels.to_compile_for(versions[::-1])
        assert compiled_for == sorted(compiled_for)
        built = [
            Path(f"quire-0.1.0-cp3{minor}-{'abi3' if minor >= 12 else f'cp3{minor}'}-{PLATFORM}.whl")
            for _, minor in compiled_for
        ]
        for version in versions:
            assert sum(wheels.is_for(wheel, version) for wheel in built) == 1


def test_a_shim_without_its_interpreter_is_passed_over(tmp_path):
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    assert wheels.working([str(shim), "no-such-python", sys.executable]) == {
        sys.version_info[:2]: sys.executable
    }


def test_compiled_wheels_are_tried_with_each_version_and_the_other_with_one(tmp_path, monkeypatch):
    for name in (NAMES[0], NAMES[2], NAMES[4]):
        (tmp_path / name).touch()
    tried = []
    monkeypatch.setattr(wheels, "DIST", tmp_path)
    monkeypatch.setattr(wheels, "try_wheel", lambda wheel, *python: tried.append((wheel.name, *python)))
    wheels.check({(3, 13): "thirteen", (3, 11): "eleven", (3, 12): "twelve"})
    assert tried == [
        (NAMES[0], "eleven", "3.11"),
        (NAMES[2], "twelve", "3.12"),
        (NAMES[2], "thirteen", "3.13"),
        (NAMES[4], "eleven", "3.11"),
    ]


def test_without_wheels_the_command_that_builds_them_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "DIST", tmp_path)
    with pytest.raises(SystemExit, match="make wheels"):
        wheels.check({(3, 11): "eleven"})
