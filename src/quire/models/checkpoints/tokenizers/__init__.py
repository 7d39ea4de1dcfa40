"""Reading tokenizers from checkpoints."""
