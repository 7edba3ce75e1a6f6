"""Which meshes a transport can serve; test_home.py and test_mesh.py carry payloads."""

import jax
import numpy as np
import pytest

from diloco.config import ConfigError, resolve
from diloco.run.mesh import make_mesh
from diloco.wire import transport


class _Device:
  """A stand-in for a device of a process."""

  def __init__(self, process_index: int):
    self.process_index = process_index


@pytest.mark.parametrize(
  ("processes", "message"),
  [
    ([[0, 1], [0, 1]], r"mesh row 0 has devices of the processes 0, 1; lower"),
    ([[0], [0], [1]], r"different numbers of mesh rows: 2, 1"),
  ],
)
def test_host_transport_needs_whole_replicas_on_every_process(processes, message):
  grid = np.asarray([[_Device(p) for p in row] for row in processes], dtype=object)
  mesh = type("FakeMesh", (), {"devices": grid})
  with pytest.raises(ConfigError, match=message):
    transport.HostTransport(mesh)


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
    transport.make_transport(c, mesh)
