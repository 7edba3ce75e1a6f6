"""Starts a run of several processes, and shares a folder between them."""

import contextlib
import pathlib
import tempfile
import threading
from collections.abc import Iterator

import jax

from diloco.errors import ConfigError
from diloco.processes.agree import check_same
from diloco.processes.peers import Peers, process_names
from diloco.processes.streams import listened, reached
from diloco.util import files, remote
from diloco.util.command import free_port

# After so many seconds without a sign of life from a process, JAX itself aborts the
# run. This time is long, because `Peers` notices a lost process earlier, and because a
# process may be suspended for a while.
_HEARTBEAT = 600


def initialize(
  coordinator: str | None,
  num_processes: int | None,
  process_id: int | None,
  auto: bool = False,
  timeout: int = 300,
) -> Peers:
  """Joins the other processes of a run; call it before any other function of JAX.

  Args:
    coordinator: host:port of process 0. None, without `auto`: this process is alone.
    num_processes: number of processes.
    process_id: number of this process.
    auto: whether JAX finds the three arguments above, on Slurm, Open MPI, GKE or Cloud
      TPU.
    timeout: seconds to wait for all processes.

  Raises:
    ConfigError: the arguments are incomplete.
    ProcessLost: a process did not come.
  """
  devices = None
  if auto:
    # The only public function of JAX that detects a cluster also joins it.
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
  is_port = port.isdecimal() and 0 < int(port) <= 65535
  if None in given or not host or not is_port or not 0 <= index < count:
    raise ConfigError(
      f"--coordinator is {coordinator}, --num_processes {num_processes} and"
      f" --process_id {process_id}; give host:port, the number of processes, and to"
      " each process its own number from 0, or use --distributed=auto."
    )
  if count == 1:
    return Peers()
  host = f"[{host.strip('[]')}]" if ":" in host else host
  # Connects `Peers` before JAX, which would wait for a dead process until its time-out.
  peers = Peers.meet(f"{host}:{port}", count, index, timeout)
  address = reached(f"{host}:{peers.broadcast(free_port())}")
  # Without gloo, the CPU devices of different processes cannot exchange anything.
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.config.update("jax_enable_preemption_service", False)  # `CommonEnd` replaces it.

  def refuse(reason: str) -> None:
    peers.fail(
      f"process {index} of {count} met the others, but JAX did not join them at"
      f" {address} ({reason}); start all again, and see whether their machines reach"
      " that address."
    )

  # After its own time-out JAX would abort the process, without an error to catch.
  late = threading.Timer(timeout, refuse, [f"within {timeout} s"])
  late.daemon = True
  late.start()
  try:
    jax.distributed.initialize(
      address,
      count,
      index,
      devices,
      coordinator_bind_address=listened(address),
      initialization_timeout=timeout + 60,
      heartbeat_timeout_seconds=_HEARTBEAT,
    )
  except RuntimeError as error:
    late.cancel()
    peers.await_loss()
    refuse(str(error).partition("\n")[0])
  late.cancel()
  return peers


def check_all_meet(peers: Peers) -> None:
  """Refuses processes of JAX that `peers` does not know.

  Otherwise every process would believe that it is alone, and all would write the same
  files.

  Raises:
    ConfigError: JAX has more or fewer processes than `peers`.
  """
  if peers.count != jax.process_count():
    raise ConfigError(
      f"peers are {peers.count} processes, but JAX's are {jax.process_count()}; join"
      " them by diloco.processes.distributed.initialize, and give its result to train."
    )


def make_shared(folder: pathlib.Path, peers: Peers) -> None:
  """Makes a folder that all processes write to, unless it is the copy of a bucket.

  Raises:
    ConfigError: some processes see another folder under this path, or another bucket.
  """
  address = remote.address_of(folder) or "no bucket"
  check_same(peers, {"the address of --workdir": address}, "give all the same")
  if remote.address_of(folder):
    return  # Each process has its own copy.
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as file:
    name = peers.broadcast(pathlib.Path(file.name).name)
    seen = peers.all_gather((folder / name).exists())
  blind = [p for p, sees in enumerate(seen) if not sees]
  if blind:
    raise ConfigError(
      f"--workdir is {folder}, which {process_names(blind)} of"
      f" {peers.count} does not share with process 0; put it on a file system that all"
      " machines mount."
    )


@contextlib.contextmanager
def lock_workdir(folder: pathlib.Path, peers: Peers) -> Iterator[None]:
  """Keeps other runs out of a folder until this run ends, or its process 0 dies.

  Raises:
    ConfigError: another run is training there.
  """
  with (folder / ".lock").open("a+") as file:
    is_free = peers.index > 0 or files.try_lock(file)
    file.seek(0)
    holder = file.readline().strip() or "another process"
    holder = peers.broadcast("" if is_free else holder)
    if holder:
      raise ConfigError(
        f"--workdir is {str(folder)!r}, where {holder} is training; wait for its end,"
        " or choose another --workdir."
      )
    if peers.index == 0:
      file.truncate(0)
      file.write(files.holder())
      file.flush()
    yield
