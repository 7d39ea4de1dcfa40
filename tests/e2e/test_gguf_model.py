"""A GGUF file with nothing beside it, through the whole engine."""

from __future__ import annotations

import re
from pathlib import Path

from gguf_checkpoints import write_gguf

from checkpoints import make_checkpoint
from quire import LLM, SamplingParams, StructuredOutputsParams


def test_plain_and_structured_outputs(tmp_path: Path) -> None:
    made, _ = write_gguf(make_checkpoint("llama", tmp_path / "model"), "llama", "F32", has_tokenizer=True)
    digits = StructuredOutputsParams(regex="[0-9]{2,5}")
    with LLM(str(made), num_kv_blocks=64, max_num_seqs=4) as llm:
        (plain,) = llm.generate(["the cache"], SamplingParams(max_tokens=12, temperature=0))
        (structured,) = llm.generate(["the cache"], SamplingParams(temperature=0, structured_outputs=digits))
    assert plain.outputs[0].token_ids
    assert re.fullmatch("[0-9]{2,5}", structured.outputs[0].text)
