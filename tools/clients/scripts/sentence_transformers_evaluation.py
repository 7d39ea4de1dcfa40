"""sentence-transformers: a model whose only module asks the server, and two of the package's evaluators."""

import random

import torch
from checks import BASE_URL, report
from embedding_checks import MODEL, QUESTION, SIZE, TEXTS, same_rows
from evaluation_checks import JUDGED, PASSAGES, QUERIES, rows_of_library, same_scores
from openai import OpenAI
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)

client = OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)


class Rows(InputModule):
    """A module whose embeddings of texts are what a function returns."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def preprocess(self, inputs, prompt=None, **options):
        return {"texts": [(prompt or "") + text for text in inputs]}

    def forward(self, features):
        return {"sentence_embedding": torch.tensor(self.function(features["texts"]))}

    def save(self, output_path, *arguments, **options):
        raise NotImplementedError


def served(texts):
    return [entry.embedding for entry in client.embeddings.create(model=MODEL, input=texts).data]


def by_chance(texts):
    return [[random.gauss(0, 1) for _ in range(SIZE)] for _ in texts]


def scores(function):
    model = SentenceTransformer(modules=[Rows(function)])
    queries, passages = ({str(i): text for i, text in enumerate(texts)} for texts in (QUERIES, PASSAGES))
    retrieval = InformationRetrievalEvaluator(queries, passages, {name: {name} for name in queries})
    similarity = EmbeddingSimilarityEvaluator(*zip(*JUDGED, strict=True))
    return [evaluator(model)[evaluator.primary_metric] for evaluator in (retrieval, similarity)]


def embeddings():
    model = SentenceTransformer(modules=[Rows(served)])
    same_rows(model.encode(list(TEXTS)).tolist(), TEXTS)
    same_rows([model.encode(QUESTION).tolist()], [QUESTION])


def evaluation():
    rows = rows_of_library()
    random.seed(0)
    same_scores(scores(served), scores(lambda texts: [rows[text] for text in texts]), scores(by_chance))


report(embeddings=embeddings, evaluation=evaluation)
