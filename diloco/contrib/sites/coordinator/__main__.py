"""Coordinates the sites of a run (docs/sites.md).

python -m diloco coordinator --config=configs/sample.py --workdir=runs/group \\
  --listen=localhost:7000 --insecure --config.overlap.transport=sites
"""

import asyncio
import contextlib
import functools
import os
import pathlib
import signal
from typing import TYPE_CHECKING

from absl import flags, logging

from diloco.config import Config, resolve
from diloco.config.command_line import define_config, run
from diloco.errors import ConfigError
from diloco.util import files
from diloco.util.command import make_folder

if TYPE_CHECKING:
  from diloco.contrib.sites.coordinator.group import OuterGroup

FLAGS = flags.FLAGS
define_config()
flags.DEFINE_string("workdir", None, "Folder of the outer state; a run there goes on.")
flags.DEFINE_string("listen", None, "Address host:port for the sites; port 0: any.")
flags.DEFINE_string("tls", "", "Folder with ca.pem, cert.pem and key.pem.")
flags.DEFINE_boolean("insecure", False, "Plain text, on localhost only.")
flags.DEFINE_string(
  "metrics", "", "[HOST:]PORT of a page /metrics for Prometheus; HOST: this machine's."
)


def main(_: list[str]) -> None:
  # The outer step needs no accelerator, which may be in use by a site.
  os.environ["JAX_PLATFORMS"] = "cpu"
  logging.set_verbosity(logging.WARNING)
  c = resolve(FLAGS.config)
  if c.overlap.transport != "sites":
    raise ConfigError(
      f"overlap.transport is {c.overlap.transport}; a coordinator needs"
      " --config.overlap.transport=sites, on all sites too."
    )
  workdir = make_folder(FLAGS.workdir, "--workdir")
  try:
    asyncio.run(coordinate(c, workdir))
  except OSError as error:
    raise ConfigError(
      f"--workdir is {FLAGS.workdir}, where a file fails ({error}); the same command"
      " goes on when that is repaired."
    ) from error


async def coordinate(c: Config, workdir: pathlib.Path) -> None:
  """Serves until all rounds are closed, or until SIGTERM or Ctrl-C."""
  from diloco.contrib.sites import security
  from diloco.contrib.sites.calendar import Calendar
  from diloco.contrib.sites.coordinator.board import Board, Measure
  from diloco.contrib.sites.coordinator.journal import Journal
  from diloco.contrib.sites.coordinator.page import Page
  from diloco.contrib.sites.coordinator.report import Report
  from diloco.contrib.sites.coordinator.server import Server
  from diloco.log.metrics import CONFIG
  from diloco.processes.distributed import lock_workdir
  from diloco.processes.peers import Peers, print_line

  credentials = security.server_credentials(FLAGS.listen, FLAGS.tls, FLAGS.insecure)
  calendar = Calendar(c)
  with contextlib.ExitStack() as stack:
    stack.enter_context(lock_workdir(workdir, Peers()))
    journal = Journal(workdir)
    files.write_json(workdir / CONFIG, c.to_dict())
    board = Board(calendar, journal, print_line)
    server = Server(board)
    report = Report(board, workdir, journal)
    stack.callback(report.close)
    watchers: list[Report | Page] = [report]
    if FLAGS.metrics:
      page = Page(board, workdir, FLAGS.metrics)
      stack.callback(page.close)
      watchers.append(page)
      print_line(f"Metrics for Prometheus are at http://{page.address}/metrics.")
    board.on_closed = [x.closed for x in watchers]
    board.on_arrival = [x.arrived for x in watchers]
    port = await server.serve(FLAGS.listen, credentials)
    place = f"{FLAGS.listen.rpartition(':')[0]}:{port}"
    print_line(
      f"Coordinates {calendar.sites} sites at {place}, from round {board.published}."
    )
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
      loop.add_signal_handler(signum, board.stop)

    def load() -> "OuterGroup":
      from diloco.contrib.sites.coordinator import group  # JAX takes seconds.

      return group.OuterGroup(calendar, workdir, journal)

    @functools.cache
    def measurer() -> Measure:
      from diloco.contrib.sites.coordinator import group, measure

      return measure.measurer(group.make(calendar).plan, calendar)

    applying = asyncio.create_task(board.apply_rounds(load))
    closing = asyncio.create_task(board.close_rounds(lambda *args: measurer()(*args)))
    try:
      await asyncio.wait({applying, closing}, return_when=asyncio.FIRST_EXCEPTION)
      if applying.done() and applying.exception():
        board.stop()
        await closing
        applying.result()
      if closing.result():
        group = applying.result()
        group.finish()
        report.finish()
      else:
        print_line("Stopped; the same command goes on, and the sites come back.")
    finally:
      await server.stop()
      if applying.done() and not applying.exception():
        applying.result().close()


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir", "listen"])
  run(main)
