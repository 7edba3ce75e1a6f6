"""A loop of your own saves with Orbax, and goes on from its newest checkpoint.

python examples/save_and_resume.py /tmp/loop 63    # Stops after step 63.
python examples/save_and_resume.py /tmp/loop 120   # Goes on from step 60.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import diloco

M, EVERY, SIZES = 2, 20, [(1, 64), (64, 64), (64, 1)]
folder, last = pathlib.Path(sys.argv[1]).absolute(), int(sys.argv[2])


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
layer = lambda path: int(path.split("/")[0])
method = diloco.streaming(params_M, sync_every=30, fragments=layer, tau=5, wire="e3m0")

options = ocp.CheckpointManagerOptions(max_to_keep=2)
with ocp.CheckpointManager(folder, options=options) as manager:
  start = manager.latest_step() or 0
  if start:  # Fragments that are in flight at this step are in the state, too.
    like = params_M, opt_state_M, method.abstract_state(params_M, start)
    restored = manager.restore(start, args=ocp.args.StandardRestore(like))
    params_M, opt_state_M, state = restored
  else:
    state = method.init(params_M)
  for t in range(start + 1, last + 1):
    x_MxBx1 = jax.random.uniform(jax.random.key(t), (M, 32, 1), minval=-2, maxval=2)
    params_M, opt_state_M = train_step(params_M, opt_state_M, x_MxBx1)
    params_M, state, _ = method.step(t, params_M, state)
    if t % EVERY == 0:
      manager.save(t, args=ocp.args.StandardSave((params_M, opt_state_M, state)))
params_M, state, _ = method.drain(last, params_M, state)
found = loss(method.params(state), jnp.linspace(-2, 2, 200)[:, None])
print(f"steps {start + 1} to {last}, loss {found:.8f} of the outer parameters")
