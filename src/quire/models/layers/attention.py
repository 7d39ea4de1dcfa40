"""Attention over the paged KV cache, with heads, window, rotation and cache of the layer's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from quire.config import SchedulerConfig, SparseAttentionMode
from quire.errors import ConfigError, ModelError
from quire.kernels import bounds
from quire.kv.cache.page_layout import KVLayerSpec
from quire.models.config import ModelConfig, RopeConfig
from quire.models.layer import LayerLoader, LayerWeight, Section, Step, StepSizes, SubLayer, SubLayerConfig
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

    from quire.kernels.attention.batch import AttentionBatch
    from quire.kernels.attention.kv_layer import KVLayer

_FLOAT32_BYTES = 4
_INT32_BYTES = 4
_FLOAT64_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(SubLayerConfig):
    """The numbers of one layer's attention."""

    num_heads: int = 0  # query heads
    num_kv_heads: int = 0
    input_size: int = 0  # features that it reads; 0: those of the residual stream
    head_dim: int = 0  # features of a head of queries and keys
    value_dim: int = 0  # features of a head of values; 0: as of keys
    rope: RopeConfig | None = None  # None: no rotation
    is_interleaved: bool = False
    """In checkpoints, features 2i and 2i + 1 of a head are rotated together; they become i and i + half."""
    window: int = 0  # tokens that a token sees, itself included; 0: all
    is_chunked: bool = False
    """Sequences are cut into chunks of `window` tokens, and a token sees those of its own chunk only."""
    scale: float = 1.0  # multiplies scores
    softcap: float = 0.0  # soft cap of scores; 0: none
    qk_norm: str = ""
    """Norm of queries and keys: none (empty), per head ("head"), over all ("full"), per head and after the
    rotation ("rotated_head"), or per head without weights ("unweighted").
    """
    value_norm: str = ""
    """Norm of values per head, without weights, beside one of keys: none (empty), "value", or "key": of keys
    as they are before their own norm, which then are projected for both.
    """
    is_fused_by_group: bool = False
    """In checkpoints, one matrix has for each KV head its queries, its key and its value."""
    qkv_bias: bool = False
    output_bias: bool = False
    is_gated: bool = False  # each head's result is multiplied by the sigmoid of what its query comes with
    has_sinks: bool = False  # a trained score of each head takes part in the softmax and has no value
    kv_source: int | None = None  # the earlier layer whose keys and values it reads; None: it has its own

    role: ClassVar[str] = "attention"
    weight_names: ClassVar[Mapping[str, str]] = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "sinks": "self_attn.sinks",
    }

    @property
    def value_size(self) -> int:
        """Features of a head of values."""
        return self.value_dim or self.head_dim

    @property
    def output_size(self) -> int:
        """Features that the output projection reads."""
        return self.num_heads * self.value_size

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    @override
    def kv(self) -> KVLayerSpec | None:
        if self.kv_source is not None:
            return None
        return KVLayerSpec(self.num_kv_heads, self.head_dim, self.value_size, self.window)

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        kv_heads = shard.kv_heads(self.num_heads, self.num_kv_heads)
        pairs = self.rope.rotary_dim // 2 if self.is_interleaved and self.rope is not None else 0
        query = self._query_section(shard.query_heads(self.num_heads), pairs)
        key = head_section(self.num_kv_heads, self.head_dim, kv_heads, pairs)
        value = head_section(self.num_kv_heads, self.value_size, kv_heads)
        sections = {"q": query}
        if self.kv_source is None:
            sections |= {"k": key} if self.value_norm == "key" else {"k": key, "v": value}
        if self.qk_norm and self.qk_norm != "unweighted":
            for name, section in list(sections.items())[:2]:
                is_full = self.qk_norm == "full"
                size = section[0] if is_full else self.head_dim
                divided = (section,) if is_full else (head_section(1, size, [0], pairs),) if pairs else ()
                yield LayerWeight(f"{name}_norm", ((f"{name}_norm.weight", (size,)),), sections=divided)
        sizes = {name: size for name, (size, _) in sections.items()}
        if "qkv" in names:
            sizes = {"qkv": sum(sizes.values())}
        rows = tuple(sections.values())
        if self.is_fused_by_group:
            rows = (self._rows_by_group(rows),)
        inputs = self.input_size or hidden_size
        matrices = tuple((f"{name}.weight", (size, inputs)) for name, size in sizes.items())
        yield LayerWeight("qkv", matrices, sections=rows, is_quantized=True)
        if self.qkv_bias:
            biases = tuple((f"{name}.bias", (size,)) for name, size in sizes.items())
            yield LayerWeight("qkv_bias", biases, sections=rows)
        if self.has_sinks:
            heads = head_section(self.num_heads, 1, shard.query_heads(self.num_heads))
            yield LayerWeight("sinks", (("sinks", (self.num_heads,)),), sections=(heads,))
        attended = head_section(self.num_heads, self.value_size, shard.query_heads(self.num_heads))
        output = (("o.weight", (hidden_size, attended[0])),)
        yield LayerWeight("attention_output", output, axis=1, sections=(attended,), is_quantized=True)
        if self.output_bias:
            bias = (("o.bias", (hidden_size,)),)
            yield LayerWeight("attention_output_bias", bias, is_of_first_rank=True)

    def _rows_by_group(self, sections: Sequence[Section]) -> Section:
        """Return where rows of queries, keys and values lie among those of all groups."""
        size = self.head_dim
        ranges = []
        for (_, held), per_group, before in zip(
            sections, (self.group, 1, 1), (0, self.group, self.group + 1), strict=True
        ):
            for each in held:
                head = each.start // size
                group, number = divmod(head, per_group)
                offset = (group * (self.group + 2) + before + number - head) * size
                ranges.append(range(each.start + offset, each.stop + offset, each.step))
        return sum(length for length, _ in sections), tuple(ranges)

    @override
    def on_rank(self, shard: Shard) -> Self:
        return dataclasses.replace(
            self,
            num_heads=len(shard.query_heads(self.num_heads)),
            num_kv_heads=len(shard.kv_heads(self.num_heads, self.num_kv_heads)),
        )

    @override
    def check_divisible(self, size: int) -> None:
        if size > 1 and self.kv_source is not None and self.qk_norm == "full":
            raise ConfigError(
                f"EngineConfig.tensor_parallel_size is {size}; a layer that reads another one's KV and "
                "normalizes all of its queries together cannot be divided: set it to 1"
            )
        check_heads_divisible(self.num_heads, size, "query heads")

    def _query_section(self, held: Sequence[int], pairs: int) -> Section:
        """Return the rows of the queries of some heads, behind those of their gates if there are any.

        In checkpoints, each head's gate follows its query.
        """
        if not self.is_gated:
            return head_section(self.num_heads, self.head_dim, held, pairs)
        gates = head_section(2 * self.num_heads, self.head_dim, [2 * head + 1 for head in held])
        length, queries = head_section(2 * self.num_heads, self.head_dim, [2 * head for head in held], pairs)
        return length, (*gates[1], *queries)

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        qkv = self.num_heads * self.head_dim
        if self.kv_source is None:
            qkv += self.num_kv_heads * (self.head_dim + self.value_size)
        if self.is_gated:
            qkv += self.num_heads * self.head_dim
        return {"qkv": (qkv,), "attended": (self.num_heads, self.value_size)}

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        attended = self.num_heads * self.value_size
        if step.on_gpu:  # those of captured steps have memory of their own
            scratch = 2 * bounds.GPU_TILE_HEIGHTS * bounds.GPU_PART_BYTES
            scratch += gpu_key_selection_bytes(step.scheduler, self, step.max_model_len)
        else:
            scratch = _scratch_bytes(self, step)
            scratch += key_selection_bytes(step.scheduler, self, step.max_model_len, step.num_threads)
        if not step.on_gpu and not step.is_native:
            scratch += step.tokens * (self.buffers()["qkv"][0] + attended) * _FLOAT32_BYTES
        if self.is_gated:
            scratch = max(scratch, 3 * step.tokens * self.output_size * _FLOAT32_BYTES)
        return max(scratch, step.product_bytes(self.output_size, self.input_size))

    @override
    def load(self, loader: LayerLoader) -> SubLayer:
        return Attention(self, loader)


def attention_of(model: ModelConfig) -> list[AttentionConfig]:
    """Return the attention of each layer that has it."""
    return [part for part in model.parts if isinstance(part, AttentionConfig)]


def head_section(total: int, size: int, held: Sequence[int], pairs: int = 0) -> Section:
    """Return the rows of `total` heads of `size` features, and those of the heads that are held.

    The first numbers of a head's first `pairs` pairs come first, and then the second ones.
    """
    ranges = []
    for start in (head * size for head in held):
        end = start + 2 * pairs
        ranges += [range(start, end, 2), range(start + 1, end, 2), range(end, start + size)]
    return total * size, tuple(each for each in ranges if each)


def whole_section(size: int) -> Section:
    """Return a section of which every rank has all."""
    return size, (range(size),)


def check_heads_divisible(num_heads: int, size: int, kind: str) -> None:
    """Raise `ConfigError` with possible sizes if heads of a kind cannot be divided among `size` ranks."""
    if num_heads % size:
        possible = [str(n) for n in range(1, num_heads + 1) if not num_heads % n]
        raise ConfigError(
            f"EngineConfig.tensor_parallel_size is {size}, which does not divide the {num_heads} {kind} of "
            f"this model; set it to {', '.join(possible)}"
        )


class Attention(SubLayer):
    """Attention with its weights.

    Args:
        whole: of all ranks.
        loader: of the layer.

    Raises:
        ModelError: the kernels cannot compute it, or it reads the KV of a layer that has none like it.
    """

    def __init__(self, whole: AttentionConfig, loader: LayerLoader) -> None:
        from quire.kernels.attention.tiles import HeadLayout
        from quire.models.parallel import FullWidthNormLinear

        _check(whole, loader)
        config = whole.on_rank(loader.shard)
        super().__init__(config, loader)
        self.qkv = loader.linear("qkv")
        self.output = loader.linear("attention_output", is_summed=True)
        self._config = config
        self._kernels = loader.kernels
        self._eps = loader.model.norm_eps
        self._kv_layer = loader.index if whole.kv_source is None else whole.kv_source
        self._rope = None if whole.rope is None else loader.ropes.index(whole.rope)
        self._heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, config.value_size)
        self._q_norm, self._k_norm = loader.norm("q_norm"), loader.norm("k_norm")
        if config.qk_norm == "unweighted":
            self._q_norm = self._k_norm = loader.unit_norm(config.head_dim)
        self._v_norm: torch.Tensor | None = None
        if whole.value_norm and whole.kv_source is None:
            assert self._k_norm is not None
            self._v_norm = self._k_norm.new_ones(config.value_size)
        self._query_factors: torch.Tensor | None = None
        if whole.qk_norm == "rotated_head":
            # A rotation keeps the mean square, but for its factor; weights after it are factors, and queries
            # take those of keys.
            assert self._q_norm is not None
            assert self._k_norm is not None
            scale = 1.0 if whole.rope is None else whole.rope.attention_factor
            self._query_factors = self._q_norm * self._k_norm / scale**2
            self._q_norm = self._k_norm = self._q_norm.new_ones(config.head_dim)
        self._sinks = loader.tensor("sinks")
        self._distance_bias: torch.Tensor | None = None  # of two-sided attention
        if whole.qk_norm == "full" and loader.parallel is not None:
            assert self._q_norm is not None
            assert self._k_norm is not None
            self.qkv = FullWidthNormLinear(
                self.qkv,
                (self._q_norm, self._k_norm),
                loader.parallel,
                heads=(whole.num_heads, whole.num_kv_heads),
                head_dim=whole.head_dim,
                eps=self._eps,
            )
            self._q_norm = self._k_norm = None

    @property
    @override
    def kind(self) -> Hashable:
        norms = self._q_norm is None, self._k_norm is None
        return type(self), self._config, self._rope, norms, self.qkv.kind, self.output.kind

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        config = self._config
        kv, batch = self._keys_and_values(step, buffers)
        cos, sin = (None, None) if self._rope is None else step.angles[self._rope]
        query_scale = None if self._rope is None else step.query_scales[self._rope]
        qkv = buffers["qkv"]
        has_values = config.kv_source is not None or config.value_norm != "key"
        self.qkv(inputs, out=qkv if has_values else qkv[:, : self.qkv.out_features])
        if config.is_gated:
            size = config.num_heads * config.head_dim
            gate, qkv = qkv[:, :size].view(-1, config.num_heads, config.head_dim), qkv[:, size:]
        if config.kv_source is None:
            if self._v_norm is not None:
                self._normalize_values(qkv, self._v_norm)
            query = self._kernels.rotary_and_write_kv(
                qkv,
                kv,
                batch,
                heads=self._heads,
                cos=cos,
                sin=sin,
                q_norm=self._q_norm,
                k_norm=self._k_norm,
                eps=self._eps,
            )
        else:
            query = self._kernels.rotary(
                qkv, head_dim=config.head_dim, cos=cos, sin=sin, norm=self._q_norm, eps=self._eps
            )
        if query_scale is not None:
            query.mul_(query_scale)
        if self._query_factors is not None:
            query.mul_(self._query_factors)
        attended = self._kernels.paged_attention(
            query,
            kv,
            batch.in_chunks(config.window) if config.is_chunked else batch,
            scale=config.scale,
            window=0 if config.is_chunked else config.window,
            softcap=config.softcap,
            sinks=self._sinks,
            distance_bias=self._distance_bias,
            out=buffers["attended"],
        )
        if config.is_gated:
            attended = self._kernels.apply_gate(attended, gate, activation="sigmoid")
        return self.output(attended.flatten(1), out=out)

    def _keys_and_values(
        self, step: Step, buffers: Mapping[str, torch.Tensor]
    ) -> tuple[KVLayer, AttentionBatch]:
        """Return where the layer's keys and values are, and the step as it is there."""
        kv = step.kv[self._kv_layer]
        return kv, step.batches[kv.group]

    def _normalize_values(self, qkv: torch.Tensor, weight: torch.Tensor) -> None:
        config = self._config
        size, end = config.value_size, qkv.shape[1]
        values = qkv[:, end - config.num_kv_heads * size :]
        start = config.num_heads * config.head_dim if config.value_norm == "key" else end - values.shape[1]
        for head in range(config.num_kv_heads):
            source = qkv[:, start + head * size : start + (head + 1) * size]
            own = values[:, head * size : (head + 1) * size]
            self._kernels.rms_norm(source, weight, eps=self._eps, out=own)


def _check(config: AttentionConfig, loader: LayerLoader) -> None:
    if config.value_size != config.head_dim and not loader.kernels.takes_any_value_size:
        raise ModelError(
            f"layer {loader.index} has keys of {config.head_dim} and values of {config.value_size} features "
            f"in each head; the {loader.kernels.name} kernels need both to be of one size; "
            "EngineConfig.kernels 'native' and 'reference' take any"
        )
    if config.is_chunked and not loader.kernels.takes_chunks:
        raise ModelError(
            f"layer {loader.index} has attention in chunks of {config.window} tokens, which the "
            f"{loader.kernels.name} kernels do not compute; EngineConfig.kernels 'native' and 'reference' do"
        )
    if config.kv_source is None:
        return
    if not 0 <= config.kv_source < loader.index:
        raise ModelError(
            f"layer {loader.index} reads the KV of layer {config.kv_source}; it must be of an earlier one"
        )
    source = loader.model.layers[config.kv_source].kv
    needed = dataclasses.replace(config, kv_source=None).kv
    assert needed is not None
    if source is None or dataclasses.replace(source, window=config.window) != needed:
        raise ModelError(
            f"layer {loader.index} reads the KV of layer {config.kv_source}, which has {source}; it needs "
            f"{needed}"
        )
    if source.window and not 0 < config.window <= source.window:
        raise ModelError(
            f"layer {loader.index} sees {config.window or 'all'} tokens, and reads the KV of layer "
            f"{config.kv_source}, which is kept for the last {source.window} tokens only"
        )


# -- memory ------------------------------------------------------------------------------------------------


def _scratch_bytes(attention: AttentionConfig, step: StepSizes) -> int:
    """Return the most scratch memory of attention on a CPU in bytes."""
    sizes = attention.head_dim, attention.value_size
    fits = not any(size % bounds.HEAD_DIM_MULTIPLE or size > bounds.MAX_HEAD_DIM for size in sizes)
    if step.is_native and fits:
        return native_attention_bytes(attention, step.max_model_len, step.num_threads)
    tokens = step.scheduler.max_num_batched_tokens
    pieces = step.scheduler.max_num_seqs + (tokens // attention.window if attention.is_chunked else 0)
    blocks = min(pieces + tokens // bounds.TILE, tokens)
    return _reference_attention_bytes(attention, blocks, step.max_model_len)


def native_attention_bytes(attention: AttentionConfig, max_model_len: int, num_threads: int) -> int:
    """Return the most scratch memory that the native attention takes in bytes.

    Each thread has the queries of a task, a tile of keys and of values, and two states. If there are few
    tasks for the threads, each span of a task has a state as well.
    """
    rows = max(bounds.BLOCK_ROWS, attention.group)
    rows = -(-rows // bounds.LANES) * bounds.LANES
    state = rows * (1 + bounds.LANES + attention.value_size) * _FLOAT32_BYTES
    keys, values = (rows + bounds.TILE) * attention.head_dim, bounds.TILE * attention.value_size
    of_thread = (keys + values) * _FLOAT32_BYTES + 2 * state + bounds.THREAD_BYTES
    spans = -(-max_model_len // bounds.SPAN)
    if spans == 1 or num_threads == 1:
        return num_threads * of_thread
    of_spans = (bounds.TASKS_PER_THREAD * num_threads - 1) * spans * state
    return num_threads * of_thread + min(of_spans, bounds.MAX_SPAN_BYTES)


def _reference_attention_bytes(attention: AttentionConfig, num_blocks: int, max_model_len: int) -> int:
    """Return the bytes of the float32 intermediates of `quire.kernels.attention.paged` at their bound.

    One query block against all tiles of the longest sequence always runs in one go; more run together as
    long as each intermediate stays within the bound.
    """
    tiles = -(-max_model_len // bounds.TILE)
    block_rows = bounds.TILE * attention.num_heads // attention.num_kv_heads
    width = max(bounds.TILE, attention.head_dim, attention.value_size)
    one_block = tiles * attention.num_kv_heads * block_rows * width
    floats = max(one_block, min(bounds.SCRATCH_FLOATS, num_blocks * one_block))
    return bounds.INTERMEDIATES * floats * _FLOAT32_BYTES


def key_selection_bytes(
    scheduler: SchedulerConfig, attention: AttentionConfig, max_model_len: int, num_threads: int
) -> int:
    """Return the most memory that XAttention's estimate and choice of keys take in bytes.

    Each thread has the queries of a block as rows, and their scores; then there are the mass of each key
    block for each query block and head, and what each of them sees of the chosen tiles.
    """
    if not _selects_keys(scheduler):
        return 0
    config = scheduler.sparse_attention_config
    size, stride = config.xattention_block_size, config.xattention_stride
    num_rows = bounds.MASS_ROWS * -(-size // stride * attention.group // bounds.MASS_ROWS)
    num_columns = bounds.LANES * -(-max_model_len // (stride * bounds.LANES))
    of_thread = num_rows * (stride * attention.head_dim + num_columns) * _FLOAT32_BYTES
    of_pair = _FLOAT64_BYTES + 1 + size // bounds.TILE * bounds.VISIT_BYTES
    return num_threads * of_thread + _block_pairs(scheduler, attention, max_model_len) * of_pair


def gpu_key_selection_bytes(
    scheduler: SchedulerConfig, attention: AttentionConfig, max_model_len: int
) -> int:
    """Return the same of a GPU: some estimates at a time, what is selected, and which tiles are visited."""
    if not _selects_keys(scheduler):
        return 0
    query_tiles = scheduler.max_num_batched_tokens * attention.num_heads // bounds.TILE
    visits = query_tiles * -(-max_model_len // bounds.TILE)
    config = scheduler.sparse_attention_config
    num_key_blocks = -(-max_model_len // config.xattention_block_size)
    rows = config.xattention_block_size // config.xattention_stride
    of_block = bounds.gpu_estimate_bytes(attention.num_heads, num_key_blocks, rows)  # at least one at a time
    estimates = max(bounds.GPU_ESTIMATE_BYTES, of_block)
    selected = 2 * _block_pairs(scheduler, attention, max_model_len)  # of all parts, and put together
    return estimates + (selected + visits) * _INT32_BYTES


def _selects_keys(scheduler: SchedulerConfig) -> bool:
    mode = scheduler.sparse_attention_config.mode
    return scheduler.use_sparse_attention and mode == SparseAttentionMode.XATTENTION


def _block_pairs(scheduler: SchedulerConfig, attention: AttentionConfig, max_model_len: int) -> int:
    """Return the most pairs of a head's query blocks and key blocks that a step has."""
    size, tokens = scheduler.sparse_attention_config.xattention_block_size, scheduler.max_num_batched_tokens
    query_blocks = min(tokens, tokens // size + 2 * scheduler.max_num_seqs)
    return query_blocks * attention.num_heads * -(-max_model_len // size)
