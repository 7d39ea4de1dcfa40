"""The endpoints of scores, under the names that other servers have for them."""

from __future__ import annotations

from quire.server.scores.calls import (
    ClassifyRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    classify,
    pooling,
    rerank,
    score,
)
from quire.server.scores.tei import embed, predict
from quire.server.scores.tei_bodies import TEI_ERRORS, EmbedRequest, Prediction, PredictRequest, RerankError
from quire.server.wire.answers import Classifications, PairScores, PooledRows, RankedDocuments
from quire.server.wire.openapi import GENERATION_ERRORS, Endpoint

SCORE_ENDPOINTS = (
    *(
        Endpoint("POST", path, classify, Classifications, body=ClassifyRequest, errors=GENERATION_ERRORS)
        for path in ("/v1/classify", "/classify")
    ),
    *(
        Endpoint("POST", path, score, PairScores, body=ScoreRequest, errors=GENERATION_ERRORS)
        for path in ("/v1/score", "/score")
    ),
    *(
        Endpoint(
            "POST",
            path,
            rerank,
            RankedDocuments,
            body=RerankRequest,
            errors=GENERATION_ERRORS,
            failure=RerankError,
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    Endpoint(
        "POST",
        "/embed",
        embed,
        None,
        body=EmbedRequest,
        media_type="application/json",
        answers_list=True,
        errors=GENERATION_ERRORS,
        error_shape=TEI_ERRORS,
    ),
    Endpoint(
        "POST",
        "/predict",
        predict,
        Prediction,
        body=PredictRequest,
        answers_list=True,
        errors=GENERATION_ERRORS,
        error_shape=TEI_ERRORS,
    ),
    Endpoint("POST", "/pooling", pooling, PooledRows, body=PoolingRequest, errors=GENERATION_ERRORS),
)
