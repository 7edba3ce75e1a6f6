"""The page for Prometheus: its numbers, who may read it, mistakes."""

import socket
import sys
import urllib.request

import pytest
from sites import ARRIVAL, make_calendar

from diloco.contrib.sites.coordinator.board import Board
from diloco.contrib.sites.coordinator.journal import Entry, Journal
from diloco.contrib.sites.coordinator.page import HOST, Page
from diloco.contrib.sites.coordinator.rounds import Measured
from diloco.errors import ConfigError


@pytest.fixture
def board(tmp_path):
  return Board(make_calendar(2), Journal(tmp_path), print)


@pytest.fixture
def page(board, tmp_path):
  page = Page(board, tmp_path, "0")
  yield page
  page.close()


def read(page: Page) -> dict[str, float]:
  """Returns {name with labels: number} of the page."""
  with urllib.request.urlopen(f"http://{page.address}/metrics") as answer:
    lines = answer.read().decode().splitlines()
  pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
  return {name: float(value) for name, value in pairs}


def entry(number: int, late=(), refused=(), waited_s=0.5) -> Entry:
  tokens = {k: 100 for k in (0, 1) if k not in (*late, *refused)}
  measured = dict.fromkeys({*tokens, *refused}, Measured(1.0))
  payloads = dict.fromkeys(tokens, b"abc")
  return Entry(number, 0, 10, tokens, payloads, late, {}, waited_s, measured)


def test_the_page_counts_rounds_and_what_each_site_did(page):
  for closed in (entry(0), entry(1, late=(1,)), entry(2, refused=(1,), waited_s=2.0)):
    page.closed(closed)
  found = read(page)
  assert found["diloco_step"] == 10
  assert found["diloco_waited_seconds_total"] == 3.0
  for name, of_0, of_1 in [
    ("payloads", 3, 1),
    ("tokens", 300, 100),
    ("bytes", 9, 3),
    ("late", 0, 1),
    ("refused", 0, 1),
  ]:
    assert found[f'diloco_site_{name}_total{{site="0"}}'] == of_0
    assert found[f'diloco_site_{name}_total{{site="1"}}'] == of_1


def test_the_page_shows_who_is_there_and_how_far_the_run_is(page, board):
  before = read(page)
  assert (before["diloco_sites"], before["diloco_sites_connected"]) == (2, 0)
  assert before["diloco_rounds"] == len(board.calendar.rounds)
  assert before["diloco_disk_free_bytes"] > 0
  assert before['diloco_site_late_total{site="1"}'] == 0  # Before the first round.
  board.rounds.join(1)
  assert read(page)['diloco_site_expected{site="1"}'] == 0
  board.rounds.ready(1, 0)
  board.published = 3
  page.arrived(1, ARRIVAL)
  found = read(page)
  assert found["diloco_sites_connected"] == 1
  assert found['diloco_site_expected{site="1"}'] == 1
  assert found["diloco_rounds_closed"] == 3
  assert found['diloco_site_arrival_seconds{phase="start",site="1"}'] == 5
  assert found["process_resident_memory_bytes"] > 0


def test_without_a_host_only_this_machine_reads_it(page):
  assert page.address.startswith(f"{HOST}:")
  port = int(page.address.rpartition(":")[2])
  with socket.socket() as other:  # Another address of this machine.
    assert other.connect_ex(("127.0.0.2", port)) != 0


@pytest.mark.parametrize("address", ["x", "localhost:", "localhost:70000", "0:-1"])
def test_a_wrong_address_is_one_sentence(board, tmp_path, address):
  with pytest.raises(ConfigError, match=r"^--metrics is .*; give PORT or HOST:PORT\.$"):
    Page(board, tmp_path, address)


def test_a_port_in_use_is_one_sentence(page, board, tmp_path):
  with pytest.raises(ConfigError, match=r"nobody can listen \(Address already in use"):
    Page(board, tmp_path, page.address)


def test_a_missing_package_is_one_sentence(board, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "prometheus_client", None)
  remedy = r"pip install prometheus-client, or '\.\[metrics\]' from a clone\.$"
  with pytest.raises(ConfigError, match=f"^--metrics=9100 needs .* {remedy}"):
    Page(board, tmp_path, "9100")
