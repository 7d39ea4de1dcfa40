"""The extension module. Addresses are of memory that outlives the call.

Written by tools/native_stub.py from native/src/bindings; edit those, build them, then run it.
"""

import enum
from collections.abc import Sequence

def set_threads(num_threads: int) -> None: ...
def num_threads() -> int: ...
def set_instruction_set(name: str) -> bool: ...
def instruction_set() -> str: ...

class Program:
    def __init__(self) -> None: ...
    def record(self) -> None:
        """
        Record the calls of this thread from now on, instead of computing them.
        """

    @property
    def is_empty(self) -> bool: ...
    def run(self) -> None: ...

def stop_recording() -> None: ...
def is_recording() -> bool: ...

class DType(enum.Enum):
    float32 = 0

    bfloat16 = 1

    float16 = 2

    int8 = 3

    int4 = 5

    uint8 = 4

class GgmlBlock(enum.Enum):
    Q4_0 = 2

    Q4_1 = 3

    Q5_0 = 6

    Q5_1 = 7

    Q8_0 = 8

    Q2_K = 10

    Q3_K = 11

    Q4_K = 12

    Q5_K = 13

    Q6_K = 14

    IQ4_NL = 20

    IQ4_XS = 23

    MXFP4 = 39

class WeightFormat(enum.Enum):
    float32 = 0

    bfloat16 = 1

    float16 = 2

    int8 = 3

    int4 = 4

    grouped_int8 = 5

    mxfp4 = 6

    int6 = 7

class PackedWeight:
    def __init__(
        self,
        format: int,
        out_features: int,
        in_features: int,
        group_size: int,
        panels: int,
        has_int8_rows: bool = False,
    ) -> None: ...
    def pack(
        self, sources: Sequence[tuple[int, int, int, int, int, int]], gated_features: int = 0, norms: int = 0
    ) -> bool: ...
    def linear(
        self,
        rows: int,
        row_type: int,
        row_stride: int,
        num_rows: int,
        bias: int,
        out: int,
        out_type: int,
        out_stride: int,
    ) -> None: ...

class ShortlistedWeight:
    def __init__(self, exact: PackedWeight, screen: PackedWeight, norms: int) -> None: ...
    def largest(
        self,
        rows: int,
        row_type: int,
        row_stride: int,
        num_rows: int,
        num_largest: int,
        out: int,
        out_stride: int,
    ) -> None: ...

MAX_EXPERTS: int = 1024

class Scoring(enum.Enum):
    softmax = 0

    sigmoid = 1

    sparsemixer = 2

class Routing:
    def __init__(
        self,
        scoring: int,
        num_experts: int,
        num_chosen: int,
        normalize: bool,
        jitter: float,
        correction: int,
        num_groups: int,
        num_chosen_groups: int,
        scale: float,
        expert_scales: int,
    ) -> None: ...

class PackedExperts:
    def __init__(
        self,
        gate_ups: Sequence[PackedWeight],
        downs: Sequence[PackedWeight],
        gate_up_bias: int,
        down_bias: int,
        activation: int,
        routing: Routing,
    ) -> None: ...
    def compute(
        self,
        rows: int,
        row_type: int,
        row_stride: int,
        num_rows: int,
        scores: int,
        score_type: int,
        score_stride: int,
        out: int,
        out_type: int,
        out_stride: int,
    ) -> None: ...

def packed_bytes(format: int, out_features: int, in_features: int, group_size: int) -> int: ...

TILE: int = 64

SPAN: int = 1024

HEAD_DIM_MULTIPLE: int = 16

MAX_HEAD_DIM: int = 576

MAX_SPAN_BYTES: int = 67108864

MAX_STRIDE: int = 64

SCORE_UNIT: float = 2.3283064365386963e-10

class KVLayer:
    def __init__(
        self,
        type: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        keys: int,
        key_strides: Sequence[int],
        values: int,
        value_strides: Sequence[int],
        key_scales: int,
        key_scale_strides: Sequence[int],
        value_scales: int,
        value_scale_strides: Sequence[int],
    ) -> None: ...

class KeyScores:
    def __init__(
        self, row_starts: int, sum_starts: int, rows: int, sums: int, num_row_numbers: int, num_sums: int
    ) -> None: ...

class AttentionPlan:
    def __init__(
        self,
        num_cached_tokens: int,
        num_tokens: int,
        num_sequences: int,
        block_tables: int,
        table_stride: int,
        block_size: int,
        window: int,
        group: int,
        skipped_start: int = 0,
        skipped_end: int = 0,
        selecting_end: int = 0,
        key_block_size: int = 0,
        stride: int = 0,
        threshold: float = 0.0,
        is_two_sided: bool = False,
    ) -> None: ...
    def attend(
        self,
        kv: KVLayer,
        query: int,
        query_type: int,
        query_stride: int,
        out: int,
        scale: float,
        softcap: float,
        sinks: int,
        key_scores: KeyScores | None,
        distance_bias: int = 0,
        max_distance: int = 0,
    ) -> None: ...
    def scratch_bytes(self, kv: KVLayer, num_threads: int) -> int:
        """
        Return the bytes of scratch memory that a call takes which computes no key scores.
        """

class Activation(enum.Enum):
    silu = 0

    gelu_tanh = 1

    gelu = 2

    relu2 = 3

    clamped_swiglu = 4

def norm(
    rows: int,
    delta: int,
    weight: int,
    out: int,
    type: int,
    num_rows: int,
    num_features: int,
    row_stride: int,
    delta_stride: int,
    out_stride: int,
    scale: float,
    eps: float,
    bias: int,
) -> None: ...
def gated_activation(
    gate_up: int,
    out: int,
    type: int,
    activation: int,
    num_rows: int,
    num_features: int,
    row_stride: int,
    out_stride: int,
    has_up: bool,
) -> None: ...
def gate(
    rows: int,
    gate: int,
    type: int,
    has_silu: bool,
    num_tokens: int,
    num_heads: int,
    num_features: int,
    token_stride: int,
    head_stride: int,
    feature_stride: int,
    norm_weight: int,
    eps: float,
) -> None: ...
def soft_cap(numbers: int, count: int, cap: float) -> None: ...
def sum_rows(
    rows: int,
    type: int,
    num_rows: int,
    row_stride: int,
    num_features: int,
    pieces: int,
    num_pieces: int,
    shares: int,
    sums: int,
    num_sums: int,
    unit: float,
) -> None: ...
def gather_rows(rows: int, num_rows: int, row_bytes: int, places: int, num_places: int, out: int) -> None: ...
def rotary_and_write_kv(
    kv: KVLayer,
    qkv: int,
    type: int,
    num_rows: int,
    row_stride: int,
    num_heads: int,
    cos: int,
    sin: int,
    half: int,
    q_norm: int,
    k_norm: int,
    q_norm_size: int,
    k_norm_size: int,
    eps: float,
    blocks: int,
    offsets: int,
) -> None: ...
def rotary(
    states: int,
    type: int,
    num_rows: int,
    row_stride: int,
    num_heads: int,
    head_dim: int,
    cos: int,
    sin: int,
    half: int,
    norm: int,
    norm_size: int,
    eps: float,
) -> None: ...

MAX_TAPS: int = 64

MAX_KEY_DIM: int = 256

class SequenceRows:
    def __init__(self, num_seqs: int, states: int, ends: int, state_ends: int, num_before: int) -> None: ...

def conv(
    rows: int,
    out: int,
    type: int,
    row_stride: int,
    num_features: int,
    num_taps: int,
    weight: int,
    bias: int,
    has_silu: bool,
    state: int,
    state_stride: int,
    sequences: SequenceRows,
) -> None: ...
def delta_rule(
    qkv: int,
    strengths: int,
    strength_stride: int,
    times: int,
    time_stride: int,
    out: int,
    type: int,
    num_key_heads: int,
    num_value_heads: int,
    key_dim: int,
    value_dim: int,
    times_per_head: int,
    decay: int,
    time_bias: int,
    max_strength: float,
    state: int,
    state_stride: int,
    sequences: SequenceRows,
) -> None: ...
def scan(
    inputs: int,
    times: int,
    time_stride: int,
    out: int,
    out_stride: int,
    type: int,
    num_heads: int,
    head_dim: int,
    num_groups: int,
    state_size: int,
    decay: int,
    time_bias: int,
    skip: int,
    least_time: float,
    most_time: float,
    state: int,
    state_stride: int,
    sequences: SequenceRows,
) -> None: ...

MIN_HEAD_TOKENS: int = 128

MAX_HEAD_TOKENS: int = 1024

def largest(
    logits: int, row_stride: int, rows: int, num_rows: int, vocab_size: int, token_ids: int, maxima: int
) -> None: ...
def likeliest(
    logits: int,
    row_stride: int,
    rows: int,
    num_rows: int,
    vocab_size: int,
    head_logits: int,
    token_ids: int,
    counts: int,
    is_complete: int,
) -> None: ...
def sum_exp(
    logits: int,
    row_stride: int,
    rows: int,
    num_rows: int,
    vocab_size: int,
    maxima: int,
    temperatures: int,
    sums: int,
) -> None: ...
def ranks(
    logits: int, row_stride: int, rows: int, num_rows: int, vocab_size: int, token_ids: int, ranks: int
) -> None: ...
