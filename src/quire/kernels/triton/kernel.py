"""Functions in Triton that are launched, and compiling them without computing anything."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import triton
from triton.runtime.cache import triton_key
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from typing_extensions import override

from quire.errors import ConfigError
from quire.kernels.triton.device import compute_capability, is_interpreted

_MIN_CAPABILITY = 90  # of GPUs that can launch kernels early: that of Hopper
_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)


class _CompiledKernel(JITFunction):  # type: ignore[misc]
    def run(self, *args: Any, warmup: bool, **options: Any) -> Any:
        warmup = warmup or _compiles_only.get()
        try:
            return super().run(*args, warmup=warmup, launch_pdl=launches_early(), **options)
        except triton.OutOfResources as error:
            raise ConfigError(
                f"{self.__name__} needs more {error.name} ({error.required:,}) than this GPU has "
                f"({error.limit:,}); set EngineConfig.dtype to 'bfloat16' if it is 'float32', or "
                "EngineConfig.device to 'cpu'"
            ) from error


class _InterpretedKernel(InterpretedFunction):  # type: ignore[misc]
    def run(self, *args: Any, warmup: bool, **options: Any) -> Any:
        return super().run(*args, warmup=warmup or _compiles_only.get(), **options)


def launches_early() -> bool:
    """Return whether a kernel is launched before the last one has ended; see `device.await_previous`."""
    return compute_capability() >= _MIN_CAPABILITY


def kernel(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator of functions in Triton that are launched; others are decorated by `triton.jit`.

    Args:
        options: as those of `triton.jit`.
    """
    kind = _InterpretedKernel if is_interpreted else _CompiledKernel
    return lambda function: kind(function, **options)


def hash_compiler_ahead() -> None:
    """Let a thread compute the hash of Triton's own files, which the keys of all compiled kernels begin with.

    They are some hundred megabytes, for which the first kernel would wait.
    """
    if not is_interpreted:
        with contextlib.suppress(RuntimeError):  # no more threads: the first kernel computes it
            threading.Thread(target=triton_key, daemon=True).start()


class _CompilerThreads(ThreadPoolExecutor):
    """Threads for `triton.AsyncCompileMode` that compile the launcher of a kernel, too.

    Triton 3.6 makes that from C, for each combination of types of arguments, when a kernel is launched for
    the first time: one after the other, a third of a second each. Now it finds it in its cache then.
    """

    @override
    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        return super().submit(_compiled_with_launcher, compile_kernel)


def _compiled_with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    """Return the kernel."""
    compiled = compile_kernel()
    triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)
    return compiled


@contextlib.contextmanager
def compile_only(num_threads: int) -> Iterator[None]:
    """Let this thread's launches only compile their kernels, on `num_threads` threads.

    Outputs of kernels are undefined afterwards. All are compiled at the end. A kernel that does not compile
    raises at its next launch.
    """
    token = _compiles_only.set(True)
    try:
        with _CompilerThreads(num_threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        _compiles_only.reset(token)


def compiles_only() -> bool:
    """Return whether `compile_only` is entered."""
    return _compiles_only.get()
