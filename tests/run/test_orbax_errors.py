"""What Orbax leaves behind after an error is not told a second time."""

import asyncio
import gc
import logging

import pytest

from diloco.run.orbax_errors import hush

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
  hush()
  records = []
  handler = logging.Handler()
  handler.emit = records.append
  logging.getLogger("asyncio").addHandler(handler)
  try:
    left_behind(path)
  finally:
    logging.getLogger("asyncio").removeHandler(handler)
  assert len(records) == told, [record.getMessage() for record in records]
