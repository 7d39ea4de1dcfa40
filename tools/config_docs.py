"""Write docs/configuration.md from the fields of the configuration classes.

python tools/config_docs.py            writes the page
python tools/config_docs.py --check    fails if the page is not current
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from pathlib import Path
from typing import Any

from generated import write_or_check
from quire.cli.options import PANELS, config_fields
from quire.limits import Limits
from quire.pooling_params import PoolingParams
from quire.structured_outputs import StructuredOutputsParams

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Written by tools/config_docs.py from the classes' fields; edit those, then run it. -->

Every setting of Quire is a field of one of these classes: a keyword argument in Python, a flag on the command
line. `SchedulerConfig(max_num_seqs=8)` is `--max-num-seqs 8`. An unknown name is an error, which suggests the
nearest known name. Of the environment, `quire serve` and `quire route` read `QUIRE_API_KEY`,
`QUIRE_API_KEYS_FILE` and `QUIRE_ENGINE_API_KEY`, if their flags are not given.

- `LLM(model, **options)` and `AsyncLLM(EngineConfig(...))` take the fields of `EngineConfig` and its parts.
- Every command that runs a model has these as flags. `quire serve` adds those of `ServerConfig`,
  `ConnectionConfig`, `EdgeConfig` and `BatchConfig`, and its default of `standby_engine` is on;
  `quire generate` and `quire chat` add those of `SamplingParams`, with a default temperature of 0;
  `quire kv save` has a tier in memory by default (`kv_tier`), and `quire kv restore` one on disk.
- The fields of `TenantConfig` stand in the file of `--api-keys-file` ([tenants.md](tenants.md)).
- `quire route` has those of `RouterConfig`, `ConnectionConfig` and `EdgeConfig` only
  ([many-machines.md](many-machines.md)).
- On Ray Serve, `quire.ray` takes the fields of these and of `RayConfig`
  ([many-machines.md](many-machines.md#ray-serve)).
- A worker of NVIDIA Dynamo, `quire.dynamo`, takes those of `EngineConfig` and of `DynamoConfig`
  ([many-machines.md](many-machines.md#nvidia-dynamo)).
- `WorkloadConfig`, `ArrivalConfig`, `TargetConfig` and `LatencyConfig` are for `quire bench`
  ([bench.md](bench.md)).
- The flags of `CacheEvictionConfig` begin with `--eviction-`, those of `KVCrushConfig` with `--kvcrush-`,
  those of `AdaptiveRKVConfig` with `--adaptive-rkv-`, and those of `SparseAttentionConfig` with `--sparse-`.
- `structured_outputs` is a class itself; its flag takes JSON: `--structured-outputs '{"regex": "[0-9]+"}'`.
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join(
        [INTRODUCTION, *(section(cls) for cls in (*PANELS, StructuredOutputsParams, PoolingParams))]
    )


def section(cls: type) -> str:
    """Return the heading, the description and the table of one class."""
    rows = [row(field, limits) for owner, field, limits in config_fields(cls) if owner is cls]
    description, _, _ = inspect.cleandoc(cls.__doc__ or "").partition("\n\nRaises:")
    heading = f"## {cls.__name__}"
    table = ["| field | type | default | limits | unit | meaning |", "|---|---|---|---|---|---|", *rows]
    return "\n".join([heading, "", description, "", *table, ""])


def row(field: dataclasses.Field[Any], limits: Limits) -> str:
    """Return one field's row."""
    cells = [
        f"`{field.name}`",
        " or ".join(f"`{part}`" for part in type_name(limits).split(" | ")),
        default_of(field),
        limits_text(limits),
        limits.unit,
        field.metadata["help"],
    ]
    return f"| {' | '.join(map(cell, cells))} |"


def type_name(limits: Limits) -> str:
    """Return the type as an annotation, without module names."""
    kind = limits.kind
    name = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", name) + " | None" * limits.is_optional


def limits_text(limits: Limits) -> str:
    """Return the choices, the range or the maximum length of a field."""
    choices = [f"`{choice}`" for choice in limits.choices if choice != ""]
    if limits.takes_dotted_names:
        choices.append("a dotted name")
    length = f"at most {limits.bounds['max_length']:,}" if "max_length" in limits.bounds else ""
    return ", ".join(choices) or limits.range or length


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as code."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return f"`{value.value!r}`" if isinstance(value, enum.Enum) else f"`{value!r}`"


def cell(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    raise SystemExit(write_or_check(PAGE, page()))
