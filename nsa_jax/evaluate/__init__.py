"""What a trained model can do: perplexity, use of the context, retrieval (`python -m nsa_jax.evaluate`)."""

from nsa_jax.evaluate.command import main
from nsa_jax.evaluate.scoring import Scorer, held_out_documents, position_bins, score_documents, windows

__all__ = ["Scorer", "held_out_documents", "main", "position_bins", "score_documents", "windows"]
