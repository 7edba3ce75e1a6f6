"""Tests the dry run: errors, sizes of the state, and programs compiled with libtpu."""

import importlib.util
import json
import math
import pathlib
import re

import conftest
import jax
import numpy as np
import pytest
import running
from conftest import first_of
from dry_run_needs import needs_cuda_plugin, needs_libtpu
from jax.experimental import topologies

from diloco.algorithm.method import Method
from diloco.algorithm.streaming import make_streaming
from diloco.aot import report, topology
from diloco.aot.programs import Programs, nbytes
from diloco.config import add_plugins, resolve
from diloco.errors import ConfigError
from diloco.mesh import hardware
from diloco.mesh.devices import make_mesh
from diloco.spec import sizes
from diloco.spec.shapes import num_params


@pytest.mark.parametrize(
  "name", ["v5e:3x5", "v5e:32x32", "v9:2x2", "v5p:4x4", "v5e", "h100:3", "b200:8"]
)
def test_topologies_that_do_not_exist(name):
  with pytest.raises(ConfigError, match=r"does not exist.*v5e: 1x1, 2x2.*h100: 1, 2"):
    topology.describe(name)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("v5e:2x2", r"pip install libtpu, or '.\[tpu"),
    ("h100:8", r"cuda12-local.*or '.\[gpu-aot"),
  ],
)
def test_what_is_not_installed_is_named_with_its_extra(name, message, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ConfigError, match=message):
    topology.describe(name)


def test_a_cuda_plugin_of_another_version_is_named(monkeypatch):
  def unknown(*args, **kwargs):
    raise NotImplementedError("topology not implemented for platform 'cuda'")

  monkeypatch.setattr(importlib.util, "find_spec", lambda name: "here")
  monkeypatch.setattr(topologies, "get_topology_desc", unknown)
  with pytest.raises(ConfigError, match=r"does not describe h100 .*install the vers"):
    topology.describe("h100:8")


def test_quick_is_refused_for_gpus(tiny):
  with pytest.raises(ConfigError, match="--quick changes nothing for --topology=h100"):
    list(report.report(tiny, "h100", 1, quick=True))


@pytest.mark.parametrize("chip", topology.GPUS)
def test_the_memory_of_a_gpu_is_that_of_its_facts(chip, monkeypatch):
  monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "1.0")
  facts = pathlib.Path(topology.__file__).with_name(f"{chip}.txtpb").read_text()
  [kind] = re.findall(r'device_description_str: "(.*)"', facts)
  [memory] = re.findall(r"device_memory_size: (\d+)", facts)
  assert hardware.hbm_bytes(kind) == pytest.approx(int(memory), rel=1e-4)


def test_xla_gives_three_quarters_of_a_gpu_to_programs(monkeypatch):
  monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
  assert hardware.hbm_bytes("NVIDIA H200") == int(0.75 * 141 * 2**30)
  monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
  assert hardware.hbm_bytes("NVIDIA H200") == int(0.5 * 141 * 2**30)
  assert hardware.peak_flops("NVIDIA H100 PCIe") < hardware.peak_flops("NVIDIA H100")
  assert hardware.hbm_bytes("TPU v5 lite") == int(15.75 * 2**30)


def test_shapes_and_sizes_are_those_of_a_real_state(tiny):
  c = resolve(tiny)
  mesh = make_mesh(c, jax.devices()[:1])
  with jax.set_mesh(mesh):
    sync = make_streaming(c, mesh)
    real, shapes = Method(c, sync).init(), Method(c, sync).abstract()
  same = lambda a, b: (
    (a.shape, a.dtype) == (b.shape, b.dtype)
    and (a.sharding.is_equivalent_to(b.sharding, a.ndim))
  )
  assert jax.tree.all(jax.tree.map(same, real, shapes))
  assert nbytes(shapes.params) == sum(x.nbytes for x in jax.tree.leaves(real.params))
  programs = Programs(c, mesh)
  on_device = dict(programs.on_device)
  assert not programs.on_host
  assert on_device.pop("in flight") > 0
  assert sum(on_device.values()) == nbytes(real)


def programs_of(config):
  c = resolve(config)
  return c, Programs(c, make_mesh(c, jax.devices()[:1]))


def test_offloaded_outer_state_is_counted_at_the_host(tiny):
  tiny.outer.offload = True
  c, programs = programs_of(tiny)
  on_device, n = programs.on_device, num_params(c.model)
  assert programs.on_host["outer parameters"] == 4 * n
  # M replicas, each with float32 parameters.
  assert on_device["parameters"] == 4 * n * c.replicas
  # One fragment is in flight: its payload, and its outer state, fetched for the send.
  payload = math.prod(programs.payload.shape)
  fetched = on_device["in flight"] - payload
  assert fetched == max(
    nbytes(both)
    for both in zip(programs.state.outer.theta, programs.state.outer.opt_state)
  )
  assert programs.outside("inner step") == payload + fetched
  inner_state = on_device["parameters"] + on_device["inner optimizer"]
  assert programs.outside("update") == inner_state
  add_plugins(tiny, "warm_start")
  tiny.train.steps, tiny.warm_start.steps = 1000, 300  # More than three rounds.
  assert programs_of(tiny)[1].on_device == on_device


@pytest.mark.parametrize(
  "fields",
  [
    {},
    {"algorithm": "diloco"},
    conftest.FEEDBACK,
    {"sparta.share": 0.01, "des_loc.second_every": 8},
    {"outer.offload": True},
  ],
)
def test_arguments_and_the_rest_of_the_state_make_the_whole(tiny, fields):
  conftest.update(tiny, fields)
  c, programs = programs_of(tiny)
  whole = sum(programs.on_device.values())
  for name, lower in programs.lower.items():
    if c.outer.offload and name in ("send", "merge", "fetch from host"):
      continue  # They take outer state that is counted at the host.
    with jax.set_mesh(programs.mesh):
      taken = jax.tree.leaves(lower().args_info)
    arguments = sum(math.prod(x.shape) * x.dtype.itemsize for x in taken)
    more = arguments + programs.outside(name) - whole
    if (c.algorithm, name) == ("diloco", "update"):
      more -= math.prod(programs.payload.shape)  # It arrives within one step.
    if name == "evaluation":
      more -= 4 * num_params(c.model)  # A copy of the outer parameters.
    assert abs(more) < 10_000, name  # Tokens, layers, keys and rates are no state.


def test_every_program_compiles(tiny):
  tiny.overlap.tau, tiny.outer.offload = 2, True
  add_plugins(tiny, "sparta", "des_loc")
  tiny.sparta.share, tiny.des_loc.second_every = 0.01, 8
  _, programs = programs_of(tiny)
  names = ["inner step", "sparta", "second_moments", "send", "merge", "update"]
  assert list(programs.lower)[:6] == names
  inner = programs.on_device["inner optimizer"]
  # AdamW holds two moments; some bytes count steps.
  averaged = programs.outside("inner step") + programs.on_device["parameters"]
  assert averaged + inner / 2 == pytest.approx(programs.outside("second_moments"), 1e-2)
  assert programs.outside("sparta") == programs.outside("inner step") + inner
  found = [programs.compile(name) for name in programs.lower]
  assert all(x.crossing == 0 and x.peak > 0 for x in found)


def test_with_transport_host_the_devices_only_send_and_merge(tiny):
  tiny.overlap.transport = "host"
  c, programs = programs_of(tiny)
  assert list(programs.lower) == ["inner step", "send", "merge", "evaluation"]
  assert programs.compile("send").peak > 0
  assert programs.on_host["outer parameters"] == 4 * num_params(c.model)
  assert not any(part.startswith("outer ") for part in programs.on_device)


PROGRAM = """
import functools, json, sys
import conftest
import jax
import numpy as np
from diloco.algorithm.inner import inner_step
from diloco.algorithm.optimizers import tuned
from diloco.aot.programs import Programs
from diloco.aot.topology import describe, make_mesh
from diloco.config import resolve
from diloco.library.streaming import overlapped_step
from diloco.mesh.sharding import batch_sharding
from diloco.model.attention import choose
from diloco.spec.shapes import num_params

name, slices, changes, start, library = sys.argv[1:]
c = conftest.tiny_config()
c.model.update({"num_layers": 2, "dim": 128, "num_heads": 1, "loss_chunk": 8})
c.train.batch_size, c.eval.batch_size, c.model.seq_len = 32, 32, 128
conftest.update(c, json.loads(changes))
c = resolve(c)
programs = Programs(c, make_mesh(c, describe(name, int(slices))))
[program] = [x for x in programs.lower if x.startswith(start)]
if library == "library":
  step = functools.partial(inner_step, tuned=tuned(c), c=c)
  joined = functools.partial(overlapped_step, train_step=step, mesh=programs.mesh)
  shape = (c.models, c.train.batch_size // c.models, c.model.seq_len)
  tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(programs.mesh))
  count, arrays = np.int32(1), (programs.state.params, programs.state.opt_state)
  with jax.set_mesh(programs.mesh):
    programs.lower[program] = lambda: jax.jit(joined, donate_argnums=(1, 2)).lower(
      count, *arrays, (tokens,), [programs.payload]
    )
x = programs.compile(program, quick=start == "inner step")
print(json.dumps({
  "windows": [
    {"kind": w.collective.kind, "dtype": w.collective.dtype, "hidden": w.hidden,
     "loops": w.loops, "shape": w.collective.shape} for w in x.windows
  ],
  "crossing": x.crossing, "params": num_params(c.model), "name": program,
  "payload": programs.payload and programs.payload.shape,
  "attention": choose(c.model, programs.mesh.devices[0, 0].device_kind),
}))
"""

CODEC = """
import json, sys
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from diloco.aot.topology import describe
from diloco.spec.fields import WireConfig
from diloco.wire import compressors

place = SingleDeviceSharding(describe("v5e:2x2", 1)[0])
row, (n, s), codec = 1024, (4, 2**18), compressors.get("quantize")
struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
key = jax.eval_shape(lambda: jax.random.key(0))
temporaries = lambda x: x.compile().memory_analysis().temp_size_in_bytes
found = []
for name in ("e3m0", "e2m3", "bf16", "fp32"):
  wire = WireConfig(format=name)
  encode = jax.jit(lambda x, key: codec.encode(wire, x, (), row, key)).lower(
    struct((n, s), jnp.float32), struct((), key.dtype)
  )
  decode = jax.jit(lambda payload: codec.decode(wire, payload, n, s, row)).lower(
    struct((codec.size(wire, n, s, row),), jnp.uint8)
  )
  found += [temporaries(x) / (4 * n * s) for x in (encode, decode)]
print(json.dumps(found))
"""


def run_alone(script: str, *args: str):
  """Runs a script in a process of its own, as libtpu needs, and reads its last line."""
  env = running.environment(
    JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="true"
  )
  result = running.python("-c", script, *args, env=env)
  assert result.returncode == 0, result.stderr
  return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.integration("compiles for TPUs")
@needs_libtpu
def test_on_a_tpu_coding_takes_less_than_four_times_the_memory_of_the_values():
  # With an axis of two codes, padded to 128 lanes, it would take over sixty times.
  found = run_alone(CODEC)
  assert len(found) == 8
  assert max(found) < 4


@needs_libtpu
@pytest.mark.parametrize(
  ("dtype", "size"), first_of("compiles for TPUs", ("bfloat16", 2), ("float32", 4))
)
def test_on_a_tpu_data_parallel_reduces_gradients_in_their_dtype(dtype, size):
  fields = {"algorithm": "data_parallel", "replicas": 4, "inner.gradient_dtype": dtype}
  fields |= {"mesh.replica": 4, "mesh.fsdp": 1}
  args = "v5e:2x2", "1", json.dumps(fields), "inner step", "trainer"
  found = run_alone(PROGRAM, *args)
  gradients = sizes.all_reduce_bytes(4, found["params"], 1, size)
  # The loss crosses too.
  assert gradients <= found["crossing"] < 1.001 * gradients


def check_hidden(kinds: list[str], *args: str, by: str = "trainer", **fields) -> dict:
  """Compiles an exchange; all must be hidden and send each payload once."""
  found = run_alone(PROGRAM, *args, json.dumps(fields), "exchange, ", by)
  assert sorted(w["kind"] for w in found["windows"]) == sorted(kinds)
  for w in found["windows"]:
    assert w["dtype"] == "u8"
    assert w["hidden"] == w["loops"] == 1
    # The payload is one flat array: a TPU would pad a row of bytes to four rows.
    assert len(w["shape"]) == 1
  # A replica sends its packed payload once to each other replica, and nothing else.
  replicas, *shard = found["payload"]
  assert found["crossing"] == (replicas - 1) * np.prod(shard)
  return found


@needs_libtpu
@pytest.mark.parametrize(
  ("slices", "replicas", "kinds", "by"),
  first_of(
    "compiles for TPUs",
    ("2", 4, ["send", "send", "collective-permute"], "trainer"),
    ("1", 2, ["collective-permute"], "library"),
    ("2", 2, ["send"], "library"),
  ),
)
def test_on_a_tpu_the_exchange_overlaps_with_the_layers(slices, replicas, kinds, by):
  found = check_hidden(kinds, "v5e:2x2", slices, by=by, replicas=replicas)
  assert found["attention"] == "splash"


# Name of the topology, nodes, replicas.
@needs_cuda_plugin
@pytest.mark.parametrize(
  ("name", "nodes", "replicas"),
  [
    ("h100:8", "1", 4),
    *(
      pytest.param(*case, marks=pytest.mark.slow("compiles for GPUs"))
      for case in [
        *[("h100:2", "1", 2), ("h100:8", "2", 2), ("h100:8", "4", 4)],
        ("h200:8", "2", 4),
      ]
    ),
  ],
)
def test_on_gpus_the_exchange_overlaps_with_collectives_of_fsdp(name, nodes, replicas):
  check_hidden(["all-gather"], name, nodes, replicas=replicas)


@pytest.mark.slow("compiles for GPUs")
@needs_cuda_plugin
@pytest.mark.parametrize(
  ("changes", "program"),
  [
    ({"overlap.tau": 3, "sync_every": 4}, "exchange, 1 inner step"),
    ({"overlap.tau": 2, "fragments.size": 2}, "exchange, 2 inner steps"),
    ({"outer.offload": True}, "exchange, 1 inner step"),
  ],
)
def test_on_gpus_one_program_hides_every_kind_of_exchange(changes, program):
  # Several fragments in flight, several inner steps, outer state at the host.
  found = check_hidden(["all-gather"], "h100:8", "1", replicas=2, **changes)
  assert found["name"] == program


@pytest.fixture
def on_this_cpu(monkeypatch):
  monkeypatch.setattr(report, "describe", lambda topology, slices: jax.devices()[:1])
  monkeypatch.setattr(report, "_memory", lambda devices: 2**30)


def test_a_report_for_the_cpu_of_this_machine(tiny, on_this_cpu):
  lines = list(report.report(tiny, "cpu:1x1", 1, quick=False))
  assert lines[0].startswith("1 x cpu:1x1: 1 cpu of 1.00 GiB, mesh replica 1 x fsdp 1")
  programs = {line.split("  ")[0].strip() for line in lines}
  assert {"inner step", "send", "update", "merge"} <= programs
  assert lines[-1].endswith("fits")


@pytest.mark.parametrize(
  ("error", "said"),
  [
    ("INVALID_ARGUMENT: No such compile option: 'x'", "XLA refuses inner step: INVALI"),
    ("RESOURCE_EXHAUSTED: no room", "inner step does not fit: RESOURCE_EXHAUSTED"),
    ("INTERNAL: Used 9.1G of 8.0G hbm.", "does not fit: XLA needs 9.1G of 8"),
  ],
)
def test_what_xla_refuses_is_told(tiny, on_this_cpu, monkeypatch, error, said):
  def refuse(*_):
    raise jax.errors.JaxRuntimeError(error)

  monkeypatch.setattr(Programs, "compile", refuse)
  with pytest.raises(ConfigError, match=said):
    list(report.report(tiny, "cpu:1x1", 1, quick=False))
