"""openai: embeddings, which it asks for in base64."""

from checks import BASE_URL, report
from embedding_checks import FOUND, MODEL, QUESTION, SHORT_SIZE, TEXTS, same_rows
from openai import OpenAI

client = OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)


def rows(texts, **fields):
    answer = client.embeddings.create(model=MODEL, input=texts, **fields)
    return [entry.embedding for entry in answer.data]


def embeddings():
    same_rows(rows(list(TEXTS)), TEXTS)
    same_rows(rows(QUESTION), [QUESTION])
    same_rows(rows(list(TEXTS), encoding_format="float"), TEXTS)


def dimensions():
    same_rows(rows(list(TEXTS), dimensions=SHORT_SIZE), TEXTS, dimensions=SHORT_SIZE)


def search():
    [query], passages = rows(QUESTION), rows(list(TEXTS))
    scores = [sum(a * b for a, b in zip(query, row, strict=True)) for row in passages]
    assert TEXTS[scores.index(max(scores))] == FOUND, scores


report(embeddings=embeddings, dimensions=dimensions, search=search)
