"""Notations of tool calls: grammars, and reading them."""
