"""A GGUF file with nothing beside it, through the whole engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gguf_checkpoints import write_gguf

from checkpoints import make_checkpoint
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.errors import KVFileError


def test_plain_and_structured_outputs(tmp_path: Path) -> None:
    made, _ = write_gguf(make_checkpoint("llama", tmp_path / "model"), "llama", "F32", has_tokenizer=True)
    digits = StructuredOutputsParams(regex="[0-9]{2,5}")
    with LLM(str(made), num_kv_blocks=64, max_num_seqs=4) as llm:
        (plain,) = llm.generate(["the cache"], SamplingParams(max_tokens=12, temperature=0))
        (structured,) = llm.generate(["the cache"], SamplingParams(temperature=0, structured_outputs=digits))
    assert plain.outputs[0].token_ids
    assert re.fullmatch("[0-9]{2,5}", structured.outputs[0].text)


def test_saved_kv_belongs_to_all_parts_of_a_model(tmp_path: Path) -> None:
    made, _ = write_gguf(
        make_checkpoint("llama", tmp_path / "model"), "llama", "F32", has_tokenizer=True, max_tensors=9
    )
    *_, last = parts = sorted(made.parent.glob("model-*-of-*.gguf"))
    assert len(parts) > 1
    options = {"num_threads": 1, "num_kv_blocks": 64, "kv_tier": "memory"}
    saved = tmp_path / "prompt.kv"
    with LLM(str(parts[0]), **options) as llm:
        assert llm.save_kv(list(range(20)), saved) == 16
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    with LLM(str(parts[0]), **options) as llm, pytest.raises(KVFileError, match=r"different: model \("):
        llm.restore_kv(saved)
