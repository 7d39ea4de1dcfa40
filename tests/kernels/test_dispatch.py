"""Which kernels are chosen, and that Quire runs where the native ones could not be built."""

from __future__ import annotations

import importlib.util
import logging
import sys

import native_settings
import pytest
import torch
import triton

import subprocesses
from quire.errors import ConfigError
from quire.kernels import dispatch
from quire.kernels.cpu import _native
from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.devices.cores import usable_cpus
from quire.kernels.triton import device

WITHOUT_NATIVE_KERNELS = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] == "quire"]:
    del sys.modules[name]
sys.modules["quire.kernels.cpu._native"] = None
from quire import LLM, SamplingParams
with LLM("mini", num_kv_blocks=64, max_num_seqs=4, weight_cache="") as llm:
    (output,) = llm.generate(["What is"], SamplingParams(max_tokens=4, temperature=0.7, seed=1))
print(len(output.outputs[0].token_ids))
"""


class NoCompiler:
    """Triton's driver on a machine without a C compiler."""

    @property
    def active(self) -> None:
        raise RuntimeError("Failed to find C compiler.")


def test_without_native_kernels_the_reference_runs_and_that_is_said_once() -> None:
    done = subprocesses.run([sys.executable, "-c", WITHOUT_NATIVE_KERNELS], preload=True)
    assert done.stdout == "4\n"
    assert done.stderr.count("without its native kernels") == 1


def test_native_kernels_that_are_missing_are_an_error_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_native_kernels", lambda: False)
    choose = dispatch.kernel_set.__wrapped__
    with pytest.raises(ConfigError, match=r"EngineConfig\.kernels is 'native', but .* set it to 'auto'"):
        choose("native")
    assert choose("auto").name == "reference"


def test_kernels_in_triton_are_an_error_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = dispatch.kernel_set.__wrapped__
    assert choose("triton").name == "triton"
    monkeypatch.setattr(device, "is_interpreted", False)
    monkeypatch.setattr(dispatch, "cuda_obstacle", lambda: "torch sees no GPU")
    with pytest.raises(
        ConfigError, match=r"EngineConfig\.kernels is 'triton', but torch sees no GPU; .* TRITON_INTERPRET=1"
    ):
        choose("triton")
    monkeypatch.setattr(dispatch, "cuda_obstacle", lambda: "")
    monkeypatch.setattr(device, "launch_obstacle", lambda: "")
    assert choose("triton").device == torch.device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Triton is not installed; install quire\[gpu\]"):
        choose("triton")


def test_what_keeps_kernels_from_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "cuda_obstacle", lambda: "torch sees no GPU")
    assert dispatch.gpu_obstacle() == "torch sees no GPU"
    monkeypatch.setattr(dispatch, "cuda_obstacle", lambda: "")
    assert "TRITON_INTERPRET is set" in dispatch.gpu_obstacle()
    monkeypatch.setattr(device, "is_interpreted", False)
    monkeypatch.setattr(triton.runtime, "driver", NoCompiler())
    assert dispatch.gpu_obstacle() == (
        "Triton cannot launch kernels (RuntimeError: Failed to find C compiler.); install a C compiler and "
        "Python's headers, or name a compiler in CC"
    )
    monkeypatch.setattr(triton.runtime, "driver", None)
    assert dispatch.gpu_obstacle().startswith("Triton cannot launch kernels (AttributeError: ")
    assert "compiler" not in dispatch.gpu_obstacle()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dispatch.gpu_obstacle() == "Triton is not installed; install quire[gpu]"


def test_nothing_but_its_kernels_loads_triton() -> None:
    code = "import sys, quire.execution.model_runner; print('triton' in sys.modules)"
    assert subprocesses.run([sys.executable, "-c", code], preload=True).stdout == "False\n"


def test_more_threads_than_cpus_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with native_settings.threads(_native.num_threads()), caplog.at_level(logging.WARNING):
        NativeKernels().use_threads(usable_cpus())
        assert not caplog.records
        NativeKernels().use_threads(usable_cpus() + 1)
    assert "may use only" in caplog.text
