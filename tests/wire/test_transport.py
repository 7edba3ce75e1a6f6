"""What transports carry between two processes, and which meshes they can serve."""

import json
import types

import jax
import numpy as np
import pytest
import running
from conftest import QUICK_TO_COMPILE
from threads import free_port

from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.mesh.devices import make_mesh
from diloco.mesh.sharding import FSDP, REPLICA
from diloco.wire import transport


@pytest.fixture(scope="module")
def processes():
  """What transports.py finds on two processes with four devices each."""
  address = f"localhost:{free_port()}"
  flags = f"--xla_force_host_platform_device_count=4 {QUICK_TO_COMPILE}"
  env = running.environment(JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
  started = [
    running.start("tests/transports.py", str(i), address, env=env, stdout=-1)
    for i in range(2)
  ]
  try:
    outputs = [process.communicate(timeout=300)[0] for process in started]
  finally:
    for process in started:
      process.kill()
  assert [process.returncode for process in started] == [0, 0], outputs
  return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_two_processes_exchange_payloads(processes):
  for process in processes:
    for name in ("device", "host"):
      for shape, found in process[name]["carried"].items():
        assert all(found.values()), (shape, found)
      before, connected, afterwards = process[name]["connections"]
      assert before < connected == afterwards
    # Only packed payloads move between devices; XLA for CPUs overlaps nothing.
    assert process["device"]["moves"]
    assert not process["host"]["moves"]
    assert not process["device"]["overlaps"]
    assert not process["psum carries"]
    assert process["mean"]  # Every device has its part of the mean.


@pytest.mark.parametrize(
  ("packed", "groups", "processes", "exchanges"),
  # The first payload would open the connections too late; without others, or if the
  # update reduces values instead (psum), there is no payload.
  [(True, 2, 2, 1), (True, 2, 1, 0), (True, 1, 2, 0), (False, 2, 2, 0)],
)
def test_devices_connect_if_needed(monkeypatch, packed, groups, processes, exchanges):
  grid = np.asarray(jax.devices())
  mesh = types.SimpleNamespace(shape={REPLICA: groups, FSDP: 1}, devices=grid)
  devices, carried = transport.DeviceTransport(mesh, packed), []
  monkeypatch.setattr(jax, "process_count", lambda: processes)
  monkeypatch.setattr(transport, "_one_byte", lambda mesh: np.zeros((groups, 1, 1)))
  monkeypatch.setattr(devices, "carry", lambda x: carried.append(x.shape) or x)
  devices.connect()
  assert carried == [(groups, 1, 1)] * exchanges


@pytest.mark.parametrize(
  ("processes", "message"),
  [
    ([[0, 1], [0, 1]], r"mesh row 0 has devices of the processes 0, 1; lower"),
    ([[0], [0], [1]], r"different numbers of mesh rows: 2, 1"),
  ],
)
def test_host_transport_needs_whole_replicas_on_every_process(processes, message):
  device = lambda p: types.SimpleNamespace(process_index=p)
  grid = np.asarray([[device(p) for p in row] for row in processes], dtype=object)
  mesh = types.SimpleNamespace(devices=grid)
  with pytest.raises(ConfigError, match=message):
    transport.HostTransport(mesh)


@pytest.mark.parametrize(("n", "slices"), [(2, 1), (4, 1), (4, 2), (6, 3), (8, 8)])
def test_permutations_bring_everything_and_never_split_over_slices(n, slices):
  place = lambda i: types.SimpleNamespace(slice_index=i * slices // n)
  grid = np.asarray([[place(i)] * 2 for i in range(n)], dtype=object)
  sources = transport._sources(
    types.SimpleNamespace(devices=grid, shape={"replica": n, "fsdp": 2})
  )
  groups = np.arange(n)
  assert (sources[0] == groups).all()
  for permutation in sources:
    assert sorted(permutation) == list(groups)
    crosses = (permutation * slices // n) != (groups * slices // n)
    assert crosses.all() or not crosses.any()
  for received in sources.T:
    assert sorted(received) == list(groups)


@pytest.mark.parametrize(
  ("platform", "gathers"), [("gpu", True), ("tpu", False), ("cpu", False)]
)
def test_one_all_gather_carries_the_payloads_on_gpus_only(platform, gathers):
  device = types.SimpleNamespace(platform=platform)
  mesh = types.SimpleNamespace(devices=np.asarray([[device]], dtype=object))
  assert transport.gathers(mesh) == gathers


def test_host_transport_needs_cpus(tiny, monkeypatch):
  tiny.overlap.transport = "host"
  c, devices = resolve(tiny), jax.devices()
  mesh = make_mesh(c, devices[:1])

  def no_cpus(backend=None):
    if backend == "cpu":
      raise RuntimeError("Unknown backend cpu")
    return devices

  monkeypatch.setattr(jax, "devices", no_cpus)
  monkeypatch.setattr(type(jax.config), "jax_platforms", "cuda")
  with pytest.raises(ConfigError, match=r"set it to 'cuda,cpu', or choose device"):
    transport.make_transport("host", mesh)
