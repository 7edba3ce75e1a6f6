"""Looking at folders of runs: lines from the end, their configs."""

import json

import pytest

from diloco.config import changed, complete, resolve
from diloco.contrib.sites.calendar import as_all, config_of
from diloco.errors import ConfigError
from diloco.log import workdir
from diloco.train import train


@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("text", [b"", b"\n", b"a", b"ab\ncde\n", b"ab\n\ncde\nfghij"])
def test_lines_come_from_the_last_to_the_first(tmp_path, monkeypatch, text, block):
  monkeypatch.setattr(workdir, "_BLOCK", block)
  (tmp_path / "file").write_bytes(text)
  found = list(workdir.backwards(tmp_path / "file"))
  assert found == text.split(b"\n")[::-1]


def write(folder, name, value):
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(value))


def test_a_folder_without_a_config_is_refused(tiny, tmp_path):
  assert workdir.read_config(tmp_path) == {}
  with pytest.raises(ConfigError, match=r"no config\.json that can be read"):
    workdir.whole_config([tmp_path])
  tiny.seed = 3
  write(tmp_path, "config.json", resolve(tiny).to_dict())
  assert workdir.whole_config([tmp_path]).seed == 3


def test_training_does_not_replace_a_config_of_another_program(tiny, tmp_path):
  write(tmp_path, "config.json", {"model_type": "qwen3"})
  with pytest.raises(ConfigError, match=r"whose config\.json is not that of a run"):
    train(tiny, tmp_path)
  write(tmp_path, "config.json", resolve(tiny).to_dict())  # As a sweep does.
  workdir.check_own(tmp_path)


def test_the_configs_of_sites_make_that_of_the_run(tiny, tmp_path):
  tiny.overlap.transport, tiny.overlap.taus, tiny.data.shards = "sites", (1, 2), 2
  c = resolve(tiny)
  folders = [tmp_path / f"site-{k}" for k in (0, 1)]
  for k, folder in enumerate(folders):
    write(folder, "config.json", config_of(c, k).to_dict())
    write(folder, "metrics.jsonl", {})
  assert workdir.parts_of(tmp_path) == folders
  assert workdir.parts_of(folders[1]) == folders[1:]
  found = workdir.whole_config(folders)
  assert found == complete(c.to_dict() | {"sites": {"count": 2, **FREE}})


def test_the_batches_of_sites_need_not_add_up_to_a_multiple(tiny, tmp_path):
  tiny.overlap.transport = "sites"
  folders = [tmp_path / "site-0", tmp_path / "site-1"]
  for k, (folder, batch) in enumerate(zip(folders, (4, 3))):
    c = as_all(changed(resolve(tiny), {"sites.batch_size": batch}))
    write(folder, "config.json", config_of(c, k).to_dict())
  found = workdir.whole_config(folders)
  assert (found.replicas, found.train.batch_size) == (2, 6)


# A site has the fields of its own group of one.
FREE = {"quorum": 1, "grace_s": 20.0, "start_s": 300.0}
