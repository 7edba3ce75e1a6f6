"""Streaming DiLoCo for any training loop and any pytree of parameters."""
