"""What the matrices of a GGUF file become in memory. Nothing here needs torch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from quire.models.checkpoints.gguf.names import gguf_name
from quire.models.checkpoints.quantized.description import StoredQuantization
from quire.models.config import ModelConfig
from quire.models.weights import QUANTIZED_FIELDS, WeightSpec, weight_specs

_FLOATS = StoredQuantization()
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
    found = {
        (spec.layer, spec.field): _of_parts(spec, kinds)
        for spec in weight_specs(config)
        if spec.field in (*QUANTIZED_FIELDS, "embedding", "output")
    }
    in_layers = collections.Counter(stored for (layer, _), stored in found.items() if layer >= 0)
    main = in_layers.most_common(1)[0][0] if in_layers else _FLOATS
    return dataclasses.replace(
        config,
        stored_quantization=main.kind,
        stored_group_size=main.group_size,
        stored_otherwise=tuple(
            (layer, field, stored.kind, stored.group_size)
            for (layer, field), stored in found.items()
            if stored != (main if layer >= 0 else _FLOATS)
        ),
    )


def _of_parts(spec: WeightSpec, kinds: Mapping[str, int]) -> StoredQuantization:
    """Return what a matrix becomes that is joined from parts of perhaps several kinds."""
    parts = [_BY_KIND.get(kinds.get(gguf_name(source.name), -1), _FLOATS) for source in spec.sources]
    if len(set(parts)) == 1:
        return parts[0]
    if _FLOATS in parts:
        return _FLOATS
    bits = {part.kind for part in parts}
    kind = "int4" if bits == {"int4"} else "grouped_int8"
    return StoredQuantization(kind, min(part.group_size for part in parts))
