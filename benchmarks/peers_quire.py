"""Quire's side of the comparison with peers; `peers.py` starts it, `peers_worker.py` has the protocol."""

from __future__ import annotations

from typing import Any

from peers_shapes import ModelShape
from peers_worker import serve
from peers_workload import KV_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, NUM_THREADS

from quire import LLM, SamplingParams

BLOCK_SIZE = 16
NUM_STATES = MAX_NUM_SEQS + 16  # of recurrent layers: as KV, about what the largest workload uses


class QuireEngine:
    """See `Engine`."""

    def __init__(self, model: str, precision: str, shape: ModelShape) -> None:
        # OpenVINO also keeps its KV in 8 bits if weights are quantized.
        quantization: dict[str, Any] = {}
        if precision != "bf16":
            quantization = {"quantization": precision, "kv_cache_dtype": "int8"}
        self._llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            block_size=BLOCK_SIZE,
            num_kv_blocks=KV_TOKENS // BLOCK_SIZE,
            num_linear_attention_blocks=NUM_STATES,
            num_threads=NUM_THREADS,
            **quantization,
        )
        self._llm.wait_until_ready()

    def prepare(self, num_requests: int, prefix: list[int]) -> None:
        """See `Engine.prepare`."""
        if prefix:
            self.generate([prefix], 1)

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        """See `Engine.generate`."""
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        return [list(result.outputs[0].token_ids) for result in self._llm.generate(prompts, sampling)]


if __name__ == "__main__":
    serve(QuireEngine, ("quire", "torch"))
