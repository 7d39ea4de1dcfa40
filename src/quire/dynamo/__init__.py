"""Quire as a worker of NVIDIA Dynamo: `python -m quire.dynamo model=mini discovery_backend=file`.

Dynamo's front end has the HTTP API, the chat template and the tokenizer, and its router chooses a worker by
load and by the KV events that engines publish. A worker gets token ids and returns token ids: `engine.py` is
Dynamo's `LLMEngine` over an `AsyncLLM`, and `translation.py` turns its requests and chunks into Quire's.
Options are the flags of `quire serve` for the engine, and the fields of `DynamoConfig`.
docs/many-machines.md has more.

It needs the extra `dynamo`, which `import quire` does not import.
"""

from __future__ import annotations

from quire.lazy_attributes import lazy_attributes

TYPE_CHECKING = False

if TYPE_CHECKING:
    from quire.dynamo.engine import QuireEngine

__all__ = ["QuireEngine"]

__getattr__, __dir__ = lazy_attributes(globals(), dict.fromkeys(__all__, "quire.dynamo.engine"))
