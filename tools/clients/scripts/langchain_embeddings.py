"""langchain-openai: OpenAIEmbeddings, told not to send ids of OpenAI's tokenizer, and the core's store."""

from checks import BASE_URL, report, same
from embedding_checks import FOUND, MODEL, QUESTION, SHORT_SIZE, TEXTS, same_rows
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings

fields = {
    "model": MODEL, "base_url": BASE_URL, "api_key": "none", "max_retries": 0,
    "check_embedding_ctx_length": False,
}  # fmt: skip
model = OpenAIEmbeddings(**fields)


async def embeddings():
    same_rows(model.embed_documents(list(TEXTS)), TEXTS)
    same_rows([await model.aembed_query(QUESTION)], [QUESTION])


def dimensions():
    short = OpenAIEmbeddings(**fields, dimensions=SHORT_SIZE)
    same_rows(short.embed_documents(list(TEXTS)), TEXTS, dimensions=SHORT_SIZE)


def search():
    store = InMemoryVectorStore.from_texts(list(TEXTS), model)
    same(store.similarity_search(QUESTION, k=1)[0].page_content, FOUND)


report(embeddings=embeddings, dimensions=dimensions, search=search)
