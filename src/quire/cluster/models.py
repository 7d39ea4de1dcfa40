"""Models of several engines behind one router: which one a request names, and which ones there are."""

from __future__ import annotations

import msgspec

from quire.cluster.client_request import ClientRequest
from quire.cluster.engines.registry import DECODERS, Engines
from quire.cluster.engines.upstream import Answer
from quire.cluster.prompts import named_model
from quire.server.wire.answers import ModelList
from quire.server.wire.errors import ApiError, error_shape_of

_MODELS = "/v1/models"


def model_of(request: ClientRequest) -> str:
    """Return the model that a request names, in its path or its body; empty: none."""
    if request.path.startswith(f"{_MODELS}/"):
        return request.path.removeprefix(f"{_MODELS}/")
    return named_model(request.body) if request.scope["method"] == "POST" else ""


def tell_all_models(answer: Answer, request: ClientRequest, engines: Engines) -> None:
    """Have an engine's answer list the models of all engines, if it lists or names its own.

    So it is the engine that checks whether the client may know them.
    """
    if not answer.is_whole or not answer.body:
        return
    if answer.status == 200 and request.path == _MODELS:
        if cards := engines.model_cards():
            answer.body = msgspec.json.encode(ModelList(data=cards))
    elif answer.status == 404 and not engines.of(DECODERS, model := model_of(request)):
        known = ", ".join(repr(card.id) for card in engines.model_cards())
        refusal = ApiError(
            404,
            f"the model {model!r:.80} is not served here; the engines have {known:.1000}",
            param="model",
            code="model_not_found",
        )
        answer.body = refusal.body(error_shape_of(request.scope))
