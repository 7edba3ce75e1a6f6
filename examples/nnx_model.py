"""Streaming DiLoCo on a Flax nnx model whose layers are stacked, as in large models.

python examples/nnx_model.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import diloco

M, STEPS, LAYERS, WIDTH = 2, 120, 4, 32


class Model(nnx.Module):
  """x + linear(tanh(x)) in each layer; the layers are one stack of arrays."""

  def __init__(self, rngs):
    self.encode = nnx.Linear(1, WIDTH, rngs=rngs)
    make = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs), in_axes=0)
    self.layers = make(rngs.split(LAYERS))
    self.decode = nnx.Linear(WIDTH, 1, rngs=rngs)

  def __call__(self, x):
    scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    x = scan(lambda layer, x: x + layer(jnp.tanh(x)))(self.layers, self.encode(x))
    return self.decode(x)


def main():
  # State that is not a parameter, such as random keys, stays outside.
  graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
  optimizer = optax.adam(1e-3)

  def loss(params, x_Bx1):
    model = nnx.merge(graph, params, rest)
    return jnp.mean((model(x_Bx1) - jnp.sin(3 * x_Bx1)) ** 2)

  @jax.jit
  @jax.vmap
  def train_step(params, opt_state, x_Bx1):
    value, grads = jax.value_and_grad(loss)(params, x_Bx1)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, value

  params_M = diloco.replicate(params, M)
  opt_state_M = jax.vmap(optimizer.init)(params_M)
  stacked = diloco.Stacked("layers", size=2)
  method = diloco.streaming(
    params_M, sync_every=12, fragments=stacked, tau=3, wire="e3m0"
  )
  print(*method.fragments, sep="\n")
  state = method.init(params_M)
  for t in range(1, STEPS + 1):
    x_MxBx1 = jax.random.uniform(jax.random.key(t), (M, 32, 1), minval=-2, maxval=2)
    params_M, opt_state_M, loss_M = train_step(params_M, opt_state_M, x_MxBx1)
    params_M, state, _ = method.step(t, params_M, state)
  params_M, state, _ = method.drain(STEPS, params_M, state)
  trained = nnx.merge(graph, method.params(state), rest)
  print(f"loss {loss_M.mean():.4f}, at 0.5 the model says {trained(jnp.array([0.5]))}")


main()
