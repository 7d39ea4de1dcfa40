"""llama-index: OpenAILikeEmbedding, and the index of the core."""

from checks import BASE_URL, report, same
from embedding_checks import FOUND, MODEL, QUESTION, SHORT_SIZE, TEXTS, same_rows
from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

fields = {"model_name": MODEL, "api_base": BASE_URL, "api_key": "none", "max_retries": 0}
model = OpenAILikeEmbedding(**fields)


def embeddings():
    same_rows(model.get_text_embedding_batch(list(TEXTS)), TEXTS)
    same_rows([model.get_query_embedding(QUESTION)], [QUESTION])


def dimensions():
    short = OpenAILikeEmbedding(**fields, dimensions=SHORT_SIZE)
    same_rows(short.get_text_embedding_batch(list(TEXTS)), TEXTS, dimensions=SHORT_SIZE)


def search():
    index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS], embed_model=model)
    [found] = index.as_retriever(similarity_top_k=1).retrieve(QUESTION)
    same(found.text, FOUND)


report(embeddings=embeddings, dimensions=dimensions, search=search)
