"""The cost of lower precision: logits of small random models, compared with float32 on the same weights.

The models are those of the tests, but wider; prompts are random tokens. Random weights have no large
outliers, so the figures only compare the formats with each other; `quire eval` shows what a trained model
loses. With --gguf, also files of Q8_0 and Q4_0, compared with float32 on the dequantized weights; this needs
the `gguf` package.

    python benchmarks/quality.py [--families qwen3 llama] [--tokens 256] [--gguf]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kv import PagedAttentionCache, PagedAttentionCacheMetaData
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent / "tests" / part)
    for part in ("support", "models", "models/checkpoints")
]

BLOCK_SIZE = 16
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A weight and KV format."""

    name: str
    dtype: str = "bfloat16"
    quantization: str = "none"
    group_size: int = 128
    int4_activations: str = "int8"
    kv_dtype: str = "bfloat16"


EXACT = Kind("float32", dtype="float32", kv_dtype="float32")
KINDS = (
    Kind("bfloat16"),
    Kind("int8", quantization="int8"),
    Kind("int4, groups of 32", quantization="int4", group_size=32),
    Kind("int4, groups of 128", quantization="int4"),
    Kind(
        "int4 times bfloat16, groups of 32", quantization="int4", group_size=32, int4_activations="bfloat16"
    ),
    Kind("int4 times bfloat16, groups of 128", quantization="int4", int4_activations="bfloat16"),
    Kind("bfloat16, int8 KV", kv_dtype="int8"),
    Kind("bfloat16, int4 KV", kv_dtype="int4"),
    Kind("int8, int8 KV", quantization="int8", kv_dtype="int8"),
)


def compute_logits(path: Path, kind: Kind, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [T, vocab] after each token of one prompt."""
    config = read_model_config(path)
    options = WeightOptions(
        dtype=kind.dtype,
        quantization=kind.quantization,
        group_size=kind.group_size,
        int4_activations=kind.int4_activations,
    )
    decoder = load_decoder(path, config, options=options)
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    metadata = PagedAttentionCacheMetaData.for_layers(
        config.kv_layers, page_size=BLOCK_SIZE, dtype=kind.kv_dtype, num_pages=num_blocks
    )
    kv_cache = PagedAttentionCache.init_cache(None, metadata)
    table = np.arange(num_blocks, dtype=np.int32)[None]
    batch = AttentionBatch.build(np.array([0]), np.array([len(token_ids)]), table, BLOCK_SIZE)
    return decoder.logits(decoder.forward(token_ids, kv_cache.views, batch)).clone()


def report(name: str, logits: torch.Tensor, exact: torch.Tensor) -> None:
    """Print one row: errors relative to the standard deviation of the exact logits, and KL divergence."""
    error = (logits - exact).abs() / exact.std()
    divergence = torch.nn.functional.kl_div(
        logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
    print(
        f"| {name:22} | {error.mean():8.2%} | {error.max():7.1%} | {divergence.mean():9.5f} | "
        f"{divergence.max():8.4f} | {same:9.1%} |"
    )


def print_head(title: str) -> None:
    """Print the header of a table."""
    print(f"\n{title}\n")
    print("| format                 | mean err | max err | mean KL   | max KL   | same best |")
    print("|---|---|---|---|---|---|")


def compare_family(family: str, directory: Path, token_ids: torch.Tensor) -> None:
    """Print a family's table."""
    from checkpoints import make_checkpoint

    path = make_checkpoint(family, directory / family, **SHAPE)
    exact = compute_logits(path, EXACT, token_ids)
    print_head(f"{family}: errors of logits relative to their standard deviation, divergences in nats")
    for kind in KINDS:
        report(kind.name, compute_logits(path, kind, token_ids), exact)


def compare_gguf(directory: Path, token_ids: torch.Tensor) -> None:
    """Print the rows of GGUF files, compared with float32 on their dequantized weights."""
    from gguf_checkpoints import write_gguf

    from checkpoints import make_checkpoint

    print_head("GGUF files, compared with float32 on their dequantized weights")
    for form in ("Q8_0", "Q4_0"):
        path = make_checkpoint("qwen3", directory / form, **SHAPE)
        file, twin = write_gguf(path, "qwen3", form)
        exact = compute_logits(twin, EXACT, token_ids)
        for activations in ("int8", "bfloat16"):
            kind = Kind(f"{form} times {activations}", int4_activations=activations)
            report(kind.name, compute_logits(file, kind, token_ids), exact)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--families", nargs="+", default=["qwen3", "llama", "gemma", "mixtral"])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--gguf", action="store_true")
    arguments = parser.parse_args()
    token_ids = torch.from_numpy(np.random.default_rng(0).integers(3, 384, arguments.tokens))
    with tempfile.TemporaryDirectory() as directory:
        for family in arguments.families:
            compare_family(family, Path(directory), token_ids)
        if arguments.gguf:
            compare_gguf(Path(directory), token_ids)


if __name__ == "__main__":
    main()
