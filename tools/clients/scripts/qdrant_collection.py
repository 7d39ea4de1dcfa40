"""Qdrant: a collection in memory, with rows from openai's client in place of fastembed's."""

from checks import BASE_URL, report, same
from embedding_checks import FOUND, MODEL, QUESTION, SIZE, TEXTS, same_rows
from openai import OpenAI
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, PointStruct, VectorParams

openai = OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)


def rows(*texts):
    return [entry.embedding for entry in openai.embeddings.create(model=MODEL, input=list(texts)).data]


def collection():
    client = QdrantClient(":memory:")
    client.create_collection("texts", vectors_config=VectorParams(size=SIZE, distance=Distance.COSINE))
    points = [PointStruct(id=i, vector=row, payload={"text": TEXTS[i]}) for i, row in enumerate(rows(*TEXTS))]
    client.upsert("texts", points)
    return client


def embeddings():
    kept = collection().retrieve("texts", list(range(len(TEXTS))), with_vectors=True)
    same_rows([point.vector for point in kept], TEXTS)


def search():
    [query] = rows(QUESTION)
    [found] = collection().query_points("texts", query=query, limit=1).points
    same(found.payload["text"], FOUND)


report(embeddings=embeddings, search=search)
