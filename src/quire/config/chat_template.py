"""The chat template and its limits."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le

from quire.config.fields import check_limits, config, knob


@config
class ChatTemplateConfig:
    """The chat template, a program that comes with the model and runs in a process of its own."""

    chat_template: str = knob(
        default="",
        help="A file with a chat template (jinja2), or its text, in place of the model's own. Empty: the "
        "model's own.",
    )
    chat_template_timeout: Annotated[float, Gt(0), Le(3600)] = knob(
        default=2.0,
        unit="seconds",
        help="Maximum computing time of the chat template for one conversation; one that takes longer is "
        "refused.",
    )
    chat_template_memory: Annotated[int, Ge(16), Le(65536)] = knob(
        default=256,
        unit="MB",
        help="Maximum memory, in MB (10^6 bytes), that the chat template may take for one conversation.",
    )
    special_tokens_in_content: bool = knob(
        default=False,
        help="Let the text of messages, tools and their results make special and other added tokens where it "
        "spells them, as templates do; clients can then begin turns of others. Off: it is ordinary text.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
