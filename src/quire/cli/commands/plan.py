"""`quire plan`: the memory plan of a model, before anything is allocated."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.options import config_options
from quire.config import EngineConfig
from quire.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from quire.engine.memory.plan import MemoryPlan
    from quire.engine.memory.state_sizes import StateSizes

SHORT_LENGTHS = (512, 2048, 8192, 32768, 131072)


@config_options(positional=("model",), engine=EngineConfig)
def plan(
    engine: EngineConfig,
    *,
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GB", help="Available memory to plan for, per GPU if any. Default: this machine's."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show how much memory MODEL would need with these options.

    Lists the memory for weights, activations and KV cache, the number of KV blocks, and how many sequences
    of which length can run at once. Nothing is allocated and no weights are read: config.json is enough.

    Examples:
      quire plan
      quire plan ./Qwen3-0.6B --cache-size 2
      quire plan Qwen/Qwen3-0.6B --memory 16 --dtype bfloat16 --json
    """
    from quire.engine.building.assembly import config_for_model, engine_model
    from quire.engine.building.drafting import find_draft_model
    from quire.engine.devices import on_cpu, on_cuda, on_one_device
    from quire.engine.memory.byte_sizes import GB
    from quire.engine.memory.plan import plan_memory
    from quire.models.checkpoints.hub import resolve_model

    if memory is not None and not 0 < memory < math.inf:
        raise ConfigError(f"--memory is {memory}; it must be a positive number of GB")
    available = None if memory is None else int(memory * GB)
    path = resolve_model(engine.model, weights=False, revision=engine.revision)
    model = engine_model(engine, path)
    engine = config_for_model(engine, model)
    if available is None or engine.device == "auto":  # else this machine's devices do not matter
        engine = on_one_device(engine)
    else:
        engine = on_cpu(engine) if engine.device == "cpu" else on_cuda(engine, gpu_bytes=available)
    draft = find_draft_model(engine, model, path, weights=False)
    result = plan_memory(
        engine, model, draft_model=None if draft is None else draft.config, available_bytes=available
    )
    if as_json:
        plan_data = as_dict(engine.model, model.architecture, result)
        typer.echo(json.dumps({**plan_data, "device": engine.device, **transfer_options(engine)}, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(memory_table(engine.model, model.architecture, result, engine.device))
    console.print(sequence_table(result))
    if engine.shares_kv:
        console.print(transfer_line(engine, result))


_PLAN_FIELDS = (
    "dtype", "quantization", "kv_dtype", "num_parameters", "weight_bytes", "activation_bytes",
    "available_bytes", "kv_bytes_per_token", "block_size", "num_blocks", "max_num_seqs", "max_model_len",
    "model_max_len", "num_ranks", "kv_bytes_per_block", "kv_bytes", "num_kv_tokens", "score_bytes",
    "staged_bytes", "total_bytes",
)  # fmt: skip


def transfer_options(engine: EngineConfig) -> dict[str, str]:
    """Return the engine's role in KV transfers, as plain data."""
    if not engine.shares_kv:
        return {}
    transfer = engine.kv_transfer
    return {"role": engine.role, "kv_transports": transfer.kv_transports, "kv_peers": transfer.kv_peers}


def transfer_line(engine: EngineConfig, plan: MemoryPlan) -> str:
    """Describe the engine's role in KV transfers, and the transports."""
    from quire.engine.memory.byte_sizes import format_bytes

    what = {
        "prefill": "lends the KV of prompts",
        "decode": "reads the KV of prompts from peers",
        "both": "shares the KV of cached prompts with peers",
    }[engine.role]
    transports = engine.kv_transfer.kv_transports.replace(",", ", ")
    size = format_bytes(plan.kv_bytes_per_token * 1000 * plan.num_ranks)
    ranks = "" if plan.num_ranks == 1 else f" of all {plan.num_ranks} ranks"
    return (
        f"Role {engine.role}: {what}, {size} for 1,000 tokens{ranks}, by the first that works of {transports}"
    )


def shown_lengths(plan: MemoryPlan) -> list[int]:
    """Return the sequence lengths to show, in tokens: round ones, and the maximum."""
    return [*(length for length in SHORT_LENGTHS if length < plan.max_model_len), plan.max_model_len]


def as_dict(name: str, architecture: str, plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan as plain data: its sizes, and sizes derived from them."""
    return {
        "model": name,
        "architecture": architecture,
        **{name: getattr(plan, name) for name in _PLAN_FIELDS},
        **({"window_groups": window_groups(plan)} if plan.windows else {}),
        **({"states": state_sizes(plan.states)} if plan.states is not None else {}),
        "max_sequences": {str(length): plan.max_sequences_at(length) for length in shown_lengths(plan)},
    }


def window_groups(plan: MemoryPlan) -> list[dict[str, int]]:
    """Return the sizes of the cache groups that keep the last tokens of a sequence only, as plain data."""
    return [
        {
            "window": window,
            "num_layers": sum(spec is not None for spec in cache.layers),
            "num_blocks": cache.num_pages_per_layer,
            "kv_bytes_per_block": cache.bytes_per_block,
            "kv_bytes": cache.num_pages_per_layer * cache.bytes_per_block,
        }
        for window, cache in zip(plan.windows, plan.kv_caches[1:], strict=True)
    ]


def state_sizes(states: StateSizes) -> dict[str, int]:
    """Return the sizes of the states of recurrent layers, as plain data."""
    return {
        "num_slots": states.num_slots,
        "num_checkpoints": states.num_checkpoints,
        "bytes_per_state": states.layout.bytes_per_state,
        "state_bytes": states.total_bytes,
    }


def memory_table(name: str, architecture: str, plan: MemoryPlan, device: str) -> Table:
    """Return the table of `device`'s memory by use."""
    from quire.engine.memory.byte_sizes import format_bytes

    ranks = "" if plan.num_ranks == 1 else f", each of {plan.num_ranks} ranks"
    title = f"Memory plan of {name} ({architecture}, {plan.dtype}{ranks})"
    table = _table(title, "", "size", "details", right=("size",))
    rows = [
        ("Weights", plan.weight_bytes, f"{plan.num_parameters:,} parameters, {plan.weight_type}"),
        ("Activations", plan.activation_bytes, "temporary tensors of the largest step, estimated"),
        ("KV cache", plan.kv_bytes, f"{plan.num_blocks:,} blocks, {plan.num_kv_tokens:,} tokens"),
    ]
    for group in window_groups(plan):
        details = f"of it, {group['num_blocks']:,} blocks for {group['num_layers']} layers"
        rows.append((f"  window {group['window']:,}", group["kv_bytes"], details))
    if plan.states is not None:
        details = f"{plan.states.num_slots:,} of sequences, {plan.states.num_checkpoints:,} checkpoints"
        rows.append(("States", plan.state_bytes, details))
    if plan.score_bytes:
        rows.append(("Scores", plan.score_bytes, "of cache eviction, at most"))
    if plan.staged_bytes:
        rows.append(("KV tier", plan.staged_bytes, "staging on the device, and as much pinned memory"))
    for label, size, explanation in rows:
        table.add_row(label, format_bytes(size), explanation)
    table.add_section()
    table.add_row("Total", format_bytes(plan.total_bytes), f"{_share(plan)} of the available memory")
    of_device = "free memory of the GPU" if device == "cuda" else "free memory, within the cgroup's limit"
    table.add_row("Available", format_bytes(plan.available_bytes), of_device)
    table.add_section()
    explanation = f"keys and values of all layers, {plan.kv_dtype}"
    table.add_row("KV per token", format_bytes(plan.kv_bytes_per_token), explanation)
    if plan.windows:
        kept = plan.group_sizes.bytes_per_block[0] // plan.block_size
        table.add_row("  before windows", format_bytes(kept), "layers without a window alone")
    table.add_row("KV per block", format_bytes(plan.kv_bytes_per_block), f"{plan.block_size} tokens")
    return table


def sequence_table(plan: MemoryPlan) -> Table:
    """Return the table of how many sequences of each length can run at once."""
    table = _table(
        "Concurrent sequences", "tokens each", "sequences", "limited by", right=("tokens each", "sequences")
    )
    for length in shown_lengths(plan):
        count = plan.max_sequences_at(length)
        limit = "--max-num-seqs" if count == plan.max_num_seqs else "KV blocks"
        table.add_row(f"{length:,}", f"{count:,}", limit)
    if plan.max_model_len < plan.model_max_len:
        table.caption = f"the model supports {plan.model_max_len:,} tokens"
    return table


def _share(plan: MemoryPlan) -> str:
    return f"{plan.total_bytes / plan.available_bytes:.0%}" if plan.available_bytes else "all"


def _table(title: str, *columns: str, right: tuple[str, ...]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, caption_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table
