"""Quire serves large language models: paged KV cache, continuous batching, one command.

The public names are imported when first used, so that `import quire` costs milliseconds.
"""

from __future__ import annotations

from quire.lazy_attributes import lazy_attributes

__version__ = "0.1.0"

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
    from quire.front.openvino.chat_history import ChatHistory
    from quire.front.openvino.generation_config import GenerationConfig, StopCriteria, StructuredOutputConfig
    from quire.front.openvino.generation_handle import GenerationHandle
    from quire.front.openvino.pipeline import ContinuousBatchingPipeline
    from quire.front.openvino.results import (
        EncodedGenerationResult,
        GenerationFinishReason,
        GenerationOutput,
        GenerationResult,
        GenerationStatus,
        PerfMetrics,
        PipelineMetrics,
    )
    from quire.front.openvino.streaming import StreamerBase, StreamingStatus, TextStreamer
    from quire.pooling_params import PoolingParams
    from quire.request_options import RequestOptions
    from quire.request_output import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
    from quire.sampling_params import SamplingParams
    from quire.structured_outputs import StructuredOutputsParams


__all__ = [
    "LLM",
    "AdaptiveRKVConfig",
    "AggregationMode",
    "AsyncLLM",
    "CacheEvictionConfig",
    "ChatHistory",
    "CompletionOutput",
    "ContinuousBatchingPipeline",
    "EncodedGenerationResult",
    "EngineConfig",
    "GenerationConfig",
    "GenerationFinishReason",
    "GenerationHandle",
    "GenerationOutput",
    "GenerationResult",
    "GenerationStatus",
    "KVCrushAnchorPointMode",
    "KVCrushConfig",
    "PerfMetrics",
    "PipelineMetrics",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "ScorePooling",
    "ServerConfig",
    "SparseAttentionConfig",
    "SparseAttentionMode",
    "StopCriteria",
    "StreamerBase",
    "StreamingStatus",
    "StructuredOutputConfig",
    "StructuredOutputsParams",
    "TextStreamer",
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
    "PoolingOutput": "quire.request_output",
    "PoolingParams": "quire.pooling_params",
    "PoolingRequestOutput": "quire.request_output",
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
    "ChatHistory": "quire.front.openvino.chat_history",
    "EncodedGenerationResult": "quire.front.openvino.results",
    "GenerationFinishReason": "quire.front.openvino.results",
    "GenerationHandle": "quire.front.openvino.generation_handle",
    "GenerationOutput": "quire.front.openvino.results",
    "GenerationResult": "quire.front.openvino.results",
    "GenerationStatus": "quire.front.openvino.results",
    "PerfMetrics": "quire.front.openvino.results",
    "PipelineMetrics": "quire.front.openvino.results",
    "StopCriteria": "quire.front.openvino.generation_config",
    "StreamerBase": "quire.front.openvino.streaming",
    "StreamingStatus": "quire.front.openvino.streaming",
    "TextStreamer": "quire.front.openvino.streaming",
}

__getattr__, __dir__ = lazy_attributes(globals(), _HOMES)
