"""The weights of a model: what each of the decoder's tensors is made of, by name and shape."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from quire.kernels.bounds import kernel_group
from quire.models.config import DTYPE_BYTES, ModelConfig
from quire.models.families import FAMILIES
from quire.models.shard import WHOLE, Shard

_IN_GROUPS = ("int4", "grouped_int8")
_FLOAT8 = ("fp8", "fp8_blocks")
_FLOATS = ("none", 0)
_FLOAT8_BLOCK = 128  # rows that share a scale
QUANTIZED_FIELDS = ("qkv", "attention_output", "gate_up", "down", "expert_gate_up", "expert_down")
_ADDED_ONCE = ("attention_output_bias", "down_bias")  # of layers whose results are summed over the ranks


@dataclasses.dataclass(slots=True, frozen=True)
class WeightSource:
    """One tensor of the checkpoint, or what a rank holds of it: `ranges` along `axis`; None: all."""

    name: str
    shape: tuple[int, ...]  # in the checkpoint
    axis: int = 0
    ranges: tuple[range, ...] | None = None

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape of what is held."""
        if self.ranges is None:
            return self.shape
        return *self.shape[: self.axis], sum(map(len, self.ranges)), *self.shape[self.axis + 1 :]


@dataclasses.dataclass(slots=True, frozen=True)
class WeightSpec:
    """One tensor of the decoder: the sources one after the other along the first dimension.

    `layer` is the layer's index, or -1; `field` names the tensor in the decoder or in its layer.
    """

    layer: int
    field: str
    sources: tuple[WeightSource, ...]


def weight_specs(config: ModelConfig, shard: Shard = WHOLE) -> Iterator[WeightSpec]:
    """Yield every tensor of the decoder that a checkpoint must hold.

    Args:
        config: the whole model's numbers.
        shard: the part of the model to yield tensors of.
    """
    for spec in _whole_specs(config):
        if shard.size == 1:
            yield spec
        elif shard.rank == 0 or spec.field not in _ADDED_ONCE:
            yield _part_of(spec, config, shard)


def _whole_specs(config: ModelConfig) -> Iterator[WeightSpec]:
    names = FAMILIES[config.family].weight_names
    embedding_shape = (config.vocab_size, config.hidden_size)
    yield _single(-1, "embedding", names[config.embedding_field], embedding_shape)
    for layer in range(config.num_layers):
        prefix = names["layer"].format(layer)
        for field, parts in _layer_parts(config, layer):
            sources = tuple(WeightSource(prefix + _weight_name(names, part), shape) for part, shape in parts)
            yield WeightSpec(layer, field, sources)
    yield _single(-1, "norm", names["norm"], (config.hidden_size,))
    if not config.tie_word_embeddings:
        yield _single(-1, "output", names["output"], embedding_shape)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of weights, a tied output layer counted once."""
    return sum(math.prod(source.shape) for spec in weight_specs(config) for source in spec.sources)


def weight_bytes(
    config: ModelConfig,
    dtype: str,
    quantization: str,
    group_size: int,
    *,
    is_native: bool = True,
    has_float8: bool = False,
    on_gpu: bool = False,
    shard: Shard = WHOLE,
) -> int:
    """Return the bytes that the weights take in memory.

    A tied embedding counts as the output layer; beside it only the rows that are looked up are read, where
    the file is mapped, unless the file has it in another floating-point type: then it is held a second time.
    A quantized one is decoded there row by row.

    Args:
        config: the whole model's numbers.
        dtype: of what is not quantized.
        quantization: none, int8, int4 or fp8; the output layer is in int8 instead of int4, and never in fp8.
            Matrices that are stored quantized stay as they are.
        group_size: inputs that share a scale and a zero, for int4.
        is_native: held by native kernels; the reference holds groups as the float32 numbers that they stand
            for.
        has_float8: held by kernels that compute with float8; others hold it in `dtype`, or quantized.
        on_gpu: held in a GPU's memory, where no file is mapped and no row decoded when it is looked up.
        shard: the part of the model that is held.
    """
    stored = {(layer, field): (kind, size) for layer, field, kind, size in config.stored_otherwise}
    main = config.stored_quantization, config.stored_group_size
    total = 0
    for spec in weight_specs(config, shard):
        kind, size = stored.get((spec.layer, spec.field), main if spec.field in QUANTIZED_FIELDS else _FLOATS)
        is_float = kind == "none" or (kind in _FLOAT8 and not has_float8)
        wanted = "none", group_size
        if spec.field in QUANTIZED_FIELDS:
            wanted = quantization, group_size
        elif spec.field in ("embedding", "output"):
            wanted = output_quantization(quantization), group_size
        if spec.field == "embedding":
            total += _looked_up_bytes(spec, config, dtype, on_gpu=on_gpu)
            if not config.tie_word_embeddings:
                continue
        for source in spec.sources:
            held, held_size = wanted if is_float else (kind, size)
            if held in _IN_GROUPS:
                otherwise = None if is_float else wanted
                held, held_size = _in_fitting_groups(
                    held, held_size, source.held_shape[1], otherwise=otherwise
                )
            is_packed = is_native or on_gpu
            held_as = ("none", "float32") if held in _IN_GROUPS and not is_packed else (held, dtype)
            total += _bytes_as(*held_as, source.held_shape, held_size, on_gpu=on_gpu)
    return total


def _in_fitting_groups(
    kind: str, size: int, inputs: int, *, otherwise: tuple[str, int] | None
) -> tuple[str, int]:
    """Return what matrices in groups of `size` are held as, and in groups of how many inputs.

    Args:
        kind: int4 or grouped_int8.
        size: one of the kernels'.
        inputs: of the matrix, or of the part that is held.
        otherwise: quantization and group size of floats; None: `kind` is what floats are quantized to.
    """
    if otherwise is None:
        return kind if inputs % size == 0 else "int8", size
    fitting = kernel_group(inputs, size)  # smaller where a row was one group, or a rank holds parts of groups
    if fitting:
        return kind, fitting
    kind, size = otherwise
    return _in_fitting_groups(kind, size, inputs, otherwise=None) if kind in _IN_GROUPS else otherwise


def _looked_up_bytes(spec: WeightSpec, config: ModelConfig, dtype: str, *, on_gpu: bool) -> int:
    """Return the bytes of the embedding that rows are looked up in, beside those of a tied output layer."""
    is_mapped = config.tie_word_embeddings and config.embedding_dtype == dtype
    if not on_gpu and (is_mapped or not config.embedding_dtype):
        return 0
    return sum(math.prod(source.held_shape) for source in spec.sources) * DTYPE_BYTES[dtype]


def held_quantization(config: ModelConfig, quantization: str, *, has_float8: bool) -> str:
    """Return the quantization that most matrices have in memory, where `quantization` is asked for."""
    stored = config.stored_quantization
    return quantization if stored == "none" or (stored in _FLOAT8 and not has_float8) else stored


def _bytes_as(kind: str, dtype: str, shape: tuple[int, ...], group_size: int, *, on_gpu: bool) -> int:
    """Return the bytes of a tensor that is held as `kind`, in groups that divide its inputs."""
    if kind == "none":
        return math.prod(shape) * DTYPE_BYTES[dtype]
    rows, inputs = shape
    if kind == "fp8":
        return rows * (inputs + 4)
    if kind == "fp8_blocks":
        return rows * inputs + -(-rows // _FLOAT8_BLOCK) * -(-inputs // group_size) * 4
    if kind in _IN_GROUPS:
        values = inputs // 2 if kind == "int4" else inputs
        if on_gpu:
            return rows * (values + inputs // group_size * 8)  # scale and zero in float32
        return rows * (values + inputs // group_size * 4 + 4)  # scale and zero in float16, and their unit
    return rows * (inputs + 8)  # scale and sum


def output_quantization(quantization: str) -> str:
    """Return the quantization of the output layer: it decides between tokens, and 4 bits are too few.

    So are the 4 significant bits of float8.
    """
    return {"int4": "int8", "fp8": "none"}.get(quantization, quantization)


def _part_of(spec: WeightSpec, config: ModelConfig, shard: Shard) -> WeightSpec:
    """Return what a rank holds of a tensor: its sections one after the other, if one source has them all."""
    axis, sections = _sections(spec.field, config, shard)
    if not sections:
        return spec
    if len(spec.sources) == 1:
        starts = itertools.accumulate((length for length, _ in sections), initial=0)
        joined = tuple(
            range(start + part.start, start + part.stop)
            for start, (_, ranges) in zip(starts, sections, strict=False)
            for part in ranges
        )
        parts = [joined]
    else:
        parts = [sections[number % len(sections)][1] for number in range(len(spec.sources))]
    sources = tuple(
        dataclasses.replace(source, axis=axis, ranges=ranges)
        for source, ranges in zip(spec.sources, parts, strict=True)
    )
    return dataclasses.replace(spec, sources=sources)


Section = tuple[int, tuple[range, ...]]


def _sections(field: str, config: ModelConfig, shard: Shard) -> tuple[int, list[Section]]:
    """Return the axis along which a tensor is divided, and each section's length and what a rank holds of it.

    A layer whose outputs are divided is divided by rows, one that takes these outputs by columns.
    """

    def share(count: int) -> Section:
        return count, (shard.share(count),)

    def heads(total: int, held: Sequence[int]) -> Section:
        size = config.head_dim
        return total * size, tuple(range(head * size, (head + 1) * size) for head in held)

    inner, expert_inner = share(config.intermediate_size), share(config.moe_intermediate_size)
    query = heads(config.num_heads, shard.query_heads(config))
    kv = heads(config.num_kv_heads, shard.kv_heads(config))
    by_field = {
        "embedding": (0, [share(config.vocab_size)]),
        "output": (0, [share(config.vocab_size)]),
        "qkv": (0, [query, kv, kv]),
        "qkv_bias": (0, [query, kv, kv]),
        "attention_output": (1, [query]),
        "gate_up": (0, [inner, inner]),
        "gate_up_bias": (0, [inner, inner]),
        "down": (1, [inner]),
        "expert_gate_up": (0, [expert_inner]),
        "expert_down": (1, [expert_inner]),
    }
    if config.qk_norm == "full":
        by_field |= {"q_norm": (0, [query]), "k_norm": (0, [kv])}
    return by_field.get(field, (0, []))


def _single(layer: int, field: str, name: str, shape: tuple[int, ...]) -> WeightSpec:
    return WeightSpec(layer, field, (WeightSource(name, shape),))


def _weight_name(names: dict[str, str], part: str) -> str:
    """Return the checkpoint's name for a part such as "q.weight" or "expert.3.gate.weight"."""
    *path, kind = part.split(".")
    if path[0] == "expert":
        return f"{names['expert_' + path[2]].format(path[1])}.{kind}"
    return f"{names[path[0]]}.{kind}"


NamedShapes = tuple[tuple[str, tuple[int, ...]], ...]


def _layer_parts(config: ModelConfig, layer: int) -> Iterator[tuple[str, NamedShapes]]:
    yield from _norm_parts(config)
    yield from _attention_parts(config)
    if config.moe_layers[layer]:
        yield from _expert_parts(config)
    else:
        yield from _mlp_parts(config)


def _norm_parts(config: ModelConfig) -> Iterator[tuple[str, NamedShapes]]:
    names = ["attention_norm", "mlp_norm"] if config.pre_norm else []
    names += ["attention_post_norm", "mlp_post_norm"] if config.post_norm else []
    for name in names:
        yield name, ((f"{name}.weight", (config.hidden_size,)),)
    if config.qk_norm:
        heads = (config.num_heads, config.num_kv_heads) if config.qk_norm == "full" else (1, 1)
        for name, count in zip(("q_norm", "k_norm"), heads, strict=True):
            yield name, ((f"{name}.weight", (count * config.head_dim,)),)


def _attention_parts(config: ModelConfig) -> Iterator[tuple[str, NamedShapes]]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if "qkv" in FAMILIES[config.family].weight_names:
        sizes = [("qkv", q_size + 2 * kv_size)]
    else:
        sizes = [("q", q_size), ("k", kv_size), ("v", kv_size)]
    yield "qkv", tuple((f"{part}.weight", (size, config.hidden_size)) for part, size in sizes)
    if config.attention_bias:
        yield "qkv_bias", tuple((f"{part}.bias", (size,)) for part, size in sizes)
    yield "attention_output", (("o.weight", (config.hidden_size, q_size)),)
    if config.output_bias:
        yield "attention_output_bias", (("o.bias", (config.hidden_size,)),)


def _mlp_parts(config: ModelConfig) -> Iterator[tuple[str, NamedShapes]]:
    size = config.intermediate_size
    if "gate_up" in FAMILIES[config.family].weight_names:
        sizes = [("gate_up", 2 * size)]
    else:
        sizes = [("gate", size), ("up", size)]
    yield "gate_up", tuple((f"{part}.weight", (rows, config.hidden_size)) for part, rows in sizes)
    yield "down", (("down.weight", (config.hidden_size, size)),)
    if config.mlp_bias:
        yield "gate_up_bias", tuple((f"{part}.bias", (rows,)) for part, rows in sizes)
        yield "down_bias", (("down.bias", (config.hidden_size,)),)


def _expert_parts(config: ModelConfig) -> Iterator[tuple[str, NamedShapes]]:
    """Experts lie one below another: gate_up [experts * 2 * size, hidden], down [experts * hidden, size]."""
    size, hidden = config.moe_intermediate_size, config.hidden_size
    experts = range(config.num_experts)
    yield "router", (("router.weight", (config.num_experts, hidden)),)
    yield (
        "expert_gate_up",
        tuple((f"expert.{e}.{part}.weight", (size, hidden)) for e in experts for part in ("gate", "up")),
    )
    yield "expert_down", tuple((f"expert.{e}.down.weight", (hidden, size)) for e in experts)
