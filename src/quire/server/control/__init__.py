"""Administration: live requests, the prefix cache, tokenization, held KV, and the page."""
