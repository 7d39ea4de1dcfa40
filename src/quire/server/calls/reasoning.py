"""Reasoning options of a body, and the chat template variables for them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from quire.dialogue.formats import uses_name
from quire.dialogue.reasoning.formats import ReasoningFormat
from quire.errors import InvalidRequestError
from quire.server.wire.leniency import Leniency

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_EFFORTS = typing.get_args(ReasoningEffort)  # in ascending order
_SWITCHES = ("enable_thinking", "thinking")


@dataclasses.dataclass(frozen=True, slots=True)
class Thinking:
    """How the model should reason before it answers.

    Args:
        is_on: whether it reasons; None: the chat template's default.
        effort: reasoning effort; None: the chat template's default.
        template_kwargs: variables for the chat template, which override the effort.
        is_shown: whether the client gets the reasoning.
        budget: maximum number of reasoning tokens; None: unlimited.
    """

    is_on: bool | None = None
    effort: ReasoningEffort | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_shown: bool = True
    budget: int | None = None

    def variables(self, template: str, reasoning_format: ReasoningFormat | None = None) -> dict[str, Any]:
        """Return the variables for a chat template.

        These are switches that turn reasoning on or off and `reasoning_effort`, if the template uses their
        names. An effort that models of `reasoning_format` do not know is replaced by the nearest one.
        """
        variables: dict[str, Any] = {}
        if self.is_on is not None:
            variables = {name: self.is_on for name in _SWITCHES if uses_name(template, name)}
        effort = None if self.effort == "none" and variables else self.effort
        if effort is not None and uses_name(template, "reasoning_effort"):
            known = () if reasoning_format is None else reasoning_format.efforts
            variables["reasoning_effort"] = _nearest(effort, known)
        return {**variables, **self.template_kwargs}

    def note_effort_without_effect(
        self, template: str, leniency: Leniency, *, can_think: bool, param: str = "reasoning_effort"
    ) -> None:
        """Report an effort that the chat template does not use.

        Args:
            template: chat template of the model.
            leniency: collects ignored fields.
            can_think: whether the model is known to reason.
            param: path of the field with the effort.

        Raises:
            InvalidRequestError: the server is strict.
        """
        asks_for_nothing = self.effort is None or (self.effort == "none" and not can_think)
        if asks_for_nothing or any(uses_name(template, name) for name in (*_SWITCHES, "reasoning_effort")):
            return
        _note(param, f"is {self.effort!r}", leniency)

    def note_switch_without_effect(
        self, template: str, leniency: Leniency, *, can_think: bool, param: str
    ) -> None:
        """Report a request to reason if the model is not known to and its template has no switch.

        The arguments are those of `note_effort_without_effect`.

        Raises:
            InvalidRequestError: the server is strict.
        """
        if self.is_on and not can_think and not any(uses_name(template, name) for name in _SWITCHES):
            _note(param, "turns reasoning on", leniency)


def _note(param: str, problem: str, leniency: Leniency) -> None:
    if leniency.is_strict:
        raise InvalidRequestError(
            f"{param} {problem}, which is not supported by the model's chat template; leave it out",
            param=param,
        )
    leniency.ignore(param)


def _nearest(effort: ReasoningEffort, known: Sequence[str]) -> str:
    """Return the effort in `known` that is nearest to `effort`; itself if `known` is empty."""
    return min(known, key=lambda one: abs(_EFFORTS.index(one) - _EFFORTS.index(effort)), default=effort)
