"""Front end, next to the client: input and output processing, engine clients. Never imports torch."""
