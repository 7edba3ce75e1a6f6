"""Who gets in: sites with certificates; plain text stays on this machine."""

import shutil
import stat

import pytest
from sites import Coordinator, Player, make_calendar, play, wait

from diloco.contrib.sites import make_certificates, security
from diloco.errors import ConfigError

ALL = make_calendar(2, start_s=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """Certificates of two authorities."""
  out = tmp_path_factory.mktemp("certificates")
  for name in ("ours", "theirs"):
    make_certificates.make(out / name, sites=2)
  return out


@pytest.fixture(scope="module")
def run(tmp_path_factory, folders):
  """A coordinator with certificates, and site 0."""
  workdir = tmp_path_factory.mktemp("group")
  coordinator = Coordinator(ALL, workdir, tls=str(folders / "ours" / "coordinator"))
  player = Player(coordinator, 0, str(folders / "ours" / "site-0")).join()
  yield coordinator, player
  player.leave()
  coordinator.kill()


def refusal(coordinator, site: int, tls, **hello) -> str:
  """Returns why a site is refused."""
  player = Player(coordinator, site, str(tls), **hello)
  with pytest.raises(ConfigError) as error:
    player.join()
  assert "\n" not in str(error.value)
  assert str(error.value).endswith(".")
  return str(error.value)


def goes_on(coordinator, player) -> None:
  """Asserts that the run of site 0 has not noticed anything."""
  play([player], range(player.applied, player.applied + 1))
  assert coordinator.board.inside() == 1
  assert player.link.reconnects == 0


def test_sites_with_certificates_train_together(run, folders):
  coordinator, first = run
  second = Player(coordinator, 1, str(folders / "ours" / "site-1")).join()
  now = second.applied
  play([first, second], range(now, now + 2))
  assert first.members[now + 1] == (0, 1)
  second.leave()
  wait(lambda: coordinator.board.inside() == 1)
  goes_on(coordinator, first)


def test_the_certificate_of_another_site_does_not_help(run, folders):
  coordinator, first = run
  reason = refusal(coordinator, 1, folders / "ours" / "site-0")
  assert "refuses --site=1: the certificate is that of site-0" in reason
  reason = refusal(coordinator, 1, folders / "ours" / "coordinator")
  assert "ends every connection" in reason or "is that of coordinator" in reason
  goes_on(coordinator, first)


def test_another_authority_is_refused_by_the_site(run, folders):
  coordinator, first = run
  reason = refusal(coordinator, 1, folders / "theirs" / "site-1")
  assert "ends every connection at once; give --tls=FOLDER with a cert" in reason
  goes_on(coordinator, first)


def test_a_certificate_of_another_authority_is_refused_by_the_coordinator(
  run, folders, tmp_path
):
  coordinator, first = run
  mixed = shutil.copytree(folders / "theirs" / "site-1", tmp_path / "mixed")
  shutil.copy(folders / "ours" / "site-1" / "ca.pem", mixed)
  assert "ends every connection at once" in refusal(coordinator, 1, mixed)
  goes_on(coordinator, first)


def test_plain_text_is_refused_by_a_coordinator_with_certificates(run):
  coordinator, first = run
  reason = refusal(coordinator, 1, "")
  assert "ends every connection at once; give --tls=FOLDER" in reason
  goes_on(coordinator, first)


def test_a_site_does_not_trust_another_site_as_its_coordinator(folders, tmp_path):
  false = Coordinator(ALL, tmp_path, tls=str(folders / "ours" / "site-0"))
  try:
    reason = refusal(false, 1, folders / "ours" / "site-1")
    assert "ends every connection at once" in reason
    assert false.board.inside() == 0
  finally:
    false.kill()


def test_a_site_with_certificates_refuses_a_coordinator_without(folders, tmp_path):
  plain = Coordinator(ALL, tmp_path)
  try:
    refusal(plain, 1, folders / "ours" / "site-1")
    assert plain.board.inside() == 0
  finally:
    plain.kill()


def test_another_config_and_a_doubled_site_are_one_sentence(run, folders, monkeypatch):
  coordinator, first = run
  config = {**ALL.config.to_dict(), "seed": 9}
  reason = refusal(coordinator, 1, folders / "ours" / "site-1", config=config)
  assert (
    "another config than this site (seed: 0 -> 9); give both the same: only" in reason
  )
  assert reason.startswith(f"the coordinator at {coordinator.address} has")
  monkeypatch.setattr("diloco.contrib.sites.link._DOUBLED_S", -19)
  reason = refusal(coordinator, 0, folders / "ours" / "site-0")
  assert "refuses --site=0: another process is this site" in reason
  goes_on(coordinator, first)


@pytest.mark.parametrize(
  ("address", "folder", "insecure", "reason"),
  [
    ("localhost", "", True, "'localhost'; give host:port"),
    ("localhost:", "", True, "give host:port"),
    (":7000", "", True, "give host:port"),
    ("localhost:70000", "", True, "give host:port"),
    ("localhost:-1", "", True, "give host:port"),
    ("localhost:7000", "", False, "give --tls=FOLDER"),
    ("localhost:7000", "x", True, "give --tls=FOLDER"),
    ("0.0.0.0:7000", "", True, "only for localhost"),
    ("[::]:7000", "", True, "only for localhost"),
    ("192.168.0.1:7000", "", True, "only for localhost"),
    ("localhost.evil.com:7000", "", True, "only for localhost"),
    ("unix:7000", "", True, "only for localhost"),
    ("127.0.0.1:7000", "/nowhere", False, "/nowhere/ca.pem cannot be read"),
  ],
)
def test_a_wrong_address_or_folder_is_one_sentence(address, folder, insecure, reason):
  for open_end in (security.server_credentials, security.channel):
    with pytest.raises(ConfigError) as error:
      open_end(address, folder, insecure)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "address", ["localhost:1", "127.0.0.1:1", "[::1]:1", "127.9.9.9:1"]
)
def test_plain_text_is_allowed_on_this_machine(address):
  assert security.server_credentials(address, "", insecure=True) is None
  security.channel(address, "", insecure=True).close()


DAMAGES = [
  (name, harm)
  for name in ("ca", "cert", "key")
  for harm in ("junk", "cut", "empty", "other", "gone")
  if (name, harm) != ("ca", "other")  # Only the other side sees that.
]


@pytest.mark.parametrize(("name", "harm"), DAMAGES)
def test_damaged_certificates_are_one_sentence(folders, tmp_path, name, harm):
  folder = shutil.copytree(folders / "ours" / "site-0", tmp_path / "tls")
  file = folder / f"{name}.pem"
  if harm == "gone":
    file.unlink()
  elif harm == "other":
    shutil.copy(folders / "ours" / "site-1" / f"{name}.pem", file)
  else:
    content = file.read_text()
    file.write_text({"junk": "junk\n", "cut": content[:90], "empty": ""}[harm])
  for open_end in (security.server_credentials, security.channel):
    with pytest.raises(ConfigError, match=r"--tls is .* cannot be read .* make cert"):
      open_end("localhost:1", str(folder), insecure=False)


def test_the_script_adds_sites_to_the_same_authority(tmp_path):
  out = tmp_path / "certificates"
  assert make_certificates.make(out, 1) == ["coordinator", "site-0"]
  before = {p: p.read_bytes() for p in out.rglob("*.pem")}
  assert make_certificates.make(out, 3) == ["site-1", "site-2"]
  assert make_certificates.make(out, 3) == []
  assert all(p.read_bytes() == content for p, content in before.items())
  authorities = {p.read_bytes() for p in out.rglob("ca.pem")}
  assert len(authorities) == 1
  keys = list(out.rglob("key.pem"))
  assert len({p.read_bytes() for p in keys}) == len(keys) == 5
  assert {stat.S_IMODE(p.stat().st_mode) for p in keys} == {0o600}
  (out / "authority" / "key.pem").write_text("junk")
  with pytest.raises(ConfigError, match="choose another --out"):
    make_certificates.make(out, 4)
