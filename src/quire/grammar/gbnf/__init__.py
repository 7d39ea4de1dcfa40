"""GBNF, the notation of llama.cpp's grammars, read and written as Lark for llguidance."""

from quire.grammar.gbnf.lark import lark_of
from quire.grammar.gbnf.parser import is_gbnf

__all__ = ["is_gbnf", "lark_of"]
