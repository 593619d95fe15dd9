"""Running a model: checkpoint in, requests batched into steps, tokens out."""
