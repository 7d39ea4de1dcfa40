"""Models in GGUF files, the format of llama.cpp: one file holds config, tokenizer and weights."""
