"""haystack: OpenAITextEmbedder, OpenAIDocumentEmbedder, and the store in memory."""

from checks import BASE_URL, report, same
from embedding_checks import FOUND, MODEL, QUESTION, SHORT_SIZE, TEXTS, same_rows
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret

fields = {"model": MODEL, "api_base_url": BASE_URL, "api_key": Secret.from_token("none"), "max_retries": 0}


def embedded(**more):
    documents = [Document(content=text) for text in TEXTS]
    return OpenAIDocumentEmbedder(**fields, progress_bar=False, **more).run(documents)["documents"]


def query():
    return OpenAITextEmbedder(**fields).run(QUESTION)["embedding"]


def embeddings():
    same_rows([document.embedding for document in embedded()], TEXTS)
    same_rows([query()], [QUESTION])


def dimensions():
    rows = [document.embedding for document in embedded(dimensions=SHORT_SIZE)]
    same_rows(rows, TEXTS, dimensions=SHORT_SIZE)


def search():
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    store.write_documents(embedded())
    [found] = InMemoryEmbeddingRetriever(store, top_k=1).run(query_embedding=query())["documents"]
    same(found.content, FOUND)


report(embeddings=embeddings, dimensions=dimensions, search=search)
