"""The picture of the diagnostics: its curves, and folders that have none."""

import json

import numpy as np
import pytest
from running import refused, shown

from diloco.config import add_plugins, resolve
from diloco.contrib.diagnostics import __main__ as diagnostics
from diloco.log import metrics


@pytest.fixture
def c(tiny):
  add_plugins(tiny, "diagnostics")
  tiny.update_from_flattened_dict({"fragments.size": 2, "diagnostics.every": 1})
  return resolve(tiny)  # Fragments: layers 0 and 2, layer 1, embedding.


def sends(steps, **fields) -> list[dict]:
  """Records of sends in three fragments; `fields` are values of two parts."""
  found = []
  cut = lambda x, parts: [y[:parts] for y in x] if isinstance(x[0], list) else x[:parts]
  for t in steps:
    for p, parts in enumerate((2, 1, 1)):
      own = {name: cut(value, parts) for name, value in fields.items()}
      found.append({"step": t + p, "fragment": p, **own})
  return found


def test_each_layer_has_its_curve_and_replicas_are_averaged(c):
  records = sends([4, 8], error=[[1.0, 5.0], [3.0, 7.0]], cosine=[0.5, None])
  error = diagnostics.by_layer(c, records, "error")
  assert list(error) == ["layer 0", "layer 1", "layer 2", "embedding"]
  assert error["layer 0"] == {4: 2, 8: 2}
  assert error["layer 2"] == {4: 6, 8: 6}
  assert error["embedding"] == {6: 2, 10: 2}
  cosine = diagnostics.by_layer(c, records, "cosine")
  assert cosine["layer 1"] == {5: 0.5, 9: 0.5}
  assert np.isnan(list(cosine["layer 2"].values())).all()
  assert diagnostics.by_layer(c, records, "other") == {}


def test_an_update_is_divided_by_the_norm_around_its_step():
  norms = {"layer 0": {4: 1.0, 8: 3.0}}
  # Layer 1 was sent before the plug-in was there.
  curves = {"layer 0": {4: 3.0, 6: 3.0, 9: 3.0}, "layer 1": {4: 1.0}}
  found = diagnostics.relative(curves, norms)
  assert found == {"layer 0": {4: 3.0, 6: 1.5, 9: 1.0}}


def test_the_stable_rank_of_a_matrix_is_the_mean_of_the_layers_in_a_round(c):
  records = [
    {"step": 4, "fragment": 0, "stable_rank.ff.up": [1.0, 2.0]},
    {"step": 6, "fragment": 1, "stable_rank.ff.up": [6.0]},
    {"step": 8, "fragment": 0, "stable_rank.ff.up": [1.0, 3.0]},
    {"step": 7, "fragment": 2, "stable_rank.tokens": [9.0]},
  ]
  found = diagnostics.by_matrix(c, records)
  assert found == {"ff.up": {4: 3.0, 8: 2.0}, "tokens": {4: 9.0}}


def test_the_last_spectrum_of_a_matrix_is_the_mean_of_all_layers():
  records = [
    {"step": 4, "fragment": 0, "spectrum.ff.up": [[0.9, 0.9], [0.4, 0.4]]},
    {"step": 6, "fragment": 1, "spectrum.ff.up": [[0.4], [0.2]]},
    {"step": 8, "fragment": 0, "spectrum.ff.up": [[0.8, 0.6], [0.3, 0.1]]},
    {"step": 9, "fragment": 2, "spectrum.tokens": [[0.5], [0.5]]},
  ]
  found = diagnostics.last_spectra(records)
  assert found["ff.up"] == pytest.approx({1: 0.6, 2: 0.2})
  assert found["tokens"] == {1: 0.5, 2: 0.5}


def test_only_replicas_that_merge_change_the_loss():
  losses = {"loss_before_merge": [2.0, None], "loss_after_merge": [2.5, None]}
  record = {"step": 5, **losses}
  assert diagnostics.merges([record]) == {5: 0.5}


def write(workdir, c, kinds: dict[str, list[dict]]) -> None:
  writer = metrics.MetricsWriter(workdir, c)
  for kind, records in kinds.items():
    for r in records:
      writer.write(kind, r["step"], {k: v for k, v in r.items() if k != "step"})
  writer.close()


def test_the_command_draws_a_run_that_goes_on(c, tmp_path):
  names = ("outer_grad_cosine", "replica_drift", "outer_norm")
  values = {f"{name}_by_layer": [0.5, 0.6] for name in names}
  errors = {"quantization_error_by_layer": [[0.1, 0.2], [0.1, 0.2]]}
  sent = sends([4, 8], **values, **errors)
  sent[0]["stable_rank.ff.up"] = [3.0, 4.0]
  sent[0]["spectrum.ff.up"] = [[0.5, 0.4], [0.3, 0.2]]
  received = sends([5], outer_update_norm_by_layer=[0.1, 0.2])
  write(tmp_path, c, {"send": sent, "receive": received})
  out = tmp_path / "new" / "picture.png"
  assert shown(diagnostics.main, tmp_path, f"--out={out}") == f"picture      {out}\n"
  assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  ("kinds", "message"),
  [(None, "has no metrics.jsonl; give the"), ({}, "no diagnostics; train with")],
)
def test_a_folder_without_diagnostics_is_refused(c, tmp_path, kinds, message):
  if kinds is not None:
    write(tmp_path, c, kinds)
  error = refused(diagnostics.main, tmp_path, f"--out={tmp_path / 'a.png'}")
  assert str(tmp_path) in error
  assert message in error


def test_dashboards_get_the_mean_of_layers_and_replicas():
  record = {"kind": "send", "step": 4, "fragment": 1}
  lists = {"error": [[1.0, 2.0], [3.0, None]], "cosine": [0.5, 0.25], "none": [[None]]}
  found = metrics.scalars(json.loads(json.dumps(record | lists)))
  assert found == {"error/fragment_1": 2.0, "cosine/fragment_1": 0.375}
