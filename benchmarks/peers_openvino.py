"""OpenVINO GenAI's side of the comparison with peers; `peers.py` starts it, `peers_worker.py` has the
protocol."""

from __future__ import annotations

import numpy as np
import openvino
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig
from peers_shapes import ModelShape
from peers_worker import serve
from peers_workload import KV_TOKENS, MAX_NUM_SEQS, NUM_THREADS

BLOCK_SIZE = 32  # block size of the CPU plugin
MAX_NUM_BATCHED_TOKENS = 512


class OpenvinoEngine:
    """See `Engine`."""

    def __init__(self, model: str, precision: str, shape: ModelShape) -> None:
        scheduler = SchedulerConfig()
        scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        scheduler.num_kv_blocks = KV_TOKENS // BLOCK_SIZE
        scheduler.max_num_seqs = MAX_NUM_SEQS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": NUM_THREADS, "INFERENCE_PRECISION_HINT": "bf16"}
        if precision == "bf16":
            properties["KV_CACHE_PRECISION"] = "bf16"  # the default is u8
        self._pipeline = ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def prepare(self, num_requests: int, prefix: list[int]) -> None:
        """See `Engine.prepare`."""
        if prefix:
            self.generate([prefix], 1)

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        """See `Engine.generate`."""
        config = GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]


if __name__ == "__main__":
    serve(OpenvinoEngine, ("openvino-genai", "openvino"))
