"""Triton's compiler takes what its interpreter takes."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from compiled import output_of

import quire.kernels.triton


def _kernels() -> set[str]:
    """Return the names of the functions that are launched, but those of attention and of experts."""
    modules = pkgutil.walk_packages(quire.kernels.triton.__path__, "quire.kernels.triton.")
    others = [module.name for module in modules if ".experts." not in module.name]
    named = [item for name in others for item in vars(importlib.import_module(name)).items()]
    return {name for name, value in named if name.endswith("_kernel") and hasattr(value, "run")}


def test_every_kernel_is_compiled_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    compiled = output_of("compile_layers_for_hopper.py", tmp_path)
    assert len(_kernels()) > 10
    assert set(compiled.split()) == _kernels()
