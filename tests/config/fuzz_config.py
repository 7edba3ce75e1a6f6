"""Tries random values of config fields: each must end in one sentence or in a result.

  python tests/config/fuzz_config.py --cases=1000

Each case changes one to four fields of a tiny config by flags, as a user would, with
values that are odd, huge, empty or of another type. A config that is refused must be
refused by a ConfigError. A config that is accepted trains two steps; they must end
within --limit_s seconds, in a summary, in a ConfigError, in the news that training
diverged, or in the sentence about lack of memory. The script prints every other end and
its flags, and a table of the ends; its exit status is 1 if there was any other end.
"""

import collections
import contextlib
import io
import multiprocessing
import pathlib
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from concurrent import futures

import tqdm

from diloco.config import Config, changed, resolve
from diloco.config.command_line import load_config
from diloco.config.resolve import leaves
from diloco.errors import ConfigError
from diloco.util.command import Parser

# Two steps of this config synchronise all fragments.
BASE = """
from diloco.config import default_config

def get_config():
  c = default_config()
  c.sync_every, c.overlap.tau, c.fragments.size = 1, 0, 1
  c.model.update({"num_layers": 1, "dim": 8, "num_heads": 1, "vocab_size": 2048})
  c.model.seq_len, c.train.batch_size, c.train.steps = 8, 4, 2
  c.eval.tokens, c.eval.batch_size = 64, 4
  c.log.sample_tokens, c.log.tensorboard = 2, False
  return c
"""
NUMBERS = (-(2**63), -2, -1, 0, 1, 2, 3, 4, 5, 8, 16, 2**31 - 1, 2**31, 2**40, 10**30)
FRACTIONS = (-1.0, -1e-9, 0.0, 1e-300, 1e-9, 0.1, 0.5, 0.999, 1.0, 1.5, 1e9, 1e300)
WORDS = (
  *("", " ", "0", "-", "none", "auto", "fp32", "bf16", "e3m0", "e4m3", "e2m1", "bins2"),
  *("float32", "bfloat16", "gather", "psum", "host", "device", "first", "whole"),
  *("streaming", "diloco", "data_parallel", "sequential", "topk", "random", "dare"),
  *("stochastic", "schedule", "rate", "sgd", "lion", "adamw(b1=2)", "sgd(momentum='x'"),
  *(
    "muon",
    "adam()",
    "sotu",
    "files:/none/*",
    "arrays:/none",
    "tfds:none:1.0",
    "\u00e4",
  ),
  *(
    "hellaswag",
    "../x",
    "/dev/null",
    "x" * 300,
    "(1,2)",
    "(1,2,",
    "nan",
    "inf",
    "True",
  ),
)


class TooSlow(BaseException):
  """A case took too many seconds."""


def main() -> int:
  parser = Parser(description=__doc__)
  parser.add_argument("--cases", type=int, default=1000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--limit_s", type=int, default=60)
  options = parser.parse_args()
  ends, bad = collections.Counter[str](), 0
  with tempfile.TemporaryDirectory() as folder:
    base = pathlib.Path(folder) / "base.py"
    base.write_text(BASE)
    pool = make_pool()
    for case in tqdm.tqdm(range(options.cases), unit="case"):
      given = flags(random.Random(f"{options.seed} {case}"))
      try:
        workdir = pathlib.Path(folder) / str(case)
        end = pool.submit(run, base, given, workdir, options.limit_s).result()
      except futures.process.BrokenProcessPool:
        end, pool = "other: the process died", make_pool()
      ends[end.partition(":")[0]] += 1
      if end.startswith(("other", "slow")):
        bad += 1
        print(f"case {case}: {' '.join(given)}\n{end}\n", flush=True)
  for end, count in ends.most_common():
    print(f"{count:6} {end}")
  return int(bad > 0)


def make_pool() -> futures.ProcessPoolExecutor:
  """Makes a process that runs 50 cases; the memory of compiled programs only grows."""
  spawn = multiprocessing.get_context("spawn")
  return futures.ProcessPoolExecutor(1, spawn, max_tasks_per_child=50)


def flags(rng: random.Random) -> list[str]:
  """Draws flags for one to four fields."""
  fields = leaves(Config().to_dict())
  chosen = rng.sample(sorted(fields), rng.randint(1, 4))
  return [f"--config.{field}={value(rng, fields[field])}" for field in chosen]


def value(rng: random.Random, default: object) -> object:
  """Draws a value, nine times of ten of the default's type."""
  if rng.random() < 0.1:
    return rng.choice((*NUMBERS, *FRACTIONS, *WORDS))
  if isinstance(default, bool):
    return rng.choice(("true", "false"))
  if isinstance(default, int):
    return rng.choice(NUMBERS)
  if isinstance(default, float):
    return rng.choice((*FRACTIONS, 0, 1, "nan", "inf"))
  if isinstance(default, tuple):
    return rng.choice(("()", "(0,0)", "(0,1)", "(1,)", "(0,'a')", "0", ""))
  return rng.choice(WORDS)


def run(
  base: pathlib.Path, given: list[str], workdir: pathlib.Path, limit_s: int
) -> str:
  """Runs a case; returns how it ended."""
  from diloco import train
  from diloco.log.log import TrainingDiverged
  from diloco.mesh import memory

  try:
    with time_limit(limit_s), contextlib.redirect_stdout(io.StringIO()):
      c = load_config(str(base), given)
      # Long runs are no mistake, but these two steps must work.
      shorter = {"train.steps": min(c.train.steps, 2), "inner.decay_steps": 0}
      c = resolve(changed(c, shorter | {"outer.final_sync": True}))
      with contextlib.redirect_stderr(io.StringIO()):
        train.train(c, workdir)
    return "trained"
  except TrainingDiverged:
    return "diverged"
  except ConfigError as error:
    plain = "\n" not in str(error) and len(str(error)) < 1000
    return "refused" if plain else f"other: no sentence: {error}"
  except TooSlow:
    return f"slow: more than {limit_s} s"
  except (Exception, SystemExit) as error:
    if memory.explain(error):
      return "out of memory"
    return f"other: {''.join(traceback.format_exception(error)[-4:])}"


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
  def stop(*_) -> None:
    raise TooSlow

  before = signal.signal(signal.SIGALRM, stop)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
  sys.exit(main())
