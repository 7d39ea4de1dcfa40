"""A preloaded program cannot tell that it was not started as any other, but for its modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import preloaded
import subprocesses

PROBE = """
import os, sys
print(__name__, sys.argv, sys.path, os.getcwd(), os.environ["PROBE"], sorted(os.listdir("/proc/self/fd"))[:3])
print(os.getppid(), os.getsid(0) == os.getpgid(0) == os.getpid(), repr(sys.stdin.read()), file=sys.stderr)
sys.exit(%s)
"""


@pytest.mark.parametrize("status", ["0", "7", "'reason'"])
@pytest.mark.parametrize("command", [["-c", PROBE], ["-m", "probe"], ["-P", "-m", "probe"], ["room/file.py"]])
def test_it_is_given_what_a_real_one_is(tmp_path: Path, monkeypatch, command: list[str], status: str) -> None:
    (tmp_path / "room").mkdir()
    for path in (tmp_path / "probe.py", tmp_path / "room" / "file.py"):
        path.write_text(PROBE % status)
    monkeypatch.setenv("PROBE", "set")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, *(part.replace("%s", status) for part in command), "an argument"]
    real, here = (
        subprocesses.run(command, stdin="text", cwd=tmp_path, preload=preload) for preload in (False, True)
    )
    assert (here.stdout, here.stderr, here.returncode) == (real.stdout, real.stderr, real.returncode)


def test_it_has_imported_torch_and_computes_in_a_process_of_its_own() -> None:
    code = "import os, sys; print(os.getpid(), 'torch' in sys.modules)"
    with preloaded.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read() == f"{process.pid} True\n"


def test_other_programs_are_started_as_they_are() -> None:
    assert preloaded.Popen(["true"]).wait() == 0
