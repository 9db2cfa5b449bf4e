"""What a trained model can do: perplexity, use of the context, retrieval (`python -m nsa_jax.evaluate`)."""

from nsa_jax.evaluate.command import EXIT_USAGE, main
from nsa_jax.evaluate.scoring import Scorer, held_out_documents, position_bins, score_documents, windows

__all__ = ["EXIT_USAGE", "Scorer", "held_out_documents", "main", "position_bins", "score_documents", "windows"]
