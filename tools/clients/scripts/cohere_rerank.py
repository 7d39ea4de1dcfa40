"""cohere: ClientV2.rerank."""

import json
import urllib.request

import cohere
from checks import URL, report, same
from embedding_checks import QUESTION, TEXTS

client = cohere.ClientV2(api_key="none", base_url=URL)


def rerank():
    body = json.dumps({"model": "reranker", "text_1": QUESTION, "text_2": TEXTS}).encode()
    asked = urllib.request.Request(f"{URL}/v1/score", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        scores = [entry["score"] for entry in json.load(answer)["data"]]
    best = sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    found = client.rerank(model="reranker", query=QUESTION, documents=list(TEXTS))
    same([(one.index, one.relevance_score) for one in found.results], [(i, scores[i]) for i in best])
    found = client.rerank(model="reranker", query=QUESTION, documents=list(TEXTS), top_n=1)
    same([one.index for one in found.results], best[:1])


report(rerank=rerank)
