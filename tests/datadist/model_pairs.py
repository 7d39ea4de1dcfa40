"""Models on both sides of a pair."""

from __future__ import annotations

import numpy as np
import sides
from sides import Runner, byte_desc, read_cache

from quire.datadist import (
    DataType,
    LLMModel,
    LLMReq,
    ModelConfig,
)

DESC = byte_desc(2, 32)  # of the models here, unless they say otherwise


CACHE_BYTES = DESC.num_tensors * DESC.tensor_bytes


def model_options(shape: str = "2,32", num_tensors: int = 4, **fields) -> dict[str, str]:
    config = ModelConfig()
    config.kv_shapes, config.kv_dtypes = [shape] * num_tensors, [DataType.DT_UINT8] * num_tensors
    for name, value in fields.items():
        setattr(config, name, value)
    return config.generate_options()


def add_runner_model(owner, options: dict[str, str], gate: int | None = None) -> tuple[LLMModel, Runner]:
    runner = Runner(owner, gate=gate)
    return owner.add_model(options, runner), runner


def request(req_id: int, **fields) -> LLMReq:
    return LLMReq(req_id=req_id, prompt_cluster_id=1, **fields)


class Models:
    """A model on each side of a pair; their caches can be read."""

    def __init__(self, pair, gate: int | None = None, **fields) -> None:
        self.pair = pair
        self.prefill = pair.call(sides.add_model, pair.prompt, model_options(**fields), gate=gate)
        self.runner = Runner(pair.decoder)
        self.decode = pair.decoder.add_model(model_options(**fields), self.runner)

    def cache_of_decoder(self) -> np.ndarray:
        return read_cache(self.pair.dm, self.runner.allocated[0])

    def assert_slot(self, slot: int, expected: np.ndarray) -> None:
        np.testing.assert_array_equal(self.cache_of_decoder()[:, slot], expected)


def staged_and_merged(models: Models, req_id: int, slot: int, *, seed: int) -> LLMReq:
    req = request(req_id)
    models.prefill.predict(req, seed)
    models.decode.pull_kv(req)
    models.decode.merge_kv(req, slot)
    return req


PREFIX = LLMReq(prefix_id=9)
