"""The `options` of Ollama's bodies."""

from __future__ import annotations

from typing import Any

from pydantic import Field, create_model

from quire.limits import limits_of
from quire.sampling_params import SamplingParams
from quire.server.openai.bodies import Stop
from quire.server.wire.leniency import Leniency
from quire.server.wire.other_names import take_other_values
from quire.server.wire.strict_model import Ignored, StrictModel, body_fields, optional_field

OWN_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Fields of `SamplingParams` by Ollama's names."""

_SHARED_FIELDS = body_fields(SamplingParams, exclude=limits_of(SamplingParams).keys() - OWN_NAMES.values())

_SampledOptions = create_model(
    "_SampledOptions",
    __base__=StrictModel,
    **{name: _SHARED_FIELDS[own_name] for name, own_name in OWN_NAMES.items()},
)


class OllamaOptions(_SampledOptions):  # type: ignore[valid-type, misc]
    """Sampling and stop options; options for loading models have no effect."""

    path_prefix = "options."

    num_predict: int | None = Field(
        None, description="Maximum number of output tokens. Not above 0: as many as fit."
    )
    stop: Stop | None = optional_field(SamplingParams, "stop")
    draft_num_predict: Ignored = None
    embedding_only: Ignored = None
    f16_kv: Ignored = None
    logits_all: Ignored = None
    low_vram: Ignored = None
    main_gpu: Ignored = None
    mirostat: Ignored = None
    mirostat_eta: Ignored = None
    mirostat_tau: Ignored = None
    num_batch: Ignored = None
    num_ctx: Ignored = None
    num_gpu: Ignored = None
    num_keep: Ignored = None
    num_thread: Ignored = None
    numa: Ignored = None
    penalize_newline: Ignored = None
    repeat_last_n: Ignored = None
    tfs_z: Ignored = None
    typical_p: Ignored = None
    use_mlock: Ignored = None
    use_mmap: Ignored = None
    vocab_only: Ignored = None

    @classmethod
    def adapt(cls, values: dict[str, Any], leniency: Leniency) -> None:
        """Convert values for which Quire has another form."""
        take_other_values(values)
        if values.get("seed") == -1:
            values["seed"] = None

    def sampling_fields(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that were given."""
        fields = {own_name: getattr(self, name) for name, own_name in OWN_NAMES.items()}
        fields["stop"] = self.stop
        if self.num_predict is not None and self.num_predict > 0:
            fields["max_tokens"] = self.num_predict
        return {name: value for name, value in fields.items() if value is not None}
