"""The extension module: see native/src/bindings. Addresses are of memory that outlives the call."""

def set_threads(num_threads: int) -> None: ...
def num_threads() -> int: ...
def set_instruction_set(name: str) -> bool: ...
def instruction_set() -> str: ...
def packed_bytes(format: int, out_features: int, in_features: int, group_size: int) -> int: ...

class PackedWeight:
    def __init__(
        self, format: int, out_features: int, in_features: int, group_size: int, panels: int
    ) -> None: ...
    def pack(self, sources: list[tuple[int, int, int, int, int]]) -> None: ...
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

class KVLayer:
    def __init__(
        self,
        type: int,
        num_kv_heads: int,
        head_dim: int,
        keys: int,
        key_strides: tuple[int, int, int],
        values: int,
        value_strides: tuple[int, int, int],
        key_scales: int,
        key_scale_strides: tuple[int, int, int],
        value_scales: int,
        value_scale_strides: tuple[int, int, int],
    ) -> None: ...

class AttentionPlan:
    def __init__(
        self,
        num_computed_tokens: int,
        num_tokens: int,
        num_sequences: int,
        block_tables: int,
        table_stride: int,
        block_size: int,
        window: int,
        group: int,
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
        key_scores: int,
    ) -> None: ...

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
) -> None: ...
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

MOST_HEAD_TOKENS: int

def largest(
    logits: int,
    row_stride: int,
    rows: int,
    num_rows: int,
    vocab_size: int,
    token_ids: int,
    maxima: int,
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
    logits: int,
    row_stride: int,
    rows: int,
    num_rows: int,
    vocab_size: int,
    token_ids: int,
    ranks: int,
) -> None: ...
