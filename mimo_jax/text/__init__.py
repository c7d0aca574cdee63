"""Text in, token ids out, and back: tokenizer, chat templates, stop strings; no arrays here."""
