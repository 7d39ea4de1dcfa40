"""Triton's interpreter, without work that tests need not wait for."""

from __future__ import annotations

import dataclasses
import sys


def hurry_the_interpreter() -> None:
    """Let the interpreter patch Triton's language once a launch, and not look for overflows of integers.

    It replaces each function of the language by its own at a launch, and does so again for each function that
    the kernel calls, which changes nothing. Sums and products of integers are computed a second time, in 64
    bits, to see whether they overflow: no test has tensors so large that their offsets do, and other wrong
    numbers show in the results. Each of the two takes about a quarter of the time of most kernels.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:  # no test that was collected uses it
        return
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch, scope, language = interpreter._patch_lang, interpreter._LangPatchScope, interpreter.tl

    def patch_once(function):
        names = function.__globals__.values()
        used = [module for module in (language, language.core) if any(name is module for name in names)]
        return patch(function) if any(language.core.is_builtin(module.load) for module in used) else scope()

    interpreter._patch_lang = patch_once
