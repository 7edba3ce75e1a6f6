"""How a run of several processes starts, shares a folder, and ends on SIGTERM."""

import contextlib
import pathlib
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from diloco.config import ConfigError
from diloco.run import rendezvous
from diloco.run.peers import Peers, say

# Seconds after which JAX itself aborts a run whose process is gone. Long, since `Peers`
# notices it at once, and since a process may be suspended for a while.
_HEARTBEAT = 600


def initialize(
  coordinator: str | None,
  num_processes: int | None,
  process_id: int | None,
  auto: bool = False,
  timeout: int = 300,
) -> Peers:
  """Joins the other processes of a run; must come before anything else of JAX.

  Args:
    coordinator: host:port of process 0. None, without `auto`: this process is alone.
    num_processes: number of processes.
    process_id: number of this process.
    auto: whether JAX finds these three, on Slurm, Open MPI, GKE or Cloud TPU.
    timeout: seconds to wait for all processes.

  Raises:
    ConfigError: the arguments are incomplete.
    ProcessLost: a process did not come.
  """
  devices = None
  if auto:
    # JAX has a public function only for detecting and joining at once.
    from jax._src import clusters

    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    coordinator, num_processes, process_id, devices = detect(
      coordinator, num_processes, process_id, None, None, timeout
    )
    if coordinator is None:
      raise ConfigError(
        "--distributed is auto, but this is neither Slurm, Open MPI, GKE nor Cloud"
        " TPU; give --coordinator, --num_processes and --process_id."
      )
  given = (coordinator, num_processes, process_id)
  if given == (None, None, None):
    return Peers()
  address, count, index = coordinator or "", num_processes or 0, process_id or 0
  host, _, port = address.rpartition(":")
  if None in given or not host or not port.isdigit() or not 0 <= index < count:
    raise ConfigError(
      f"--coordinator is {coordinator}, --num_processes {num_processes} and"
      f" --process_id {process_id}; give host:port, the number of processes, and to"
      " each process its own number from 0, or use --distributed=auto."
    )
  if count == 1:
    return Peers()
  sockets = rendezvous.meet(host.strip("[]"), int(port), count, index, timeout)
  # Before JAX starts, which waits until the time-out for a process that dies now.
  peers = Peers(index, count, sockets)
  peers.broadcast(None)  # Waits until process 0 has met all, and has freed the port.
  # Otherwise the CPU devices of different processes cannot exchange anything.
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(
      address,
      count,
      index,
      devices,
      initialization_timeout=timeout,
      heartbeat_timeout_seconds=_HEARTBEAT,
    )
  except RuntimeError as error:
    peers.await_loss()
    reason = str(error).partition("\n")[0]
    peers.fail(
      f"process {index} of {count} met the others at {address}, but JAX did not join"
      f" them ({reason}); start all again, or choose another port in --coordinator."
    )
  return peers


def check_all_meet(peers: Peers) -> None:
  """Refuses processes of JAX that `peers` does not know.

  Each of them would write the same files, with its own part of the run.

  Raises:
    ConfigError: JAX has more or fewer processes than `peers`.
  """
  if peers.count != jax.process_count():
    raise ConfigError(
      f"peers are {peers.count} processes, but JAX's are {jax.process_count()}; join"
      " them by diloco.run.processes.initialize, and give its result to train."
    )


def make_shared(folder: pathlib.Path, peers: Peers) -> None:
  """Makes a folder that all processes write to.

  Raises:
    ConfigError: some processes see another folder under this path.
  """
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as own:
    name = peers.broadcast(pathlib.Path(own.name).name)
    seen = peers.all_gather((folder / name).exists())
  blind = [p for p, sees in enumerate(seen) if not sees]
  if blind:
    raise ConfigError(
      f"--workdir is {folder}, which {rendezvous.process_names(blind)} of"
      f" {peers.count} does not share with process 0; put it on a file system that all"
      " machines mount."
    )


@contextlib.contextmanager
def end_on_sigterm(peers: Peers) -> Iterator[Callable[[range], bool]]:
  """Makes SIGTERM end the training loop instead of the process.

  Yields:
    A function that takes the steps that were just finished, and returns whether all
    processes end now. It must be called with every step.
  """
  if peers.count > 1:  # JAX makes all processes agree on the step.
    reached = multihost_utils.reached_preemption_sync_point
    yield lambda steps: any(list(map(reached, steps)))  # list: any() would skip steps.
    return
  if threading.current_thread() is not threading.main_thread():
    say("Not in the main thread: SIGTERM will not save a checkpoint.")
    yield lambda steps: False
    return
  requested = threading.Event()
  before = signal.signal(signal.SIGTERM, lambda signum, frame: requested.set())
  try:
    yield lambda steps: requested.is_set()
  finally:
    # None is a handler that was not set from Python and cannot be restored.
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
