"""What Orbax leaves behind after an error is not told a second time."""

import asyncio
import gc
import logging
import sys
import warnings

import pytest

from diloco.util.orbax_errors import hush


@pytest.fixture(autouse=True)
def little_to_collect():
  """Leaves out what was there before, so that `gc.collect` is quick."""
  gc.freeze()
  yield
  gc.unfreeze()


SOURCE = """
async def write():
  await asyncio.Event().wait()

async def fail():
  raise ValueError("disk")
"""


def left_behind(path):
  """Closes a loop with a write that has not ended and an error nobody asked for."""
  scope = {"asyncio": asyncio}
  exec(compile(SOURCE, path, "exec"), scope)
  loop = asyncio.new_event_loop()
  tasks = [loop.create_task(scope["write"]()), loop.create_task(scope["fail"]())]
  loop.run_until_complete(asyncio.sleep(0))
  loop.run_until_complete(asyncio.sleep(0))
  loop.close()
  del tasks, scope
  gc.collect()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
  ("path", "told"),
  [("/lib/orbax/checkpoint/write.py", 0), ("/home/user/own_code.py", 2)],
)
def test_tasks_of_orbax_end_silently(path, told):
  assert len(told_by_asyncio(lambda: left_behind(path))) == told


def test_coroutines_that_nobody_awaited_end_silently():
  scope = {"asyncio": asyncio}
  exec(SOURCE, scope)
  with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    hush.__wrapped__()  # As in a process that has not called it yet.
    scope["write"]()
    gc.collect()
  assert seen == []


HALF_MADE = """
class Manager:
  def __init__(self):
    raise KeyboardInterrupt

  def __del__(self):
    self.thread.join()
"""


@pytest.mark.parametrize(
  ("path", "told"), [("/lib/orbax/checkpoint/write.py", 0), ("/home/user/own.py", 1)]
)
def test_an_object_that_an_interrupt_left_half_made_ends_silently(
  path, told, monkeypatch
):
  scope, seen = {}, []
  exec(compile(HALF_MADE, path, "exec"), scope)
  monkeypatch.setattr(sys, "unraisablehook", seen.append)
  hush.__wrapped__()
  with pytest.raises(KeyboardInterrupt):
    scope["Manager"]()
  gc.collect()
  assert len(seen) == told


def future_of_tensorstore():
  """Leaves an error that TensorStore set, as it does when two writes fail."""
  loop = asyncio.new_event_loop()
  text = 'OUT_OF_RANGE: Error writing "mu/0.0" in OCDBT database at local file "/work"'
  loop.create_future().set_exception(ValueError(text))
  loop.close()
  gc.collect()


def test_an_error_of_tensorstore_is_not_told_again():
  assert told_by_asyncio(future_of_tensorstore) == []


def told_by_asyncio(leave):
  """Calls `leave`; returns the messages of asyncio that a user would see."""
  hush()
  records = []
  handler = logging.Handler()
  handler.emit = records.append
  logging.getLogger("asyncio").addHandler(handler)
  try:
    leave()
  finally:
    logging.getLogger("asyncio").removeHandler(handler)
  return [record.getMessage() for record in records]
