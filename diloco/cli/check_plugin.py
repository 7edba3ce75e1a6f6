"""Tests a plug-in: sizes and round trip of a compressor, jit, fsdp and resume.

  python -m diloco check_plugin ./mine.py
  python -m diloco check_plugin ./mine.py mine.on=true "wire.compressor=mine(k=3)"

The command trains a tiny model on random tokens and two CPU devices. Each name that the
file registers gets its own run, with your FIELD=VALUE, which must turn the plug-in on.
The command prints a line per check. Its exit status is 2 if any fails.

size        `size` of a compressor, or of a format's, is the length of the uint8 payload
round trip  `decode` returns float32 (N, S); the line shows its relative error
jit         a run of 12 inner steps and their syncs works; all losses are finite
fsdp        with two shards of each tensor, the loss is within 2% of the loss of `jit`
resume      a run, saved after step 7 and resumed, ends with the same bits as `jit`
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from diloco.algorithm.method import make_method
from diloco.checkpoint.checkpoints import state_of, tree_of
from diloco.config import Config, changed, default_config, resolve
from diloco.config.command_line import with_flags
from diloco.errors import ConfigError
from diloco.mesh.devices import make_mesh
from diloco.spec import plugins, sizes
from diloco.util.command import Parser, guarded, located
from diloco.util.types import PyTree
from diloco.wire import compressors

STEPS, SAVED = 12, 7
# Each name of these kinds that a plug-in registers is tried in a run.
_KINDS = plugins.NAMES.keys() - {"fields", "overlap.transport", "eval.tasks"}
# (layers, values per layer, values per row).
_SHAPES = ((3, 40, 8), (1, 7, 7), (2, 1, 1), (2, 256, 16))


def cases(file: str, given: Sequence[str]) -> list[list[str]]:
  """Imports a plug-in; returns the list of FIELD=VALUE of each test run.

  Raises:
    ConfigError: the plug-in has fields, and none of them is given.
  """
  names = cast(dict[str, dict[str, object]], plugins.NAMES)
  before = {kind: {*names[kind]} for kind in names}
  for group, kind in plugins.load([file]).items():
    fields = [f"{group}.{field.name}" for field in dataclasses.fields(kind)]
    if fields and not any(field.startswith(f"{group}.") for field in given):
      raise ConfigError(
        f"{file} has the fields {', '.join(fields)}, and none is given; give those that"
        f" turn the plug-in on, as in {fields[0]}=VALUE."
      )
  runs = [
    [f"{kind}={name}", *given]
    for kind in _KINDS - {field.partition("=")[0] for field in given}
    for name in names[kind].keys() - before[kind]
    # The user must give the arguments of a compressor.
    if not (kind == "wire.compressor" and callable(names[kind][name]))
  ]
  return runs or [[*given]]


def tiny(file: str, fields: Sequence[str]) -> Config:
  """Returns the config of a small run that is saved while fragments are in flight."""
  c = default_config(file)
  c.sync_every, c.fragments.size, c.overlap.tau, c.wire.block_size = 4, 1, 2, 16
  c.model.update({"num_layers": 3, "dim": 16, "num_heads": 2, "vocab_size": 256})
  c.model.seq_len, c.model.dtype, c.inner.warmup_steps = 16, "float32", 2
  c.train.batch_size, c.train.steps, c.mesh.replica, c.mesh.fsdp = 4, STEPS, 1, 1
  return resolve(with_flags(c, [f"--config.{field}" for field in fields]))


def size(c: Config, _: object) -> str:
  """Compares the payloads of a compressor with its `size`, under jit."""
  compressor, wire, lost, sent = compressors.get(c.wire.compressor), c.wire, 0.0, []
  encode = jax.jit(compressor.encode, static_argnums=(0, 3))
  decode = jax.jit(compressor.decode, static_argnums=(0, 2, 3, 4))
  for n, s, row in _SHAPES:
    x_NxS = jax.random.normal(jax.random.key(s), (n, s))
    state = compressor.init(x_NxS)
    code, after = encode(wire, x_NxS, state, row, jax.random.key(0))
    sent.append(sizes.size_of(wire.compressor)(wire, n, s, row))
    _same(f"the payload of {n} x {s} values", code, jnp.zeros(sent[-1], jnp.uint8))
    _same("the state after encode", after, state)
    y_NxS = decode(wire, code, n, s, row)
    _same("what decode returns", y_NxS, x_NxS)
    lost = max(lost, float(jnp.linalg.norm(y_NxS - x_NxS) / jnp.linalg.norm(x_NxS)))
  return f"{sent} bytes for {_SHAPES}; relative error of the round trip {lost:.2g}"


def _same(what: str, found: PyTree, wanted: PyTree) -> None:
  """Raises a ConfigError if two trees differ in shapes or dtypes."""
  kind = lambda tree: str(jax.tree.map(lambda x: f"{x.dtype} {x.shape}", tree))
  if kind(found) != kind(wanted):
    raise ConfigError(f"{what} is {kind(found)}, not {kind(wanted)}.")


def train(c: Config, resumes: bool = False) -> tuple[float, PyTree]:
  """Trains a run on random tokens; returns its last loss and its last arrays."""
  shape = (STEPS + 1, c.models, c.train.batch_size // c.models, c.model.seq_len)
  text = jax.random.randint(jax.random.key(0), shape, 0, c.model.vocab_size)
  mesh = make_mesh(c, jax.devices()[: c.mesh.fsdp])

  put = lambda x, like: jax.device_put(np.asarray(x), like.sharding)
  with jax.set_mesh(mesh):
    method = make_method(c, mesh)
    t, state, loss = 0, method.init(), 0.0
    while t < STEPS:
      steps = method.span(t, STEPS, (SAVED,))
      state, metrics = method.inner(steps, state, [text[t] for t in steps])
      loss = float(np.mean(metrics[-1].loss))
      if not np.isfinite(loss):
        raise ConfigError(f"the loss is {loss} after step {steps[-1]}.")
      t, state, _ = method.outer(steps[-1], state)
      if resumes and t == SAVED:
        method = make_method(c, mesh)
        like = method.abstract(t)
        state = state_of(jax.tree.map(put, tree_of(state), tree_of(like)), like)
    state, _ = method.drain(STEPS, state)
    return loss, jax.tree.map(np.asarray, tree_of(state))


def jit(c: Config, whole: list[PyTree]) -> str:
  """Trains a whole run, with which the next checks compare their runs."""
  whole.append(train(c))
  return f"loss {whole[0][0]:.4f} after step {STEPS}"


def fsdp(c: Config, whole: list[PyTree]) -> str:
  loss, before = train(changed(c, {"mesh.fsdp": 2}))[0], whole[0][0]
  if abs(loss / before - 1) > 0.02:
    raise ConfigError(f"the loss is {loss:.4f}, and {before:.4f} without fsdp.")
  return f"loss {loss:.4f}"


def resume(c: Config, whole: list[PyTree]) -> str:
  two = (jax.tree.leaves(x) for x in (train(c, resumes=True)[1], whole[0][1]))
  if any(x.tobytes() != y.tobytes() for x, y in zip(*two, strict=True)):
    raise ConfigError("the arrays at the end differ from those of the whole run.")
  return "all arrays have the same bits"


def run(args: argparse.Namespace) -> int:
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 2)
  failed = False
  for fields in cases(args.file, args.fields):
    title, c = " ".join(fields) or args.file, tiny(args.file, fields)
    whole, checks = list[PyTree](), (size, jit, fsdp, resume)
    is_wire = "wire.compressor=" in title or "wire.format=" in title
    for check in checks if is_wire else checks[1:]:
      try:
        print(f"ok    {title}  {check.__name__}: {check(c, whole)}", flush=True)
      except Exception as error:  # The code of a plug-in may raise anything.
        failed = True
        reason = located(error, str(pathlib.Path(args.file).resolve()))
        print(f"FAIL  {title}  {check.__name__}: {reason}", flush=True)
        break  # The next checks need this check.
  return 2 if failed else 0


def main(argv: list[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco check_plugin", description=__doc__)
  parser.add_argument("file", help="the plug-in: a path, or the name of a module")
  parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE")
  return guarded(run, parser.parse_args(argv), mistakes=ConfigError)


if __name__ == "__main__":
  sys.exit(main())
