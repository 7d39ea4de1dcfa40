"""Which prefixes each engine has cached."""
