"""Names of `nsa_jax.hub.load` that programs which load models use."""

from nsa_jax.hub.export_files import LoadError
from nsa_jax.hub.load import load

__all__ = ["LoadError", "load"]
