"""All tests share one CPU device, a config that trains in seconds, and small texts."""

import atexit
import collections
import concurrent.futures
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# OpenBLAS reads this when it is loaded. Its threads spin between tiny matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# All tests, and the processes that they start, share compiled programs.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, _cache, ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import hypothesis
import ml_collections
import numpy as np
import pytest
from buckets import s3  # noqa: F401  # A fixture.

from diloco import config as config_lib
from diloco.log import metrics
from diloco.spec import plugins

# No test asserts a time: on a busy machine, an example of Hypothesis may take a second.
hypothesis.settings.register_profile("any time", deadline=None)
hypothesis.settings.load_profile("any time")
# A shell without job control starts background processes with Ctrl-C ignored, and their
# children inherit this; tests send Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# LLVM does not optimise, and gets fewer instructions: together three times as fast. The
# expensive passes are a quarter of the rest; more LLVM modules per program, an eighth.
# XLA of JAX 0.12 ends the process for a flag that it no longer knows.
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0"
if importlib.metadata.version("jaxlib").startswith("0.10."):
  QUICK_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"
  QUICK_TO_COMPILE += " --xla_llvm_disable_expensive_passes=true"
  QUICK_TO_COMPILE += " --xla_cpu_parallel_codegen_split_count=1"
# {tier: what its tests need}; a test without a mark is in the default tier.
TIERS = {"integration": "processes, kills, long compiles", "slow": "minutes each"}
# These take longest, so they begin first, and the workers end together.
FIRST = (
  *("test_layouts.py", "test_site_processes.py", "test_processes.py", "test_train.py"),
  *("test_together.py", "test_every_method.py", "test_data.py", "test_mesh.py"),
  *("test_outer_reference.py", "test_inner.py", "test_peers.py", "test_site.py"),
)
_left_out: collections.Counter[str] = collections.Counter()


def pytest_configure(config: pytest.Config):
  """Compiling is most of a test's time; only slow tests run their programs for long."""
  flags = os.environ.get("XLA_FLAGS", "")
  without_slow = "slow" not in config.option.markexpr.replace("not slow", "")
  if config.option.markexpr and without_slow and QUICK_TO_COMPILE not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} {QUICK_TO_COMPILE}".strip()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
  """A worker for each core (of up to 2 GB); none to test a single file."""
  if len(config.args) == 1 and ".py" in config.args[0]:
    return 0
  return min(len(os.sched_getaffinity(0)), 8)


def tier_of(item: pytest.Item) -> str:
  """The tier of a test, which says why it is not in the default one."""
  marks = [m for m in item.iter_markers() if m.name in TIERS]
  tiers = {m.name for m in marks}
  if len(tiers) > 1 or not all(len(m.args) == 1 for m in marks):
    raise ValueError(f"{item.nodeid} needs one tier, and the reason in its mark")
  return tiers.pop() if tiers else ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]):
  for item in items:
    tier_of(item)
  place = {name: i for i, name in enumerate(FIRST)}
  items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_deselected(items: list[pytest.Item]):
  if items and not items[0].config.option.keyword:
    _left_out.update(filter(None, map(tier_of, items)))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session):
  if hasattr(session.config, "workeroutput"):
    session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
  # All workers collect, and leave out, the same tests.
  found = getattr(node, "workeroutput", {}).get("left_out", {})
  _left_out.update({t: n for t, n in found.items() if t not in _left_out})


def pytest_terminal_summary(terminalreporter):
  for tier, number in _left_out.items():
    terminalreporter.write_line(
      f"Left out: {number} {tier} tests ({TIERS[tier]}); pytest -m {tier} runs them."
    )


def first_of(why: str, first, *others) -> list:
  """Cases of a test: the first is in the integration tier, the others are slow."""
  as_tuple = lambda case: case if isinstance(case, tuple) else (case,)
  found = [pytest.param(*as_tuple(first), marks=pytest.mark.integration(why))]
  slow = pytest.mark.slow(f"{why}; one case is in integration")
  return found + [pytest.param(*as_tuple(case), marks=slow) for case in others]


def tiny_config() -> ml_collections.ConfigDict:
  """Returns a small config: two replicas, four fragments, State of the Union texts."""
  c = config_lib.default_config()
  c.sync_every, c.fragments.size = 4, 1
  c.model.update({"num_layers": 3, "dim": 16, "num_heads": 2, "vocab_size": 2048})
  c.model.seq_len, c.model.dtype = 16, "float32"
  c.inner.warmup_steps = 2
  c.train.batch_size, c.train.steps = 4, 12
  c.eval.tokens, c.eval.batch_size = 256, 4
  c.checkpoint.every = 5
  c.wire.block_size = 16
  c.log.sample_tokens, c.log.tensorboard = 0, False
  return c


def update(c: ml_collections.ConfigDict, fields: dict) -> None:
  """Sets fields; those of plug-ins that ship with the package add the plug-in."""
  groups = {field.partition(".")[0] for field in fields}
  config_lib.add_plugins(c, *sorted(groups & {*plugins.contrib()}))
  c.update_from_flattened_dict(fields)


def rewind(run: pathlib.Path, copy: pathlib.Path, step: int) -> None:
  """Copies a run as if it had been killed after the checkpoint of a step."""
  shutil.copytree(run, copy)
  for path in (copy / "checkpoints").iterdir():
    if int(path.name) > step:
      shutil.rmtree(path)
  (copy / "summary.json").unlink()
  log = copy / "metrics.jsonl"
  lines = log.read_text().splitlines(keepends=True)
  log.write_text("".join(x for x in lines if json.loads(x)["step"] <= step))


def records(run: pathlib.Path, kind: str) -> list[dict]:
  """The records of a run, without what a clock has measured."""
  left_out = {"kind", "time", "tokens_per_s", "waited_s"}
  found = metrics.read(run, kind)
  return [{k: v for k, v in record.items() if k not in left_out} for record in found]


def arrays_of(run: pathlib.Path) -> dict:
  """All arrays of the last checkpoint of a run, by path."""
  import jax  # Not above: processes that need no JAX import this module.
  import orbax.checkpoint as ocp

  folder = max((run / "checkpoints").iterdir(), key=lambda p: int(p.name))
  tree = ocp.StandardCheckpointer().restore((folder / "state").absolute())
  leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
  return {jax.tree_util.keystr(path): x for path, x in leaves}


def assert_same_end(run: pathlib.Path, other: pathlib.Path) -> None:
  """Compares all arrays of the last checkpoints of two runs."""
  mine, theirs = arrays_of(run), arrays_of(other)
  assert mine.keys() == theirs.keys()
  for name, value in theirs.items():
    np.testing.assert_array_equal(mine[name], value, err_msg=name)


FEEDBACK = {
  "plugins": ("error_feedback",),
  "wire.compressor": "error_feedback(beta=1.0, of='quantize')",
}


@pytest.fixture
def tiny() -> ml_collections.ConfigDict:
  """A fresh `tiny_config`."""
  return tiny_config()


class InLine(concurrent.futures.Executor):
  """Runs each task in this process when it is submitted."""

  def __init__(self, *_):
    pass

  def submit(self, function, *args):
    future = concurrent.futures.Future()
    future.set_result(function(*args))
    return future


@pytest.fixture
def in_line(monkeypatch):
  """Prepares data without other processes."""
  monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", InLine)


@pytest.fixture
def lines(tmp_path):
  """Writes three JSON-lines files of 100 documents; gives the glob of their names."""
  folder = tmp_path / "lines"
  folder.mkdir()
  for f in range(3):
    rows = [
      {"text": f"Document {f} {i}: {'é' * (i % 7)}\nwith {i * i} words.", "id": i}
      for i in range(100)
    ]
    text = "\n".join(json.dumps(r, ensure_ascii=i % 2 == 0) for i, r in enumerate(rows))
    (folder / f"{f}.jsonl").write_text(text + "\n" * f)
  return f"files:{folder}/*.jsonl"


def spans(method, start: int, last: int, periods):
  """Cuts the steps after `start` into ranges, as the loop of diloco.train does."""
  t = start
  while t < last:
    steps = method.span(t, last, periods)
    yield steps
    t = steps[-1]
