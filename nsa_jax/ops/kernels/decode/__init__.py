"""One query token per row against a KV cache."""
