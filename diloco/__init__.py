"""DiLoCo, Streaming DiLoCo and their scaling laws, in JAX."""
