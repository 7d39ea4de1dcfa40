"""Chroma: a collection in memory whose embedding function is the server."""

import chromadb
from checks import BASE_URL, report, same
from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction
from embedding_checks import FOUND, MODEL, QUESTION, TEXTS, same_rows

function = OpenAIEmbeddingFunction(model_name=MODEL, api_base=BASE_URL, api_key="none")


def embeddings():
    same_rows([row.tolist() for row in function(list(TEXTS))], TEXTS)


def search():
    collection = chromadb.Client().create_collection("texts", embedding_function=function)
    collection.add(documents=list(TEXTS), ids=[str(number) for number in range(len(TEXTS))])
    same(collection.query(query_texts=[QUESTION], n_results=1)["documents"], [[FOUND]])


report(embeddings=embeddings, search=search)
