"""Scores of labels and of pairs of texts, in vLLM's, Jina's and Cohere's shapes."""
