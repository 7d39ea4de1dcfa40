"""What layers with sliding windows save by giving back the KV that they will not read again.

A model of Gemma 3 4B's attention (5 of 6 layers with a window of 1,024 tokens, 4 KV heads of 256 features),
in fewer and narrower layers and with random weights, answers prompts in two engines that take turns: in one,
all layers keep all tokens. For one long prompt and for several shorter ones, each asked twice, and once more
in an engine with too few blocks for all of them: most KV in use, tokens per second, equality of tokens.

    python benchmarks/windows.py [--long 32768] [--short 4096] [--requests 8] [--layers 12] [--output 64]
                                 [--tier 8]

With `--tier`, both engines have a KV tier in memory, which is given the prompts in the first run; before the
second one, the prefix caches are emptied.

With the default sizes, this needs 8 GB of memory and some 10 minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file

from quire import EngineConfig, SamplingParams, SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.memory import plan as memory_plan
from quire.engine.messages import EngineCoreRequest

WINDOW = 1024  # tokens
HIDDEN, INTERMEDIATE, VOCABULARY = 640, 2560, 4096
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 256
STANDARD_DEVIATION = 0.05
BLOCK_SIZE = 16
CHUNK = 1024  # tokens of prompts in a step
GB = 1e9
HEADER = f"{'KV in use':>47}{'prompt/s':>10}{'output/s':>10}{'cached':>10}{'pre':>6}"


def write_model(directory: Path, num_layers: int, max_model_len: int) -> None:
    """Write a checkpoint with random weights."""
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 6,
        "max_position_embeddings": max_model_len,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * STANDARD_DEVIATION).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.zeros(HIDDEN).bfloat16(),
    }
    for number in range(num_layers):
        prefix = f"model.layers.{number}."
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            tensors[f"{prefix}{norm}_layernorm.weight"] = torch.zeros(HIDDEN).bfloat16()
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(heads * HEAD_DIM, HIDDEN)
        for name in ("q", "k"):
            tensors[f"{prefix}self_attn.{name}_norm.weight"] = torch.zeros(HEAD_DIM).bfloat16()
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        tensors[f"{prefix}mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        tensors[f"{prefix}mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    save_file(tensors, directory / "model.safetensors")


@dataclasses.dataclass
class Figures:
    """Of one run of some prompts."""

    answers: list[list[int]]
    kv_bytes: int  # most in use
    prompt_seconds: float  # until all have their first token
    output_seconds: float  # from then on
    num_found: int  # tokens, in the prefix cache or the tier
    num_preemptions: int

    def line(self, name: str, num_prompt_tokens: int) -> str:
        """Return the figures as a line of the report."""
        num_output = sum(map(len, self.answers))
        return (
            f"{name:<34}{self.kv_bytes / GB:8.3f} GB"
            f"{num_prompt_tokens / self.prompt_seconds:10,.0f}"
            f"{num_output / max(self.output_seconds, 1e-9):10,.1f}"
            f"{self.num_found:10,}{self.num_preemptions:6}"
        )


class Engine:
    """An engine in this process."""

    def __init__(
        self, model: Path, *, keeps_all: bool, num_blocks: int, num_requests: int, tier: float
    ) -> None:
        scheduler = SchedulerConfig(
            num_kv_blocks=num_blocks,
            max_num_seqs=num_requests,
            max_num_batched_tokens=CHUNK,
            block_size=BLOCK_SIZE,
            watermark=0.0,
        )
        options: dict[str, Any] = {"kv_tier": "memory", "kv_tier_size": tier, "kv_tier_min_uses": 1}
        config = EngineConfig(model=str(model), scheduler=scheduler, **options if tier else {})
        with mock.patch.object(memory_plan, "keeps_all_tokens", return_value=keeps_all):
            self._core = EngineCore(config, model)
        self._has_tier = tier > 0
        self._num_asked = 0

    def run(self, prompts: list[list[int]], num_output: int) -> Figures:
        """Answer prompts together."""
        core = self._core
        if self._has_tier:
            core.scheduler.reset_prefix_cache()
        before = core.scheduler.make_stats()
        answers: dict[str, list[int]] = {}
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        for prompt in prompts:
            name = str(self._num_asked)
            self._num_asked += 1
            answers[name] = []
            core.add(EngineCoreRequest([name], [self._num_asked], prompt, params))
        started, first, most = time.perf_counter(), 0.0, 0
        while core.has_unfinished_requests():
            for output in core.step()[0]:
                answers[output.request_id] += output.new_token_ids
            most = max(most, self._kv_bytes())
            if not first and all(answers.values()):
                first = time.perf_counter()
        ended, after = time.perf_counter(), core.scheduler.make_stats()
        return Figures(
            list(answers.values()),
            most,
            first - started,
            ended - first,
            after.prefix_hit_tokens
            - before.prefix_hit_tokens
            + after.num_loaded_tokens
            - before.num_loaded_tokens,
            after.num_preemptions - before.num_preemptions,
        )

    def _kv_bytes(self) -> int:
        counts = self._core.scheduler.accounts.kv.pools.num_in_use
        caches = self._core.runner.kv_caches
        return sum(
            count * cache.metadata.bytes_per_block for count, cache in zip(counts, caches, strict=True)
        )

    def shutdown(self) -> None:
        """Free the engine's memory."""
        self._core.shutdown()


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, (count, length)).tolist()


def compare(model: Path, prompts: list[list[int]], num_output: int, *, is_short: bool, tier: float) -> bool:
    """Report on both engines, which have blocks for all answers or little more than the prompts need.

    Returns:
        Whether tokens were equal.
    """
    num_tokens = sum(len(prompt) + (0 if is_short else num_output) for prompt in prompts)
    num_blocks = -(-num_tokens // BLOCK_SIZE) + len(prompts)
    sizes: dict[str, Any] = {"num_blocks": num_blocks, "num_requests": len(prompts), "tier": tier}
    names = {"all tokens kept": True, "windows give back": False}
    engines = {name: Engine(model, keeps_all=keeps, **sizes) for name, keeps in names.items()}
    num_prompt_tokens = sum(map(len, prompts))
    found = []
    for engine in engines.values():
        engine.run(prompts_of(1, CHUNK, seed=1), 4)  # warms up
    for turn in ("too few blocks",) if is_short else ("once", "again"):
        for name, engine in engines.items():
            found.append(engine.run(prompts, num_output))
            print("  " + found[-1].line(f"{name}, {turn}", num_prompt_tokens), flush=True)
    for engine in engines.values():
        engine.shutdown()
    return all(figures.answers == found[0].answers for figures in found)


def main() -> int:
    """Print the report; the status is 1 if tokens differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--long", type=int, default=32768, help="tokens of the one long prompt")
    parser.add_argument("--short", type=int, default=4096, help="tokens of each shorter one")
    parser.add_argument("--requests", type=int, default=8, help="how many shorter ones run together")
    parser.add_argument("--layers", type=int, default=12, help="of the model, every sixth without a window")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--tier", type=float, default=0.0, help="size of a KV tier in GB; 0: there is none")
    options = parser.parse_args()
    one, several = prompts_of(1, options.long, 2), prompts_of(options.requests, options.short, 3)
    is_same = True
    with tempfile.TemporaryDirectory() as made:
        model = Path(made)
        write_model(model, options.layers, max(options.long, options.short) + options.output)
        for title, prompts, is_short in (
            (f"one prompt of {options.long:,} tokens", one, False),
            (f"{options.requests} prompts of {options.short:,} tokens", several, False),
            (f"{options.requests} prompts of {options.short:,} tokens, preempted", several, True),
        ):
            print(f"{title}\n{HEADER}")
            same = compare(model, prompts, options.output, is_short=is_short, tier=options.tier)
            print("  tokens are equal" if same else "  TOKENS DIFFER")
            is_same &= same
    return 0 if is_same else 1


if __name__ == "__main__":
    raise SystemExit(main())
