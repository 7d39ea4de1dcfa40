"""The minimum time of a workload on a machine: a roofline model, step by step.

The steps are those of continuous batching with up to 512 tokens: each decoding request has one token, and
prompts fill the rest in the order of arrival. A step takes at least as long as reading and writing its bytes
at the measured bandwidth, and as its matrix products at the measured rate. Its bytes are the weights once
(including the output head, if any request samples), the keys and values that it reads (a shared prefix once)
and those that it writes. Of a layer's experts, it reads those that its tokens can be expected to choose if
all are equally likely, and multiplies each token by those that it has chosen. Anything else that an engine
does is not part of the limit: attention in layers with windows, states of recurrent layers, embeddings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from peers_workload import Workload

STEP_TOKENS = 512
WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5}
# With quantized weights, an engine may keep keys and values in bytes, and one does.
VALUE_BYTES = {"bf16": 2, "int8": 1, "int4": 1}
PRODUCTS = {"bf16": "bf16", "int8": "int8", "int4": "int8"}


@dataclass(frozen=True)
class Machine:
    """Measured rates of a machine: bytes per second, and operations per second by precision."""

    bandwidth: float
    gemm_rate: dict[str, float]

    def best_of(self, other: Machine) -> Machine:
        """Return the better of two measurements for each rate."""
        names = self.gemm_rate | other.gemm_rate
        rates = {name: max(self.gemm_rate.get(name, 0), other.gemm_rate.get(name, 0)) for name in names}
        return Machine(max(self.bandwidth, other.bandwidth), rates)


@dataclass(frozen=True)
class ModelWork:
    """What a model computes with, in elements.

    Args:
        layer_weights: all layers' matrices, but for experts.
        head_weights: the output head.
        kv_values: one token's keys and values in layers without a window.
        query_values: one token's queries in these.
        expert_weights: one expert's matrices in all layers together.
        num_experts: in a layer.
        experts_per_token: that a token chooses in a layer.
    """

    layer_weights: int
    head_weights: int
    kv_values: int
    query_values: int
    expert_weights: int = 0
    num_experts: int = 1
    experts_per_token: int = 0

    def weights_read(self, num_tokens: int) -> float:
        """Elements of the layers' matrices that a step with this number of tokens can be expected to read."""
        unchosen: float = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.layer_weights + self.expert_weights * self.num_experts * (1 - unchosen)

    @property
    def token_weights(self) -> int:
        """Elements of the layers' matrices that a token is multiplied by."""
        return self.layer_weights + self.expert_weights * self.experts_per_token


@dataclass
class Step:
    """The work of one step in tokens; `attended` counts pairs of a token and one that it attends to."""

    computed: int = 0
    sampled: int = 0
    attended: int = 0
    cached_read: int = 0

    def add(self, num_tokens: int, cached: int, *, shared: int, samples: bool) -> None:
        """Add tokens of a request with `cached` tokens before them, the first `shared` of which all share."""
        self.computed += num_tokens
        self.sampled += samples
        self.attended += num_tokens * cached + num_tokens * (num_tokens + 1) // 2
        self.cached_read += cached - shared


def steps_of(workload: Workload) -> Iterator[Step]:
    """Yield the steps of a workload."""
    shared, whole = workload.shared_tokens, workload.shared_tokens + workload.prompt_tokens
    prompts = deque([shared] * workload.num_requests)  # by request: tokens in the cache
    generating: list[int] = []
    last = whole + workload.output_tokens - 1  # the last output token is never computed
    while prompts or generating:
        step = Step(cached_read=shared)
        for cached in generating:
            step.add(1, cached, shared=shared, samples=True)
        generating = [cached + 1 for cached in generating]
        while prompts and step.computed < STEP_TOKENS:
            cached = prompts.popleft()
            num_tokens = min(STEP_TOKENS - step.computed, whole - cached)
            is_whole = cached + num_tokens == whole
            step.add(num_tokens, cached, shared=shared, samples=is_whole)
            if is_whole:
                generating.append(whole)
            else:
                prompts.appendleft(cached + num_tokens)
        generating = [cached for cached in generating if cached < last]
        yield step


def step_seconds(step: Step, work: ModelWork, precision: str, machine: Machine) -> float:
    """Return the minimum seconds of one step. Attention is computed in bf16 in all precisions."""
    weights = work.weights_read(step.computed) + (work.head_weights if step.sampled else 0)
    kv_values = work.kv_values * (step.cached_read + step.computed)
    num_bytes = WEIGHT_BYTES[precision] * weights + VALUE_BYTES[precision] * kv_values
    products = 2 * (work.token_weights * step.computed + work.head_weights * step.sampled)
    attention = 4 * work.query_values * step.attended
    computing = products / machine.gemm_rate[PRODUCTS[precision]] + attention / machine.gemm_rate["bf16"]
    return max(num_bytes / machine.bandwidth, computing)


def least_seconds(workload: Workload, work: ModelWork, precision: str, machine: Machine) -> float:
    """Return the minimum seconds of the whole workload, from its arrival to its last token."""
    return sum(step_seconds(step, work, precision, machine) for step in steps_of(workload))
