"""Data: sources of documents, tokenizers, the tokenised cache, packing, and the pipeline of batches."""

from nsa_jax.extras import extra

with extra("train"):
    from nsa_jax.data.errors import DataError
    from nsa_jax.data.pipeline import Pipeline, make_pipeline
    from nsa_jax.data.tokenizers import Tokenizer, load_tokenizer

__all__ = ["DataError", "Pipeline", "Tokenizer", "load_tokenizer", "make_pipeline"]
