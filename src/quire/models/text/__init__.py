"""Text for models: chat templates and tokenizers."""
