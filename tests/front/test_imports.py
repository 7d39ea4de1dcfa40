"""What importing costs: the front never imports torch, and `import quire` next to nothing."""

from __future__ import annotations

import pytest

import quire
from subprocesses import python_output


def test_importing_the_package_imports_nothing_else():
    heavy = ["numpy", "torch", "zmq", "msgspec", "asyncio", "dataclasses", "quire.config"]
    code = f"import sys, quire; print([name for name in {heavy} if name in sys.modules])"
    assert python_output(code) == "[]\n"


def test_the_front_does_without_torch(checkpoint):
    code = """
import sys
from quire import *
import quire.engine.process.main
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.hub import resolve_model
from quire.models.checkpoints.tokenizers.reading import read_tokenizer
path = resolve_model(sys.argv[1])
read_model_config(path), read_tokenizer(path).encode("a")
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    assert python_output(code, checkpoint) == "[]\n"


@pytest.mark.processes
def test_the_engine_does_without_slow_modules(checkpoint):
    code = f"""
import sys
from quire import LLM, SamplingParams
llm = LLM({checkpoint!r}, num_kv_blocks=32, num_threads=1)
llm.generate("the", SamplingParams(max_tokens=2))
slow = ["transformers", "torch._dynamo", "torchvision", "torch._inductor", "rich"]
print([name for name in slow if name in sys.modules])
"""
    assert python_output(code) == "[]\n"


def test_public_names():
    for name in quire.__all__:
        assert getattr(quire, name).__name__ == name
        assert name in dir(quire)
    with pytest.raises(AttributeError, match="LLMM"):
        _ = quire.LLMM
