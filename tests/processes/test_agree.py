"""Processes that would not compute the same are refused before they compile."""

import conftest
import pytest
from threads import at_once, connected

from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.processes import agree


@pytest.fixture
def pair():
  """A function that compares the configs of two processes: the sentence of both."""
  peers = connected(2)

  def both(*configs):
    def refusal(i):
      try:
        agree.check_same_program(resolve(configs[i]), peers[i])
      except ConfigError as error:
        return str(error)
      return ""

    found = at_once(refusal, range(2))
    assert found[0] == found[1]
    return found[0]

  return both


@pytest.mark.parametrize(
  ("field", "value"),
  [("seed", 7), ("checkpoint.every", 4), ("wire.compressor", "random")],
)
def test_another_value_of_a_field_is_refused_on_all_processes(field, value, pair):
  configs = [conftest.tiny_config() for _ in range(2)]
  configs[1].update_from_flattened_dict({field: value})
  said = pair(*configs)
  was = resolve(configs[0]).to_dict()
  for name in field.split("."):
    was = was[name]
  assert said.startswith("process 1 differs from process 0: ")
  assert f"{field} is {value}, not {was};" in said


def test_processes_that_compute_the_same_go_on(pair):
  configs = [conftest.tiny_config() for _ in range(2)]
  configs[1].data.data_dir, configs[1].data.num_threads = "/mnt/other", 4
  assert pair(*configs) == ""


@pytest.mark.parametrize("what", ["the code of diloco", "the version of grain"])
def test_other_code_and_other_versions_are_refused(what, pair, monkeypatch):
  found = iter([{what: "aaaa"}, {what: "bbbb"}])
  monkeypatch.setattr(agree, "made_with", lambda c: next(found))
  assert f"{what} is " in pair(*[conftest.tiny_config()] * 2)
