"""NSA in plain jnp with memory linear in T: runs on any backend."""
