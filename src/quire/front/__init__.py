"""What runs beside the client: input and output processing, engine clients. Never imports torch."""
