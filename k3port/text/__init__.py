"""Text in and text out: the tokenizer."""
