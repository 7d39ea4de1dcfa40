"""Notations of tool calls: grammars and readers."""
