"""Pallas GPU kernels, a folder for each task; `nsa_jax.ops.pallas` calls them with their part of a plan."""
