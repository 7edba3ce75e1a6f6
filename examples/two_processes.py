"""One replica in each of several processes, which exchange payloads over TCP.

python examples/two_processes.py 0 2 localhost:9876 &
python examples/two_processes.py 1 2 localhost:9876

The arguments are the number of this process, the number of processes, and an address
of process 0 for all. A fourth argument chooses the transport, host or device.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import diloco

STEPS = 100


def loss(params, x_Bx1):
  y_Bx1 = jnp.sin(x_Bx1 @ params["a"]) @ params["b"]
  return jnp.mean((y_Bx1 - jnp.sin(3 * x_Bx1)) ** 2)


def train(index: int, count: int, transport: str) -> dict:
  """Trains one replica of this process; returns the outer parameters."""
  mesh = diloco.replica_mesh(count)
  by_replica = NamedSharding(mesh, P("replica"))
  draw = lambda *shape: np.random.default_rng(0).normal(size=shape).astype("f4")
  params = {"a": 3 * draw(1, 64), "b": 0.1 * draw(64, 1)}
  params_M = diloco.replicate(params, count, mesh)
  adam = optax.adam(1e-2)
  opt_state_M = jax.jit(jax.vmap(adam.init))(params_M)

  @jax.jit
  @jax.vmap
  def train_step(params, opt_state, x_Bx1):
    updates, opt_state = adam.update(jax.grad(loss)(params, x_Bx1), opt_state)
    return optax.apply_updates(params, updates), opt_state

  method = diloco.streaming(
    params_M,
    sync_every=10,
    fragments=lambda path: int(path == "b"),
    tau=2,
    wire="e3m0",
    transport=transport,
  )
  state, rng = method.init(params_M), np.random.default_rng(index + 1)
  for t in range(1, STEPS + 1):
    # Every process draws its own text, here numbers.
    mine = rng.uniform(-2, 2, (1, 32, 1)).astype("f4")
    batch_M = jax.make_array_from_process_local_data(by_replica, mine)
    params_M, opt_state_M = train_step(params_M, opt_state_M, batch_M)
    params_M, state, _ = method.step(t, params_M, state)
  params_M, state, _ = method.drain(STEPS, params_M, state)
  params = jax.tree.map(np.asarray, method.params(state))
  method.close()
  return params


if __name__ == "__main__":
  index, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
  jax.distributed.initialize(address, count, index)
  params = train(index, count, *sys.argv[4:] or ["host"])
  x = np.linspace(-2, 2, 200, dtype="f4")[:, None]
  print(f"process {index}: loss {float(loss(params, x)):.6f} of the outer parameters")
