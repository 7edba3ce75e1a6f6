"""All layouts of the mesh train the same numbers, and only payloads cross replicas."""

import numpy as np
import pytest
from cpu_devices import run_on_8_devices

LONG = pytest.mark.integration("compiles for eight devices")
LONGER = pytest.mark.slow("compiles more for eight devices")


@pytest.fixture(scope="module")
def multidevice():
  # test_mesh.py has the traffic of two devices with packed payloads.
  parts = ("gradients=8,accumulated", "averages=8,4 of 4", "traffic=8,psum_8")
  return run_on_8_devices("losses=1,8", "whole_models", "shards", *parts)


@pytest.fixture(scope="module")
def more():
  losses = "losses=8,host,one_copy,two_copies,16_bits"
  parts = ("arrivals", "library", "traffic=chunked_feedback,psum_of_4")
  return run_on_8_devices(losses, *parts, "coded_moments=8,4 of 4")


@pytest.fixture(scope="module")
def attentions():
  return run_on_8_devices("attentions")["attentions"]["all"]


def in_both(first: str, second: str):
  """A layout of `multidevice` and one of `more`, each in its tier."""
  cases = (("multidevice", first, LONG), ("more", second, LONGER))
  params = [pytest.param(parts, layout, marks=tier) for parts, layout, tier in cases]
  return pytest.mark.parametrize(("parts", "layout"), params)


@LONG
def test_the_losses_do_not_depend_on_the_layout(multidevice):
  losses = multidevice["losses"]
  np.testing.assert_allclose(losses["8"], losses["1"], rtol=2e-4)


@LONGER
def test_hosts_and_data_parallel_train_the_same_numbers(more):
  losses = more["losses"]
  # Hosts update whole tensors that their devices shard. Equal but for rounding: XLA
  # compiles the update of a shard and of the whole differently.
  np.testing.assert_allclose(losses["host"], losses["8"], rtol=1e-6)
  # Data-parallel trains the same model on every layout.
  np.testing.assert_allclose(losses["two_copies"], losses["one_copy"], rtol=2e-4)
  # Gradients of 16 bits are rounded before they are averaged.
  np.testing.assert_allclose(losses["16_bits"], losses["two_copies"], rtol=2e-3)
  assert losses["16_bits"] != losses["two_copies"]


@LONGER
@pytest.mark.parametrize("kind", ["by path", "stacked"])
def test_the_library_does_not_depend_on_the_layout(more, kind):
  one, eight = (more["library"][f"{kind}, {n}"] for n in (1, 8))
  for x, y in zip(one, eight, strict=True):
    np.testing.assert_allclose(y, x, rtol=1e-6, atol=1e-5)


@pytest.mark.slow("compiles four layouts")
def test_the_diagnostics_do_not_depend_on_the_layout():
  by_layout = run_on_8_devices("diagnosed")["diagnosed"]
  one = by_layout.pop("1, 1")
  assert len(one["outer_grad_cosine_by_layer, 0"]) == 3
  assert len(by_layout) == 3
  for layout, found in by_layout.items():
    assert found.keys() == one.keys()
    for name, x in one.items():
      message = f"{name} on {layout}"
      np.testing.assert_allclose(found[name], x, rtol=1e-4, err_msg=message)


@pytest.mark.slow("compiles every kernel")
def test_every_attention_under_the_map_agrees_with_numpy(attentions):
  errors = attentions["errors"]
  assert len(errors) == 7
  for case, of_y_and_gradients in errors.items():
    # Rounding to bfloat16 changes a value by at most 2^-9.
    limit = 2e-6 if "float32" in case else 2**-7
    assert max(of_y_and_gradients) < limit, case


@pytest.mark.slow("compiles every kernel")
def test_splash_trains_data_parallel_like_xla(attentions):
  losses = attentions["losses"]
  np.testing.assert_allclose(losses["splash"], losses["xla"], rtol=1e-5)


@LONGER
def test_all_exchanges_give_the_same_bits_where_a_replica_is_one_device():
  # Quickly compiled programs round the same sums differently.
  bits = run_on_8_devices("bits", optimized=True)["bits"]
  device, apart, host = bits["device"], bits["apart"], bits["host"]
  # Only accelerators exchange payloads inside programs of inner steps.
  assert device.pop("hidden") > 1
  assert apart.pop("hidden") == host.pop("hidden") == 0
  assert device["late"] == 0
  assert np.isfinite(device["losses"]).all()
  assert host == apart == device


@pytest.mark.slow("compiles ten layouts")
def test_more_layouts_train_the_same_numbers():
  names = ("1", "2", "4", "fsdp", "two_on_each", "four_on_one")
  plain = ("one_copy", "one_copy_on_2", "two_copies_on_8", "accumulated")
  losses = run_on_8_devices(f"losses={','.join(names + plain)}")["losses"]
  for name in ("2", "4", "fsdp"):
    np.testing.assert_allclose(losses[name], losses["1"], rtol=2e-4)
  np.testing.assert_allclose(losses["two_on_each"], losses["four_on_one"], rtol=2e-4)
  for name in plain[1:]:
    np.testing.assert_allclose(losses[name], losses["one_copy"], rtol=2e-4)


@LONG
def test_no_device_ever_holds_a_whole_model(multidevice):
  found = multidevice["whole_models"]["2 of 4"]
  assert found.pop("same")
  # In units of a shard; a whole model would be 4.
  for name in ("joining", "joined", "mean", "first"):
    assert found[name] == pytest.approx(1, rel=0.01), (name, found)
  for name in ("mean", "first"):
    assert found[f"{name} temporaries"] < 2.5, found


@in_both("8", "chunked_feedback")
def test_only_the_packed_payload_crosses_between_replicas(request, parts, layout):
  traffic = request.getfixturevalue(parts)["traffic"][layout]
  for program in ("inner", "send", "update", "merge"):
    assert traffic[program] == []
  replicas, shards, size = traffic["payload_shape"]
  # Each device receives its fsdp shard of the other replica's payload once, also in
  # the program that runs inner steps meanwhile.
  assert replicas == 2
  assert traffic["transmit"] == [["collective-permute", "u8", size]]
  assert traffic["hidden"] == traffic["transmit"]
  assert shards == 4
  assert traffic["booked"] == traffic["bytes"]["transmit"] > 0


@LONGER
@pytest.mark.parametrize(
  "way", ["1, False", "2, False", "4, False", "3, False", "1, True"]
)
def test_two_payloads_arrive_everywhere_in_order(more, way):
  assert more["arrivals"][way]


@LONG
@pytest.mark.parametrize("compressor", ["quantize", "random", "feedback"])
def test_shards_draw_other_numbers_copies_the_same(multidevice, compressor):
  found = multidevice["shards"][compressor]
  assert found.pop("halves_agree") == (compressor != "random")
  assert found.pop("state_is_the_error")  # True also without state.
  # Holds on both devices, and on a mesh of one device that decodes both shards.
  assert found == dict.fromkeys(found, True)
  assert {*found} == {"some_arrive", "whole_leaves_agree", "foreign_agrees"}


@LONG
@pytest.mark.parametrize(("layout", "fsdp"), [("8", 4), ("accumulated", 1)])
def test_data_parallel_reduces_its_gradient_once(multidevice, layout, fsdp):
  found = multidevice["gradients"][layout]
  assert found["kinds"] == ["all-reduce"]
  # Each device reduces its fsdp shard of the float32 gradient, and the loss.
  assert found["bytes"] == found["gradient"] / fsdp + 4
  # Each of two copies sends the whole gradient once, as the dry run also finds.
  assert found["dry_run"] == found["gradient"] + 4 * fsdp


@in_both("psum_8", "psum_of_4")
def test_the_ledger_books_what_a_psum_sends(request, parts, layout):
  traffic = request.getfixturevalue(parts)["traffic"][layout]
  assert traffic["booked"] == traffic["bytes"]["update"] > 0
  assert traffic["send"] == traffic["inner"] == []
  # The reference reduces float32.
  reduced = {(kind, dtype) for kind, dtype, _ in traffic["update"]}
  assert reduced == {("all-reduce", "f32")}


@LONG
@pytest.mark.parametrize("layout", ["8", "4 of 4"])
def test_averages_send_the_bytes_that_are_booked(multidevice, layout):
  found = multidevice["averages"][layout]
  assert found["crossing"] == found["booked"]
  assert set(found["booked"]) == {"sparta", "second_moments"}
  assert found["right"]
  assert found["changed"] == found["expected"]


@LONGER
@pytest.mark.parametrize("layout", ["8", "4 of 4"])
def test_coded_averages_send_the_bytes_that_are_booked(more, layout):
  crossing, booked = more["coded_moments"][layout]
  assert crossing == booked > 0
