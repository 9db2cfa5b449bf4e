"""One query token per row against a KV cache.

What calls kernels is jitted, so that JAX traces and lowers it once for all layers of a model: layer by layer, that took
longer than XLA's compilation of the whole step. XLA inlines the calls, and the program is the same.
"""
