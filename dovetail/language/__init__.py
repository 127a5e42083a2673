"""Language models: decoders as pure functions, their checkpoints, tokenizers and generation."""
