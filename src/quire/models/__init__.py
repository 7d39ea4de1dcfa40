"""What a model is: one decoder definition, families, weight loading, tokenizer."""
