"""How models show their reasoning."""
