"""Calls a native kernel with arguments that are wrong in one place, or in two.

Run as a program, so that a crash is the failure of a test: `python wrong_arguments.py KERNEL`. It prints each
call before it makes it, and a line after one that neither raised nor did what the reference does.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
import torch

from caches import make_cache
from quire.kernels.attention.batch import AttentionBatch, StepStates
from quire.kernels.attention.kv_layer import KVOfRows
from quire.kernels.attention.sparse_prefill import KeySelection, SkippedKeys
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.interface import KernelSet
from quire.kernels.layers.recurrence import DeltaHeads, ScanHeads
from quire.kernels.layers.weights import MAX_ZERO, GroupedWeight, quantize_int4, quantize_int8
from quire.kernels.reference import ReferenceKernels
from quire.kv.cache.view import PagedAttentionCacheView

HEADS = HeadLayout(4, 2, 32)
BLOCK_SIZE = 16
PAIRS = 20
TOLERANCE = 2e-2
REFUSALS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError, MemoryError)

Arguments = dict[str, Any]
Mutation = tuple[str, Callable[[Any], Any]]


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _batch(**options: Any) -> AttentionBatch:
    tables = np.arange(3 * 6, dtype=np.int32).reshape(3, 6)
    return AttentionBatch.build(np.array([70, 0, 33]), np.array([2, 20, 1]), tables, BLOCK_SIZE, **options)


def _layer(dtype: torch.dtype = torch.float32) -> PagedAttentionCacheView:
    cache = make_cache(18, 2, HEADS.num_kv_heads, BLOCK_SIZE, HEADS.head_dim, dtype)
    cache.tensor.zero_()
    return cache.views[1]


def _attention(**options: Any) -> Arguments:
    return {
        "query": _random(23, HEADS.num_heads, HEADS.head_dim),
        "kv": _layer(),
        "batch": _batch(**options),
        "scale": 0.2,
        "window": 0,
        "softcap": 0.0,
        "sinks": None if options else _random(4),
        "out": torch.empty(23, HEADS.num_heads, HEADS.head_dim),
    }


def _two_sided() -> Arguments:
    lengths = np.array([70, 1, 20])
    qkv = _random(91, 8 * HEADS.head_dim)
    return {
        "query": qkv[:, : 4 * HEADS.head_dim].unflatten(1, (4, HEADS.head_dim)),
        "kv": KVOfRows.of(qkv, HEADS),
        "batch": AttentionBatch.build(np.zeros(3), lengths, np.zeros((3, 70)), 1).over_rows(),
        "scale": 0.2,
        "distance_bias": _random(4, 21),
        "out": torch.empty(91, HEADS.num_heads, HEADS.head_dim),
    }


def _rotary(dtype: torch.dtype) -> Arguments:
    return {
        "qkv": _random(23, 8 * HEADS.head_dim),
        "kv": _layer(dtype),
        "batch": _batch(),
        "heads": HEADS,
        "cos": _random(23, 16),
        "sin": _random(23, 16),
        "q_norm": _random(32),
        "k_norm": _random(2 * 32),
        "eps": 1e-5,
    }


def _linear(
    kernels: KernelSet, *, rows: torch.Tensor, out: torch.Tensor | None, **layer: Any
) -> torch.Tensor:
    if isinstance(kernels, ReferenceKernels):
        rows = rows.float()  # it has products of one type only
    return kernels.linear(**layer)(rows, out=out)


def _linear_arguments(*parts: Any, quantization: str = "none") -> Arguments:
    return {
        "parts": list(parts),
        "bias": _random(40),
        "dtype": torch.float32,
        "quantization": quantization,
        "group_size": 32,
        "rows": _random(5, 64),
        "out": torch.empty(5, 40),
    }


def _state_batch() -> AttentionBatch:
    return _batch(states=StepStates(np.array([2, 0, 3]), None, np.array([1, 1, 1])))


def _conv(kernels: KernelSet, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.causal_conv(**arguments), arguments["state"]


def _conv_arguments() -> Arguments:
    return {
        "rows": _random(23, 40),
        "weight": _random(4, 40),
        "state": _random(5, 3, 40),
        "batch": _state_batch(),
        "bias": _random(40),
        "activation": "silu",
    }


def _delta_rule(kernels: KernelSet, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    kernels.gated_delta_rule(**arguments)
    return arguments["out"], arguments["state"]


def _delta_arguments(num_times: int = 1) -> Arguments:
    heads = DeltaHeads(2, 4, 16, 24, decay=-_random(4).exp(), time_bias=_random(4, num_times))
    return {
        "qkv": _random(23, 160),
        "strengths": _random(23, 4),
        "times": _random(23, 4 * num_times),
        "state": _random(5, 4, 16, 24),
        "batch": _state_batch(),
        "heads": heads,
        "out": torch.empty(23, 4, 24),
    }


def _scan(kernels: KernelSet, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    kernels.selective_scan(**arguments)
    return arguments["out"], arguments["state"]


def _scan_arguments() -> Arguments:
    heads = ScanHeads(4, 24, 2, 16, decay=-_random(4).exp(), time_bias=_random(4), skip=_random(4))
    return {
        "inputs": _random(23, 160),
        "times": _random(23, 4),
        "state": _random(5, 4, 16, 24),
        "batch": _state_batch(),
        "heads": heads,
        "out": torch.empty(23, 96),
    }


def _logits() -> Arguments:
    return {"logits": _random(6, 700).numpy(), "rows": np.array([5, 0, 3])}


def _method(name: str) -> Callable[..., Any]:
    return lambda kernels, **arguments: getattr(kernels, name)(**arguments)


def _sum_rows(kernels: KernelSet, **arguments: Any) -> torch.Tensor:
    kernels.sum_rows(**arguments)
    sums: torch.Tensor = arguments["sums"]
    return sums


def _sampling(name: str) -> Callable[..., Any]:
    return lambda kernels, **arguments: getattr(kernels.sampling.scans, name)(**arguments)


KERNELS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "rms_norm": (
        _method("rms_norm"),
        lambda: {"rows": _random(5, 40), "weight": _random(40), "eps": 1e-5, "out": torch.empty(5, 40)},
    ),
    "layer_norm": (
        _method("rms_norm"),
        lambda: {"rows": _random(5, 40), "weight": _random(40), "bias": _random(40), "eps": 1e-5},
    ),
    "activation": (
        _method("activation"),
        lambda: {"rows": _random(5, 40), "activation": "relu2", "out": torch.empty(5, 40)},
    ),
    "add_rms_norm": (
        _method("add_rms_norm"),
        lambda: {
            "residual": _random(5, 40),
            "delta": _random(5, 40),
            "weight": _random(40),
            "eps": 1e-5,
            "scale": 0.5,
            "out": torch.empty(5, 40),
        },
    ),
    "gated_activation": (
        _method("gated_activation"),
        lambda: {"gate_up": _random(5, 80), "activation": "silu", "out": torch.empty(5, 40)},
    ),
    "apply_gate": (
        _method("apply_gate"),
        lambda: {
            "rows": _random(5, 3, 40),
            "gate": _random(5, 3, 80)[..., 40:],
            "activation": "sigmoid",
            "norm": _random(40),
            "eps": 1e-5,
        },
    ),
    "soft_cap": (_method("soft_cap"), lambda: {"logits": _random(5, 40), "cap": 30.0}),
    "sum_rows": (
        _sum_rows,
        lambda: {
            "rows": _random(5, 40),
            "pieces": np.array([[0, 2, 1, 1], [2, 3, 0, 0]]),
            "sums": torch.zeros(2, 40, dtype=torch.float64),
            "unit": 0.25,
            "shares": np.ones(5),
        },
    ),
    "rotary": (
        _method("rotary"),
        lambda: {
            "states": _random(5, 96),
            "head_dim": 32,
            "cos": _random(5, 12),
            "sin": _random(5, 12),
            "norm": _random(32),
            "eps": 1e-5,
        },
    ),
    "rotary_and_write_kv": (_method("rotary_and_write_kv"), lambda: _rotary(torch.float32)),
    "rotary_and_write_int8": (_method("rotary_and_write_kv"), lambda: _rotary(torch.int8)),
    "paged_attention": (_method("paged_attention"), _attention),
    "scored_attention": (
        _method("paged_attention"),
        lambda: _attention(
            first_scoring_token=np.array([0, 5, 0]), sums_scores=np.array([True, False, False])
        ),
    ),
    "sparse_attention": (
        _method("paged_attention"),
        lambda: _attention(
            skipped_keys=SkippedKeys(np.array([16, 0, 0]), np.array([32, 0, 0])),
            key_selection=KeySelection(np.array([0, 20, 0]), 0.9, 64, 16),
        ),
    ),
    "two_sided_attention": (_method("paged_attention"), _two_sided),
    "causal_conv": (_conv, _conv_arguments),
    "gated_delta_rule": (_delta_rule, _delta_arguments),
    "gated_delta_rule_by_channel": (_delta_rule, lambda: _delta_arguments(num_times=16)),
    "selective_scan": (_scan, _scan_arguments),
    "linear": (_linear, lambda: _linear_arguments(_random(24, 64), _random(16, 64))),
    "linear_int8": (
        _linear,
        lambda: _linear_arguments(quantize_int8(_random(24, 64)), quantize_int8(_random(16, 64))),
    ),
    "linear_int4": (
        _linear,
        lambda: _linear_arguments(
            quantize_int4(_random(24, 64), 32), quantize_int4(_random(16, 64), 32), quantization="int4"
        ),
    ),
    "largest": (_sampling("largest"), _logits),
    "likeliest": (_sampling("likeliest"), _logits),
    "sum_exp": (
        _sampling("sum_exp"),
        lambda: {**_logits(), "maxima": np.full(3, 5, dtype=np.float32), "temperature": np.ones(3)},
    ),
    "ranks": (_sampling("ranks"), lambda: {**_logits(), "token_ids": np.array([0, 699, 7])}),
}

OTHER_TYPES: list[Mutation] = [("None", lambda _: None), ("text", lambda _: "x")]
OF_INTEGERS: list[Mutation] = [
    (str(value), lambda _, value=value: value) for value in (0, -1, 1, 3, 2**31, 2**63, 1.5)
]
OF_FLOATS: list[Mutation] = [(str(value), lambda _, value=value: value) for value in (0.0, 1e300)]
OF_TENSORS: list[Mutation] = [
    ("int64", lambda t: t.to(torch.int64)),
    ("float64", lambda t: t.double()),
    ("bfloat16", lambda t: t.bfloat16()),
    ("bool", lambda t: t.bool()),
    ("no rows", lambda t: t[:0]),
    ("a row less", lambda t: t[:-1]),
    ("a row more", lambda t: torch.cat([t, t[:1]])),
    ("a column less", lambda t: t[..., :-1]),
    ("a dimension more", lambda t: t[None]),
    ("flat", lambda t: t.flatten()),
    ("a number", lambda t: t.flatten()[0]),
    ("transposed", lambda t: t.transpose(0, -1)),
    ("columns apart", lambda t: torch.stack([t, t], dim=-1).flatten(-2)[..., ::2]),
    ("one row for all", lambda t: t[:1].expand_as(t)),
    ("no memory", lambda t: t.to("meta")),
    ("negative", lambda t: torch.full_like(t, -1)),
    ("large", lambda t: torch.full_like(t, min(2**40, 2**62))),
]
OF_ARRAYS: list[Mutation] = [
    ("int32", lambda a: a.astype(np.int32)),
    ("int64", lambda a: a.astype(np.int64)),
    ("float64", lambda a: a.astype(np.float64)),
    ("empty", lambda a: a[:0]),
    ("one less", lambda a: a[:-1]),
    ("one more", lambda a: np.concatenate([a, a[:1]])),
    ("a column less", lambda a: a[..., :-1]),
    ("apart", lambda a: np.repeat(a, 2, axis=-1)[..., ::2]),
    ("reversed", lambda a: a[..., ::-1]),
    ("a dimension more", lambda a: a[None]),
    ("zeros", np.zeros_like),
    ("negative", lambda a: np.full_like(a, -1)),
    ("a little more", lambda a: a + 1),
    ("much more", lambda a: a + 1000),
    ("most", lambda a: np.full_like(a, _most(a))),
    ("NaN", lambda a: np.where(np.arange(a.size).reshape(a.shape) % 3, a, np.nan).astype(a.dtype)),
]


def _most(array: np.ndarray[Any, Any]) -> Any:
    return np.iinfo(array.dtype).max if array.dtype.kind == "i" else np.inf


def mutations(value: Any) -> Iterator[Mutation]:
    """Yield what could be in place of `value`, or of a part of it."""
    yield from OTHER_TYPES
    if isinstance(value, torch.Tensor):
        yield from OF_TENSORS
    elif isinstance(value, np.ndarray):
        yield from OF_ARRAYS
    elif isinstance(value, bool | str):
        return
    elif isinstance(value, int):
        yield from OF_INTEGERS
    elif isinstance(value, float):
        yield from OF_FLOATS
    elif isinstance(value, list):
        yield "empty", lambda _: []
        yield from _of_part(value[0], "first", lambda v, part: [part, *v[1:]])
    elif isinstance(value, PagedAttentionCacheView):
        for name in ("key_pages", "value_pages", "key_scales", "value_scales"):
            yield from _of_part(getattr(value, name), name, lambda v, part, name=name: _with(v, name, part))
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name != "plans":
                yield from _of_part(
                    getattr(value, field.name),
                    field.name,
                    lambda v, part, name=field.name: _with(v, name, part),
                )


def _of_part(part: Any, name: str, put: Callable[[Any, Any], Any]) -> Iterator[Mutation]:
    for what, mutate in mutations(part):
        yield f"{name}: {what}", lambda v, mutate=mutate, name=name: put(v, mutate(_part(v, name)))


def _part(value: Any, name: str) -> Any:
    return value[0] if isinstance(value, list) else getattr(value, name)


def _with(value: Any, name: str, part: Any) -> Any:
    """Return a copy with another part, of which no kernel keeps anything yet."""
    other = copy.copy(value)
    object.__setattr__(other, name, part)
    for kept in ("plans", "handles"):
        if hasattr(other, kept):
            object.__setattr__(other, kept, {})
    return other


def cases(make: Callable[[], Arguments]) -> Iterator[tuple[str, Callable[[], Arguments]]]:
    """Yield the name of each case and what makes its arguments."""
    single = [(name, *mutation) for name, value in make().items() for mutation in mutations(value)]
    pairs = [random.Random(seed).sample(single, 2) for seed in range(PAIRS)]
    for changes in itertools.chain(([change] for change in single), pairs):
        name = " and ".join(f"{argument}: {what}" for argument, what, _ in changes)

        def changed(changes: list[Any] = changes) -> Arguments:
            arguments = make()
            for argument, _, mutate in changes:
                arguments[argument] = mutate(arguments[argument])
            return arguments

        yield name, changed


def outcome(function: Callable[..., Any], kernels: KernelSet, arguments: Arguments) -> Any:
    """Return all that a call changes or returns, as arrays; or the exception that it raised."""
    try:
        result = function(kernels, **arguments)
    except REFUSALS as error:
        return error
    kv = arguments.get("kv")
    results = list(result) if isinstance(result, tuple) else [result]
    if dataclasses.is_dataclass(result):
        results = [getattr(result, field.name) for field in dataclasses.fields(result)]
    pages = [] if kv is None else [kv.key_pages, kv.value_pages]
    return [np.asarray(x.float() if isinstance(x, torch.Tensor) else x) for x in results + pages]


def agree(ours: list[Any], theirs: list[Any]) -> bool:
    """Whether two outcomes are the same but for rounding."""
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def is_defined(kernel: str, arguments: Arguments) -> bool:
    """Whether the interface says what becomes of these arguments, beyond that nothing else does."""
    if kernel == "likeliest":
        return not np.isnan(arguments["logits"]).any()
    if kernel == "sum_rows":
        places = arguments["pieces"][:, 2].tolist()
        return len(set(places)) == len(places)
    if kernel == "sum_exp":
        maxima, temperature, logits = (arguments[name] for name in ("maxima", "temperature", "logits"))
        return bool(
            (temperature > 0).all() and np.isfinite(temperature).all() and logits.max() <= maxima.min()
        )
    if kernel.startswith("gated_delta_rule") and float(arguments["heads"].decay.max()) > 0:
        return False
    part = arguments.get("parts", [None])[0]
    if not isinstance(part, GroupedWeight) or not isinstance(part.values, torch.Tensor):
        return True
    return int(part.values.max()) < 16 and float(part.zeros.abs().max()) <= MAX_ZERO


def check(kernel: str) -> int:
    """Make all calls; return how many were neither refused nor right."""
    function, make = KERNELS[kernel]
    native, reference = NativeKernels(), ReferenceKernels()
    native.use_threads(1)
    right = outcome(function, native, make())
    assert not isinstance(right, Exception), right
    assert agree(right, outcome(function, reference, make()))
    num_wrong = 0
    for name, changed in cases(make):
        try:
            arguments = changed()
        except REFUSALS:
            continue  # no such argument can be made
        print(f"{kernel} with {name}", flush=True)
        ours = outcome(function, native, arguments)
        if isinstance(ours, Exception) or not is_defined(kernel, arguments):
            continue
        theirs = outcome(function, reference, changed())
        if isinstance(theirs, Exception) or not agree(ours, theirs):
            num_wrong += 1
            print(f"WRONG: accepted; the reference gives {theirs!r:.200}", flush=True)
    print("done", flush=True)
    return num_wrong


if __name__ == "__main__":
    sys.exit(1 if check(sys.argv[1]) else 0)
