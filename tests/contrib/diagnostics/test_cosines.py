"""The command `cosines`: numbers, groups and names, from written records."""

import json

import numpy as np
import pytest

from diloco.config import changed, resolve
from diloco.contrib.diagnostics import cosines
from diloco.util import files

STEPS = 40


def write(folder, c, value):
  """Writes a run whose cosine is value(step, fragment), received at every step."""
  files.write_json(folder / "config.json", c.to_dict())
  records = [
    {"kind": "receive", "step": t, "fragment": p, "outer_grad_cosine": value(t, p)}
    for t in range(1, STEPS + 2)  # One arrives after the last step.
    for p in range(2)
  ]
  numbers = {"loss": 1.0, "tokens_per_s": 1.0, "bytes_sent": 0, "peak_bytes": 0}
  records += [{"kind": "step", "step": t, **numbers} for t in range(1, STEPS + 1)]
  lines = "".join(json.dumps(r) + "\n" for r in records)
  (folder / "metrics.jsonl").write_text(lines)
  return str(folder)


def test_the_means_of_bins_and_seeds(tiny, tmp_path, capsys):
  tiny.train.steps = STEPS
  value = lambda t, p: t / 100 + p / 10
  runs = [
    write(tmp_path / f"{alpha}-{seed}", c, lambda t, p, s=seed: value(t, p) + s)
    for alpha in (0.0, 0.5)
    for seed in (0, 1)
    for c in [changed(resolve(tiny), {"overlap.alpha": alpha, "seed": seed})]
  ]
  table = cosines.cosines(tmp_path / "0.0-0")
  assert table.shape == (cosines.BINS, 2)
  at = lambda *steps: np.mean([value(t, 0) for t in steps])
  assert table[0].iloc[0] == pytest.approx(at(1))
  assert table[0].iloc[1] == pytest.approx(at(2, 3))
  assert table[0].iloc[-1] == pytest.approx(at(38, 39, 40, 41))
  assert cosines.main([*runs, f"--out={tmp_path / 'a.png'}"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line.split(", ")[-1].split()[0] for line in lines[1:3]] == [
    "alpha=0.0",
    "alpha=0.5",
  ]
  # Of two seeds, whose cosines differ by 1, and two fragments, which differ by 0.1.
  first = np.mean([at(1), at(2, 3)]) + 0.05 + 0.5
  seeds, low, high = lines[1].split()[-3:]
  assert seeds == "2"
  assert float(low) == pytest.approx(first, abs=0.006)
  assert float(high) == pytest.approx(
    np.mean([at(36, 37), at(38, 39, 40, 41)]) + 0.55, abs=0.006
  )
  assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_run_without_cosines_is_refused(tiny, tmp_path, capsys):
  tiny.train.steps = STEPS
  run = write(tmp_path / "run", resolve(tiny), lambda t, p: None)
  assert cosines.main([run, f"--out={tmp_path / 'a.png'}"]) == 2
  assert "which has no cosines: a run needs at least two" in capsys.readouterr().err
