"""Streaming DiLoCo on a model of Equinox: its arrays are the parameters.

pip install equinox && python examples/equinox_model.py
"""

try:
  import equinox as eqx
except ImportError as error:
  raise SystemExit("This example needs Equinox: pip install equinox") from error
import jax
import jax.numpy as jnp
import optax

import diloco

M, STEPS = 2, 120


def loss(params, static, x_Bx1):
  model = eqx.combine(params, static)
  return jnp.mean((jax.vmap(model)(x_Bx1) - jnp.sin(3 * x_Bx1)) ** 2)


def main():
  model = eqx.nn.MLP(1, 1, 64, depth=2, activation=jnp.sin, key=jax.random.key(0))
  params, static = eqx.partition(model, eqx.is_inexact_array)
  optimizer = optax.adam(1e-3)

  @jax.jit
  @jax.vmap
  def train_step(params, opt_state, x_Bx1):
    value, grads = jax.value_and_grad(loss)(params, static, x_Bx1)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(params, updates), opt_state, value

  params_M = diloco.replicate(params, M)
  opt_state_M = jax.vmap(optimizer.init)(params_M)
  # The paths of an Equinox model are its fields: "layers/1/weight".
  method = diloco.streaming(
    params_M,
    sync_every=12,
    fragments=lambda path: int(path.split("/")[1]),
    tau=3,
    alpha=0.5,
    wire="e3m0",
  )
  print(*method.fragments, sep="\n")
  state = method.init(params_M)
  for t in range(1, STEPS + 1):
    x_MxBx1 = jax.random.uniform(jax.random.key(t), (M, 32, 1), minval=-2, maxval=2)
    params_M, opt_state_M, loss_M = train_step(params_M, opt_state_M, x_MxBx1)
    params_M, state, _ = method.step(t, params_M, state)
  params_M, state, _ = method.drain(STEPS, params_M, state)
  trained = eqx.combine(method.params(state), static)
  print(f"loss {loss_M.mean():.4f}, at 0.5 the model says {trained(jnp.array([0.5]))}")


main()
