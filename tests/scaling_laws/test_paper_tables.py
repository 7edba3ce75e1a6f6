"""The paper's tables from its Table 4, within stated tolerances."""

import json

import numpy as np
import pytest

from diloco.scaling_laws import __main__ as cli
from diloco.scaling_laws import paper, tables


def largest(table):
  return {column: d for column, (d, _) in table.largest().items()}


def test_table_4_is_copied_consistently():
  assert max(largest(tables.table4()).values()) < 0.07


@pytest.mark.parametrize("sizes", ["words", "nominal"])
def test_tables_7_and_10(sizes):
  found = largest(tables.table7(sizes))
  assert found["A"] < 0.005
  assert found["alpha"] < 0.0002
  found = largest(tables.table10(sizes))
  assert found["A"] < 0.005
  assert max(found["alpha"], found["beta"]) < 0.0002


def test_table_11_and_which_sizes_explain_it():
  assert largest(tables.table11("words"))["residual"] < 0.0005
  assert largest(tables.table11("nominal"))["residual"] < 0.0025


def test_table_13_of_the_first_seed():
  table = tables.table13(seeds=1)
  assert largest(table)["residual"] < 0.0005
  assert "Same order as the paper" in table.note


def test_the_joint_optimum_is_table_10():
  # Two optimisers, one law.
  table = tables.parameters13("words")
  a, alpha, _, beta, _ = (c.ours for c in table.rows["A*N^alpha*M^beta"])
  law = paper.loss_fit("joint").law
  assert (a, alpha, beta) == pytest.approx((law.A, law.alpha, law.beta), rel=1e-5)


def test_the_batch_laws_agree_and_the_rate_laws_do_not():
  rows = tables.table10_from_8_and_9().rows
  for cell in rows["batch_size, from Table 9"]:
    assert cell.ours == pytest.approx(cell.paper, rel=0.002)
  beta = rows["inner_lr, from Table 8"][2]
  assert beta.ours < 0 < beta.paper


def test_a_floor_foresees_the_large_models_better():
  table = tables.extrapolation()
  for name in list(table.rows)[::2]:
    for plain, floor in zip(table.rows[name], table.rows[f"{name} with floor"]):
      assert abs(floor.ours - floor.paper) < abs(plain.ours - plain.paper)
      assert floor.ours == pytest.approx(floor.paper, rel=0.02)
      assert floor.interval[0] < floor.ours < floor.interval[1]


def test_the_batch_law_is_in_sequences_and_returned_in_tokens():
  # Table 9 for data-parallel at N = 35e6: 30 sequences of 2,048 tokens.
  law = paper.law("batch_size", "data_parallel")
  assert law(35e6) == pytest.approx(30 * 2048, rel=0.02)


def test_sizes():
  assert paper.model_sizes("nominal")[3] == 335e6
  assert paper.model_sizes("words", ["4B"]) == [12 * 36 * 3072**2 + 32_000 * 3072]
  ratio = paper.model_sizes("words") / paper.model_sizes("nominal")
  assert np.abs(np.log(ratio)).max() < 0.03
  assert [paper.number(t) for t in ("35M", "2.4B", "4e9")] == [35e6, 2.4e9, 4e9]
  with pytest.raises(ValueError, match="size is '4X'; write one such as"):
    paper.number("4X")
  with pytest.raises(ValueError, match="sizes is 'big'; choose one of words"):
    paper.model_sizes("big")


def test_show_names_the_largest_deviation(monkeypatch, capsys):
  short = lambda sizes: [tables.table7(sizes or "words"), tables.parameters13("words")]
  monkeypatch.setattr(tables, "all_tables", short)
  assert cli.main(["tables"]) == 0
  text = capsys.readouterr().out
  assert "largest deviation in A: 0.10% (data_parallel)" in text
  assert "nan" not in text
  assert cli.main(["tables", "--json", "--sizes=nominal"]) == 0
  first = json.loads(capsys.readouterr().out)[0]
  assert first["rows"]["diloco_M1"][0]["paper"] == 18.363
