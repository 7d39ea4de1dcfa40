"""Administration: live requests, the prefix cache, held KV, and the page."""
