"""The weights of a model: names, shapes and sources of the decoder's tensors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from quire.kernels.bounds import MIN_SHORTLISTED_BYTES, kernel_group
from quire.models.config import DTYPE_BYTES, ModelConfig
from quire.models.families import FAMILIES
from quire.models.layer import LayerWeight, joined_section
from quire.models.layers import per_layer
from quire.models.shard import WHOLE, Shard

_IN_GROUPS = {"int4": (4, 4, 4), "int6": (6, 2, 4), "grouped_int8": (8, 4, 4), "mxfp4": (4, 1, 0)}
"""Bits of a weight, and bytes of the scales and zeros of a group and of the unit of a row."""
_FLOAT8 = ("fp8", "fp8_blocks")
_FLOATS = ("none", 0)
_FLOAT8_BLOCK = 128  # rows that share a scale
_OF_ROW_LAYERS = "row_"  # what the names of their fields begin with


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

    `layer` is the layer's index, or -1; `field` names the tensor in the decoder or in its layer;
    `is_quantized` says that it is a matrix of a layer that may be held quantized.
    """

    layer: int
    field: str
    sources: tuple[WeightSource, ...]
    is_quantized: bool = False


def weight_specs(config: ModelConfig, shard: Shard = WHOLE) -> Iterator[WeightSpec]:
    """Yield every tensor of the decoder that a checkpoint must hold.

    Args:
        config: the whole model's numbers.
        shard: the part of the model to yield tensors of.
    """
    family_names = FAMILIES[config.family].weight_names
    shape = config.vocab_size, config.hidden_size
    vocabulary = ((config.vocab_size, (shard.share(config.vocab_size),)),)
    embedding = (family_names[config.embedding_field], shape)
    yield _spec(-1, LayerWeight("embedding", (embedding,), sections=vocabulary), shard)
    if config.learned_positions:
        count = config.unused_positions + config.learned_positions
        positions = (family_names["positions"], (count, config.hidden_size))
        yield _spec(-1, LayerWeight("positions", (positions,)), shard)
    if config.token_types:
        types = (family_names["token_types"], (config.token_types, config.hidden_size))
        yield _spec(-1, LayerWeight("token_types", (types,)), shard)
    for weight in per_layer.per_layer_weights(config, family_names):
        yield _spec(-1, weight, shard)
    for index, layer in enumerate(config.layers):
        for part in layer.parts:
            names = {**part.weight_names, **family_names}
            norms = _with_biases(part.norm_weights(config.hidden_size), config)
            of_part = norms, part.scale_weights(), part.weights(config.hidden_size, names, shard)
            for weight in itertools.chain(*of_part):
                if shard.rank == 0 or not weight.is_of_first_rank:
                    yield _spec(index, weight, shard, names)
    ends = {"embedding_norm": config.embedding_norm, "norm": config.final_norm}
    at_ends = [name for name, is_there in ends.items() if is_there]
    own = (LayerWeight(name, ((family_names[name], (config.hidden_size,)),)) for name in at_ends)
    for weight in _with_biases(own, config):
        yield _spec(-1, weight, shard)
    if config.pooling is not None:
        for weight in _row_layer_weights(config):
            yield _spec(-1, weight, shard)
        return
    if not config.tie_word_embeddings:
        output = (family_names["output"], shape)
        yield _spec(-1, LayerWeight("output", (output,), sections=vocabulary), shard)
    if config.output_bias:
        bias = (_bias_name(family_names["output"]), shape[:1])
        field = "embedding_bias" if config.tie_word_embeddings else "output_bias"
        yield _spec(-1, LayerWeight(field, (bias,), sections=vocabulary), shard)


def _row_layer_weights(config: ModelConfig) -> Iterator[LayerWeight]:
    for number, layer in enumerate(config.row_layers):
        if layer.tokens:
            yield _output_rows(f"row_layer_{number}", layer.tokens, config)
            continue
        matrix = f"{layer.name}.weight", (layer.outputs, layer.inputs)
        yield LayerWeight(f"row_layer_{number}", (matrix,))
        if layer.bias:
            yield LayerWeight(f"row_layer_{number}_bias", ((f"{layer.name}.bias", (layer.outputs,)),))
        if layer.norm:
            norm = LayerWeight(f"row_norm_{number}", ((f"{layer.norm}.weight", (layer.outputs,)),))
            yield from _with_biases([norm], config)


def _output_rows(field: str, tokens: Iterable[int], config: ModelConfig) -> LayerWeight:
    """Return the rows of some tokens of the output layer."""
    name = config.embedding_field if config.tie_word_embeddings else "output"
    matrix = FAMILIES[config.family].weight_names[name], (config.vocab_size, config.hidden_size)
    rows = tuple(range(token, token + 1) for token in tokens)
    return LayerWeight(field, (matrix,), sections=((config.vocab_size, rows),))


def _with_biases(norms: Iterable[LayerWeight], config: ModelConfig) -> Iterator[LayerWeight]:
    """Yield norms, each followed by its bias if norms of this model have one."""
    for norm in norms:
        yield norm
        if config.norm_kind == "layer":
            ((name, shape),) = norm.sources
            yield LayerWeight(f"{norm.field}_bias", ((_bias_name(name), shape),))


def _bias_name(weight_name: str) -> str:
    return f"{weight_name.removesuffix('.weight')}.bias"


def count_parameters(config: ModelConfig) -> int:
    """Return the number of weights; a tied output layer, and what layers share, is counted once."""
    sources = {source for spec in weight_specs(config) for source in spec.sources}
    return sum(math.prod(source.shape) for source in sources)


def weight_bytes(
    config: ModelConfig,
    dtype: str,
    quantization: str,
    group_size: int,
    *,
    is_native: bool = True,
    output_bits: int = 8,
    has_float8: bool = False,
    on_gpu: bool = False,
    shard: Shard = WHOLE,
) -> int:
    """Return the bytes that the weights take in memory.

    A tied embedding counts as the output layer; beside it only the rows that are looked up are read, where
    the file is mapped, unless the file has it in another floating-point type: then it is held a second time.
    A quantized one is decoded there row by row. So it is with the embedding that layers get vectors of. What
    pooled rows go through is held in float32, and never on a GPU. A large output layer in floating point has
    a copy in int8 if native kernels hold it.

    Args:
        config: the whole model's numbers.
        dtype: of what is not quantized.
        quantization: none, int8, int4 or fp8; the output layer is never in fp8.
            Matrices that are stored quantized stay as they are.
        group_size: inputs that share a scale and a zero, for int4.
        is_native: held by native kernels; the reference holds groups as the float32 numbers that they stand
            for.
        output_bits: of the output layer instead of 4.
        has_float8: held by kernels that compute with float8; others hold it in `dtype`, or quantized.
        on_gpu: held in a GPU's memory, where no file is mapped and no row decoded when it is looked up.
        shard: the part of the model that is held.
    """
    stored = {(layer, field): (kind, size) for layer, field, kind, size in config.stored_otherwise}
    main = config.stored_quantization, config.stored_group_size
    total = 0
    for spec in {spec.sources: spec for spec in weight_specs(config, shard)}.values():
        if spec.field.startswith(_OF_ROW_LAYERS):
            total += 0 if on_gpu else _num_held(spec) * DTYPE_BYTES["float32"]
            continue
        kind, size = stored.get((spec.layer, spec.field), main if spec.is_quantized else _FLOATS)
        is_float = kind == "none" or (kind in _FLOAT8 and not has_float8)
        wanted = "none", group_size
        if spec.is_quantized:
            wanted = quantization, group_size
        elif spec.field in ("embedding", "output"):
            inputs = spec.sources[0].held_shape[1]
            wanted = output_quantization(quantization, output_bits), kernel_group(inputs) or group_size
        if spec.field in ("embedding", per_layer.EMBEDDING):
            total += _looked_up_bytes(spec, config, dtype, on_gpu=on_gpu)
            is_output = config.tie_word_embeddings and config.pooling is None
            if spec.field == per_layer.EMBEDDING or not is_output:
                continue
        for number, source in enumerate(spec.sources):
            held, held_size = wanted if is_float else (kind, size)
            if is_native and not on_gpu:
                part = spec.layer, part_name(spec.field, number)
                held, held_size = stored.get(part, (held, held_size))
            if held in _IN_GROUPS:
                otherwise = None if is_float else wanted
                held, held_size = _in_fitting_groups(
                    held, held_size, source.held_shape[1], otherwise=otherwise
                )
            is_packed = is_native or on_gpu
            held_as = ("none", "float32") if held in _IN_GROUPS and not is_packed else (held, dtype)
            total += _num_copies(spec.field, config) * _bytes_as(
                *held_as, source.held_shape, held_size, on_gpu=on_gpu
            )
            if spec.field in ("embedding", "output") and held == "none" and is_native and not on_gpu:
                total += _copy_bytes(source.held_shape, dtype, config, shard)
    return total


def may_find_largest(config: ModelConfig, shard: Shard) -> bool:
    """Return whether an output layer may be one that `finds_largest`.

    Not if ranks need all logits of each other, or a cap makes numbers of -inf.
    """
    return shard == WHOLE and not (config.logits_softcap or config.output_bias)


def _copy_bytes(shape: tuple[int, ...], dtype: str, config: ModelConfig, shard: Shard) -> int:
    """Return the bytes of the int8 copy that an output layer in floating point has beside it."""
    is_small = math.prod(shape) * DTYPE_BYTES[dtype] < MIN_SHORTLISTED_BYTES
    if is_small or not may_find_largest(config, shard):
        return 0
    num_bytes = _bytes_as("int8", dtype, shape, 0, on_gpu=False)
    return num_bytes + shape[0] * 2 * DTYPE_BYTES["float32"]


def part_name(field: str, number: int) -> str:
    """Return what a part of a matrix is called in `ModelConfig.stored_otherwise`."""
    return f"{field}.{number}"


def _in_fitting_groups(
    kind: str, size: int, inputs: int, *, otherwise: tuple[str, int] | None
) -> tuple[str, int]:
    """Return what matrices in groups of `size` are held as, and in groups of how many inputs.

    Args:
        kind: one of those in groups.
        size: one of the kernels'.
        inputs: of the matrix, or of the part that is held.
        otherwise: quantization and group size of floats; None: `kind` is what floats are quantized to.
    """
    if otherwise is None:
        return kind if inputs % size == 0 else "int8", size
    fitting = kernel_group(inputs, size)  # smaller where a row was one group, or a rank holds parts of groups
    if fitting:
        return ("grouped_int8" if kind == "mxfp4" and fitting < size else kind), fitting
    kind, size = otherwise
    return _in_fitting_groups(kind, size, inputs, otherwise=None) if kind in _IN_GROUPS else otherwise


def _num_copies(field: str, config: ModelConfig) -> int:
    """Return how often a tensor is held: vectors of positions once for each type of tokens, its own added."""
    if not config.learned_positions or field not in ("positions", "token_types"):
        return 1
    return max(1, config.token_types) if field == "positions" else 0


def _looked_up_bytes(spec: WeightSpec, config: ModelConfig, dtype: str, *, on_gpu: bool) -> int:
    """Return the bytes of an embedding that rows are looked up in, beside those of a tied output layer."""
    stored = config.per_layer_dtype if spec.field == per_layer.EMBEDDING else config.embedding_dtype
    is_seldom_read = config.tie_word_embeddings or spec.field == per_layer.EMBEDDING
    is_mapped = is_seldom_read and stored == dtype
    if not on_gpu and (is_mapped or not stored):
        return 0
    return _num_held(spec) * DTYPE_BYTES[dtype]


def _num_held(spec: WeightSpec) -> int:
    return sum(math.prod(source.held_shape) for source in spec.sources)


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
        groups = inputs // group_size
        if on_gpu:  # scale and zero in float32
            return rows * ((inputs // 2 if kind == "int4" else inputs) + groups * 8)
        bits, of_group, of_row = _IN_GROUPS[kind]
        return rows * (inputs * bits // 8 + groups * of_group + of_row)
    return rows * (inputs + 8)  # scale and sum


def output_quantization(quantization: str, bits: int) -> str:
    """Return the quantization of the output layer: it decides between tokens, and 4 bits are too few.

    So are the 4 significant bits of float8. `bits` are those in place of 4.
    """
    return {"int4": f"int{bits}", "fp8": "none"}.get(quantization, quantization)


def _spec(
    layer: int, weight: LayerWeight, shard: Shard, names: Mapping[str, str] | None = None
) -> WeightSpec:
    """Return a tensor of the decoder, or what a rank holds of it.

    Its sections lie one after the other if one source has them all; otherwise each source is one.
    """
    source_layer = layer if weight.layer is None else weight.layer
    sources = tuple(
        WeightSource(_weight_name(source_layer, name, names) if names else name, shape)
        for name, shape in weight.sources
    )
    sections = weight.sections
    if sections and (shard.size > 1 or not all(_is_in_order(*section) for section in sections)):
        parts = [sections[number % len(sections)][1] for number in range(len(sources))]
        if len(sources) == 1:
            parts = [joined_section(sections)[1]]
        sources = tuple(
            dataclasses.replace(source, axis=weight.axis, ranges=ranges)
            for source, ranges in zip(sources, parts, strict=True)
        )
    return WeightSpec(layer, weight.field, sources, weight.is_quantized)


def _is_in_order(length: int, ranges: tuple[range, ...]) -> bool:
    """Return whether ranges are one after the other all of a section."""
    stops = [0, *(part.stop for part in ranges)]
    starts = [*(part.start for part in ranges), length]
    return stops == starts and all(part.step == 1 for part in ranges)


def _weight_name(layer: int, part: str, names: Mapping[str, str]) -> str:
    """Return the checkpoint's name for a part such as "q.weight", "expert.3.gate.weight" or "sinks"."""
    *path, kind = part.split(".")
    if not path:
        return f"{names['layer'].format(layer)}{names[kind]}"
    name = names[path[0]] if len(path) == 1 else names[f"{path[0]}_{path[2]}"].format(path[1])
    return f"{names['layer'].format(layer)}{name}.{kind}"
