"""The whole operator with one backward pass, and the kernels of a layer around it."""
