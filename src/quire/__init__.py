"""Quire serves large language models: paged KV cache, continuous batching, one command.

The public names are imported when first used, so that `import quire` costs milliseconds.
"""

from __future__ import annotations

from quire.lazy_attributes import lazy_attributes

TYPE_CHECKING = False  # as in `quire.lazy_attributes`

if TYPE_CHECKING:
    from quire.config import (
        AdaptiveRKVConfig,
        AggregationMode,
        CacheEvictionConfig,
        EngineConfig,
        KVCrushAnchorPointMode,
        KVCrushConfig,
        SchedulerConfig,
        ScorePooling,
        ServerConfig,
        SparseAttentionConfig,
        SparseAttentionMode,
    )
    from quire.front.async_llm import AsyncLLM
    from quire.front.llm import LLM
    from quire.front.openvino.generation_config import GenerationConfig, StructuredOutputConfig
    from quire.front.openvino.pipeline import ContinuousBatchingPipeline
    from quire.request_options import RequestOptions
    from quire.request_output import CompletionOutput, RequestOutput
    from quire.sampling_params import SamplingParams
    from quire.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AdaptiveRKVConfig",
    "AggregationMode",
    "AsyncLLM",
    "CacheEvictionConfig",
    "CompletionOutput",
    "ContinuousBatchingPipeline",
    "EngineConfig",
    "GenerationConfig",
    "KVCrushAnchorPointMode",
    "KVCrushConfig",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "ScorePooling",
    "ServerConfig",
    "SparseAttentionConfig",
    "SparseAttentionMode",
    "StructuredOutputConfig",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "quire.front.llm",
    "AdaptiveRKVConfig": "quire.config",
    "AggregationMode": "quire.config",
    "CacheEvictionConfig": "quire.config",
    "KVCrushAnchorPointMode": "quire.config",
    "KVCrushConfig": "quire.config",
    "AsyncLLM": "quire.front.async_llm",
    "CompletionOutput": "quire.request_output",
    "ContinuousBatchingPipeline": "quire.front.openvino.pipeline",
    "EngineConfig": "quire.config",
    "GenerationConfig": "quire.front.openvino.generation_config",
    "RequestOutput": "quire.request_output",
    "RequestOptions": "quire.request_options",
    "SamplingParams": "quire.sampling_params",
    "SchedulerConfig": "quire.config",
    "ScorePooling": "quire.config",
    "ServerConfig": "quire.config",
    "SparseAttentionConfig": "quire.config",
    "SparseAttentionMode": "quire.config",
    "StructuredOutputConfig": "quire.front.openvino.generation_config",
    "StructuredOutputsParams": "quire.structured_outputs",
}

__getattr__, __dir__ = lazy_attributes(globals(), _HOMES)
