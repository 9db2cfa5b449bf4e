"""One query token per row against a KV cache.

The functions that call kernels are jitted, so that JAX traces and lowers them once for all layers of a model. Layer by
layer, that takes longer than XLA's compilation of the whole step. XLA inlines the calls.
"""
