"""What the matrices of a GGUF file become in memory. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping

from quire.models.checkpoints.gguf.names import gguf_name
from quire.models.checkpoints.quantized.description import StoredQuantization
from quire.models.checkpoints.quantized.stored_kinds import FLOATS, joined, matrix_specs, with_kinds
from quire.models.config import ModelConfig

_BY_KIND = {  # ggml's numbers: Q4_0, Q4_1, Q4_K; Q5_0, Q5_1, Q8_0, Q5_K, IQ4_NL; Q6_K
    **dict.fromkeys((2, 3, 12), StoredQuantization("int4", 32)),
    **dict.fromkeys((6, 7, 8, 13, 20), StoredQuantization("grouped_int8", 32)),
    14: StoredQuantization("grouped_int8", 16),
}


def with_stored_quantization(config: ModelConfig, kinds: Mapping[str, int]) -> ModelConfig:
    """Return `config` with what its matrices become.

    Args:
        config: the model's.
        kinds: ggml's number for the kind of each tensor, by its name in the file.
    """
    return with_kinds(
        config,
        {
            (spec.layer, spec.field): joined(
                [_BY_KIND.get(kinds.get(gguf_name(source.name), -1), FLOATS) for source in spec.sources]
            )
            for spec in matrix_specs(config)
        },
    )
