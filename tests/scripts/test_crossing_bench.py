"""The bench of crossing payloads, from end to end."""

import csv
import subprocess
import sys

import pytest
from test_wan_bench import SCRIPTS, netns


@pytest.mark.slow("a benchmark in network namespaces")
@pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))
def test_payloads_cross_and_their_bytes_are_counted(tmp_path):
  argv = ["--rates=8,32", "--sizes=2e5", "--repeats=2", "--quiet=1"]
  argv += [f"--out={tmp_path}/crossing.csv"]
  subprocess.run(
    [sys.executable, SCRIPTS / "crossing_bench.py", *argv], check=True, timeout=300
  )
  with (tmp_path / "crossing.csv").open() as file:
    rows = list(csv.DictReader(file))
  assert [float(r["rate_mbit_s"]) for r in rows] == [8, 32]
  for row in rows:
    assert 1 < float(row["sent_to_payload"]) < 1.04
    # The bucket and one frame pass ahead of the rate in each shaper.
    assert float(row["least"]) > 0.6
