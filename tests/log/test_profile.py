"""A profile traces whole launches, changes no result, and needs no special end."""

import contextlib
import gzip
import json

import jax
import pytest

from diloco import train
from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.log.profile import Profile
from diloco.processes.peers import Peers

SAME = ("kind", "step", "loss_per_replica", "outer_grad_norm", "outer_update_norm")


def numbers(workdir):
  found = []
  for record in metrics.Follower(workdir).records():
    found.append({name: record[name] for name in SAME if name in record})
  return found


def names(workdir):
  """Names of all events in the trace of a run."""
  (path,) = workdir.glob("profile/plugins/profile/*/*.trace.json.gz")
  events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
  return {event.get("name") for event in events}


@pytest.mark.integration("whole runs")
def test_a_profile_changes_no_result_and_names_the_parts(tiny, tmp_path, capsys):
  tiny.model.num_layers, tiny.fragments.pattern = 1, "whole"
  tiny.checkpoint.every = 0
  for name in ("plain", "traced"):
    tiny.profile.steps = "5:8" if name == "traced" else ""
    train.train(tiny, tmp_path / name)
  assert numbers(tmp_path / "traced") == numbers(tmp_path / "plain")
  assert not (tmp_path / "plain" / "profile").exists()
  assert {"send", "receive", "merge"} <= names(tmp_path / "traced")
  assert "The trace of the steps 5 to 8 is in" in capsys.readouterr().err


class Log:
  """Counts how often training time was stopped."""

  def __init__(self, workdir):
    self.workdir, self.peers, self.pauses = workdir, Peers(1, 2), 0

  @contextlib.contextmanager
  def pause(self):
    self.pauses += 1
    yield


@pytest.mark.parametrize(
  ("asked", "calls", "pauses"),
  [
    ("5:7", [1, "start", 4, 7, "stop", 10], 2),
    ("4:6", [1, "start", 4, "stop", 7, 10], 2),
    ("5:5", [1, "start", 4, "stop", 7, 10], 2),
    # The run ends early: `close` writes the trace.
    ("11:12", [1, 4, 7, "start", 10, "stop"], 1),
  ],
)
def test_launches_are_traced_whole(tiny, tmp_path, monkeypatch, asked, calls, pauses):
  tiny.profile.steps, made, log = asked, [], Log(tmp_path)
  add = lambda call: lambda *_, **__: made.append(call)
  monkeypatch.setattr(jax.profiler, "start_trace", add("start"))
  monkeypatch.setattr(jax.profiler, "stop_trace", add("stop"))
  profile = Profile(resolve(tiny), log)
  for steps in (range(1, 4), range(4, 7), range(7, 10), range(10, 12)):
    profile.begin(steps, {})
    made.append(steps[0])
    profile.end(steps, {})
  profile.close()
  assert made == calls
  assert log.pauses == pauses


def test_a_run_that_goes_on_after_the_steps_traces_nothing(tiny, tmp_path, capsys):
  tiny.profile.steps, log = "2:3", Log(tmp_path)
  log.peers = Peers()
  Profile(resolve(tiny), log).begin(range(9, 11), {})
  told = "Traces nothing: the steps of profile.steps are before 9.\n"
  assert (capsys.readouterr().err, log.pauses) == (told, 0)


@pytest.mark.parametrize("steps", ["5", "0:4", "8:5", "5:13", "a:b", "1:2:3", ":"])
def test_a_range_that_cannot_be_traced_is_refused(tiny, steps):
  tiny.profile.steps = steps
  with pytest.raises(ConfigError, match=r"first and the last inner step .* 12"):
    resolve(tiny)
