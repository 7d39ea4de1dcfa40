"""OpenAI's Files and Batch API on a local disk: files of requests that are answered when there is room."""
