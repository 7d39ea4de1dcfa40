"""Anthropic's Messages API: a translation over the conversations of `quire.server.calls.conversation`."""
