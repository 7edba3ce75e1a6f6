"""Masks over the layers of a model, for plug-ins that treat fragments differently."""

import jax
import jax.numpy as jnp
import numpy as np

from diloco.config import Config
from diloco.util.types import PyTree


def in_fragments(c: Config, mask_P: jax.Array) -> PyTree:
  """Tells which layers belong to the fragments of a mask, bool [P].

  Returns:
    {'blocks': bool [N], 'embed': bool []}.
  """
  fragments = c.make_fragments()
  has_PxN = np.array([np.isin(range(c.model.num_layers), f.layers) for f in fragments])
  rest_P = np.array([bool(f.rest) for f in fragments])
  return {"blocks": mask_P @ has_PxN, "embed": (mask_P & rest_P).any()}


def chosen(mask: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
  """Takes `new` where a mask of the first axes is true, else `old`."""
  return jnp.where(jnp.expand_dims(mask, [*range(mask.ndim, new.ndim)]), new, old)
