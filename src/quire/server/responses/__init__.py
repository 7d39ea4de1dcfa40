"""OpenAI's Responses API: a translation over the conversations of `quire.server.calls.conversation`."""
