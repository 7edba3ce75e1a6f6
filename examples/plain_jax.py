"""Two replicas of a plain-JAX model meet by Streaming DiLoCo, in 4 bits.

python examples/plain_jax.py
"""

import jax
import jax.numpy as jnp
import optax

import diloco

M, STEPS, SIZES = 2, 300, [(1, 64), (64, 64), (64, 1)]


def loss(params, x_Bx1):
  y_Bx1 = x_Bx1
  for layer in params[:-1]:
    y_Bx1 = jnp.sin(y_Bx1 @ layer["w"])
  return jnp.mean((y_Bx1 @ params[-1]["w"] - jnp.sin(3 * x_Bx1)) ** 2)


@jax.jit
@jax.vmap  # Over the replicas.
def train_step(params, opt_state, x_Bx1):
  updates, opt_state = adam.update(jax.grad(loss)(params, x_Bx1), opt_state)
  return optax.apply_updates(params, updates), opt_state


keys, adam = jax.random.split(jax.random.key(0), 3), optax.adam(1e-3)
params = [{"w": jax.random.normal(k, s) * s[0] ** -0.5} for k, s in zip(keys, SIZES)]
params_M = diloco.replicate(params, M)
opt_state_M = jax.vmap(adam.init)(params_M)

layer = lambda path: int(path.split("/")[0])  # The leaf "1/w" is in fragment 1.
method = diloco.streaming(params_M, sync_every=30, fragments=layer, tau=5, wire="e3m0")
state, sent = method.init(params_M), 0
for t in range(1, STEPS + 1):
  x_MxBx1 = jax.random.uniform(jax.random.key(t), (M, 32, 1), minval=-2, maxval=2)
  params_M, opt_state_M = train_step(params_M, opt_state_M, x_MxBx1)
  params_M, state, events = method.step(t, params_M, state)
  sent += sum(event.sent for event in events)
params_M, state, _ = method.drain(STEPS, params_M, state)
found = loss(method.params(state), jnp.linspace(-2, 2, 200)[:, None])
print(f"loss {found:.4f} of the outer parameters, {sent:,} bytes per replica")
