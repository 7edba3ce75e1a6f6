"""The bench of crossing payloads, from end to end."""

import subprocess
import sys

import pytest
from test_wan_bench import SCRIPTS, netns


@pytest.mark.slow("a benchmark in network namespaces")
@pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))
def test_payloads_cross_and_their_bytes_are_counted():
  argv = ["--rates=8,32", "--sizes=2e5", "--repeats=2", "--quiet=1"]
  command = [sys.executable, SCRIPTS / "crossing_bench.py", *argv]
  done = subprocess.run(
    command, check=True, timeout=300, stdout=subprocess.PIPE, text=True
  )
  rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:-1]]
  assert [float(rate) for rate, *_ in rows] == [8, 32]
  for *_, least, _, sent_to_payload in rows:
    assert 1 < float(sent_to_payload) < 1.04
    # The bucket and one frame pass ahead of the rate in each shaper.
    assert float(least) > 0.6
