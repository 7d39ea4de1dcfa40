"""Write src/quire/kernels/cpu/_native.pyi from the extension module as it is built.

python tools/native_stub.py            writes the stub
python tools/native_stub.py --check    fails if the stub is not current
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

from generated import write_or_check
from quire.kernels import has_native_kernels

STUB = Path(__file__).parent.parent / "src" / "quire" / "kernels" / "cpu" / "_native.pyi"
RUFF = Path(sys.executable).parent / "ruff"

HEADER = '''\
"""The extension module. Addresses are of memory that outlives the call.

Written by tools/native_stub.py from native/src/bindings; edit those, build them, then run it.
"""

'''


def stub() -> str:
    """Return the stub, formatted."""
    from quire.kernels.cpu import _native

    generator = StubGen(_native)
    generator.put(_native)
    return ruff("check --select I --fix --quiet", ruff("format", HEADER + generator.get()))


def ruff(command: str, text: str) -> str:
    """Return `text` as ruff leaves it."""
    arguments = [RUFF, *command.split(), "--stdin-filename", STUB, "-"]
    return subprocess.run(arguments, input=text, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Write or check the stub; return the exit status."""
    if not has_native_kernels():
        print("the native kernels are not built, so their stub is left as it is", file=sys.stderr)
        return 0
    return write_or_check(STUB, stub())


if __name__ == "__main__":
    raise SystemExit(main())
