"""Triton's compiler takes what its interpreter takes."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path

import quire.kernels.triton
import subprocesses

SCRIPT = Path(__file__).parent / "compile_layers_for_hopper.py"


def _kernels() -> set[str]:
    """Return the names of the functions that are launched, but those of attention and of experts."""
    modules = pkgutil.iter_modules(quire.kernels.triton.__path__, "quire.kernels.triton.")
    others = [module.name for module in modules if ".expert" not in module.name]
    named = [item for name in others for item in vars(importlib.import_module(name)).items()]
    return {name for name, value in named if name.endswith("_kernel") and hasattr(value, "run")}


def test_every_kernel_is_compiled_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(SCRIPT.parents[2]),
    }
    done = subprocesses.run([sys.executable, str(SCRIPT)], env=environment)
    assert done.returncode == 0, done.stderr
    assert len(_kernels()) > 10
    assert set(done.stdout.split()) == _kernels()
