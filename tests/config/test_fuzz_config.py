"""Random values of config fields end in one sentence or in a result.

  PYTHONPATH=tests/config python -c 'import test_fuzz_config as f; f.main(1000, 0)'

Each case changes one to four fields of a tiny config by flags, as a user would, with
values that are odd, huge, empty or of another type. A config that is refused must be
refused by a ConfigError. A config that is accepted trains two steps, which may diverge
or lack memory.
"""

import collections
import contextlib
import io
import pathlib
import random
import tempfile

import pytest
import running

from diloco.config import Config, changed, resolve
from diloco.config.command_line import load_config
from diloco.config.resolve import leaves
from diloco.errors import ConfigError

TESTS = pathlib.Path(__file__).parents[1]
# Two steps of this config synchronise all fragments.
BASE = "sync_every=1 overlap.tau=0 fragments.size=1 model.num_layers=1 model.dim=8"
BASE += " model.num_heads=1 model.seq_len=8 train.steps=2 eval.tokens=64"
NUMBERS = (-(2**63), -2, -1, 0, 1, 2, 3, 4, 5, 8, 16, 2**31 - 1, 2**31, 2**40, 10**30)
FRACTIONS = (-1.0, -1e-9, 0.0, 1e-300, 1e-9, 0.1, 0.5, 0.999, 1.0, 1.5, 1e9, 1e300)
WORDS = """0 - none auto fp32 bf16 e3m0 e4m3 e2m1 bins2 float32 bfloat16 gather psum
host device first whole streaming diloco data_parallel sequential topk random dare
schedule rate sgd lion adamw(b1=2) sgd(momentum='x' muon adam() sotu
files:/none/* arrays:/none tfds:none:1.0 ä hellaswag
../x /dev/null (1,2) (1,2, nan
inf True"""
WORDS = ["", " ", "x" * 300, *WORDS.split()]
OTHERS = (*NUMBERS, *FRACTIONS, *WORDS)
OF_TYPE = {
  bool: ("true", "false"),
  int: NUMBERS,
  float: (*FRACTIONS, 0, 1, "nan", "inf"),
  tuple: ("()", "(0,0)", "(0,1)", "(1,)", "(0,'a')", "0", ""),
}


def flags(rng: random.Random) -> list[str]:
  """Draws flags for one to four fields, nine times of ten of the field's type."""
  fields = leaves(Config().to_dict())
  chosen = rng.sample(sorted(fields), rng.randint(1, 4))
  of = lambda f: OF_TYPE.get(type(fields[f]), WORDS) if rng.random() < 0.9 else OTHERS
  return [f"--config.{field}={rng.choice(of(field))}" for field in chosen]


def run(given: list[str], workdir: pathlib.Path) -> str:
  """Runs a case; returns how it ended."""
  from diloco import train
  from diloco.log.log import TrainingDiverged
  from diloco.mesh import memory

  base = [f"--config.{field}" for field in BASE.split()]
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      c = load_config(str(TESTS / "tiny_config.py"), [*base, *given])
      # Long runs are no mistake, but these two steps must work.
      shorter = {"train.steps": min(c.train.steps, 2), "inner.decay_steps": 0}
      train.train(resolve(changed(c, shorter | {"outer.final_sync": True})), workdir)
    return "trained"
  except TrainingDiverged:
    return "diverged"
  except ConfigError as error:
    if "\n" in str(error) or len(str(error)) > 1000:
      raise
    return "refused"
  except Exception as error:
    if not memory.explain(error):
      raise
    return "out of memory"


def main(cases: int, seed: int) -> None:
  """Runs cases; the last line before another end has its flags."""
  ends = collections.Counter[str]()
  with tempfile.TemporaryDirectory() as folder:
    for case in range(cases):
      given = flags(random.Random(f"{seed} {case}"))
      print(case, *given, flush=True)
      ends[run(given, pathlib.Path(folder) / str(case))] += 1
  print(*ends.items())


@pytest.mark.parametrize(
  ("cases", "seed", "end"),
  [
    pytest.param(6, 0, "refused", marks=pytest.mark.integration("random configs")),
    pytest.param(200, 2, "trained", marks=pytest.mark.slow("many random configs")),
  ],
)
def test_random_configs_end_well(cases, seed, end):
  code = f"import test_fuzz_config; test_fuzz_config.main({cases}, {seed})"
  env = running.environment(PYTHONPATH=f"{TESTS}:{TESTS.parent}:{TESTS / 'config'}")
  process = running.python("-c", code, env=env, timeout=100 * cases)
  assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
  assert end in process.stdout.splitlines()[-1]
