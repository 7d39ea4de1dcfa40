"""Structured output: grammars, their compilation, and the tokens they allow."""
