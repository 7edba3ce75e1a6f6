"""Tests the reading of HLO: asynchronous collectives, two slices, overlap.

The lines are shortened from programs that XLA compiled for TPU v5e and for H100.
"""

import pathlib
import types

import numpy as np
import pytest

from diloco.aot import hlo

# fixtures/make_gpu_hlo.py made the programs for GPUs. JAX 0.10 prints a synchronous
# collective as a start and a done side by side, JAX 0.12 as one line.
FIXTURES = pathlib.Path(__file__).parent / "fixtures"
VERSIONS = ("0.10.2", "0.12.0.1")

PERMUTE = (
  "  %collective-permute-start.1 = (u8[1,1,600]{2,1,0}, u8[1,1,600]{2,1,0:T(4,128)},"
  " u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), channel_id=1,"
  " source_target_pairs={{0,2},{1,3},{2,0},{3,1}}"
)
SEND = (
  "  %send.3 = (u8[1,1,600]{2,1,0}, u32[], token[]) send(%p, %after-all.3),"
  " channel_id=8, is_host_transfer=true, frontend_attributes={"
  '_xla_host_transfer_rendezvous="ppermute.3_0",'
  "_xla_megascale_target={{100000->200000},{200000->100000},{100001->200001},"
  "{200001->100001}}}"
)
RECV = SEND.replace("%send.3", "%recv.3").replace("send(%p, ", "recv(")
LOOP = "  %while.2 = (s32[], f32[4]{0}) while(%tuple.1), condition=%c, body=%b"


def mesh(replica=2, fsdp=2):
  return types.SimpleNamespace(
    axis_names=("replica", "fsdp"),
    devices=np.zeros((replica, fsdp)),
    shape={"replica": replica, "fsdp": fsdp},
  )


def program(*lines):
  return "HloModule m, is_scheduled=true\n\nENTRY %main (p: u8[]) -> u8[] {\n" + (
    "\n".join(lines) + "\n}\n"
  )


PERMUTED = "  %d = u8[600]{0} collective-permute-done(%collective-permute-start.1)"
RECEIVED = "  %e = (u8[1,1,600]{2,1,0}, token[]) recv-done(%recv.3), channel_id=7"
SENT = "  %f = token[] send-done(%send.3), channel_id=8"


@pytest.mark.parametrize(
  ("lines", "hidden", "loops"),
  [
    ((PERMUTE, LOOP, LOOP, PERMUTED), 2, 2),
    ((LOOP, PERMUTE, LOOP, PERMUTED), 1, 2),
    ((PERMUTE, PERMUTED, LOOP), 0, 1),
    ((LOOP, PERMUTE, PERMUTED), 0, 1),
    # The send ends early. The end of the recv counts: the payload has arrived.
    ((SEND, RECV, SENT, LOOP, RECEIVED), 1, 1),
    ((SEND, RECV, SENT, RECEIVED, LOOP), 0, 1),
  ],
)
def test_loops_between_the_start_and_the_end_of_an_exchange(lines, hidden, loops):
  [window] = hlo.windows(program(*lines), mesh())
  assert (window.hidden, window.loops) == (hidden, loops)
  assert (window.collective.dtype, window.collective.nbytes) == ("u8", 600)


@pytest.mark.parametrize("line", [PERMUTE, SEND])
def test_bytes_of_a_replica_are_those_of_all_its_devices(line):
  assert hlo.replica_bytes(program(line), mesh()) == 2 * 600
  assert hlo.replica_bytes(program(line), mesh(replica=1, fsdp=4)) == 0


ONE, PAIRS = "f32[100]{0}", "{{0,2},{1,3}}"


@pytest.mark.parametrize(
  ("result", "kind", "groups", "sent"),
  [
    (ONE, "all-gather", PAIRS, 400 / 2),
    (ONE, "all-reduce", "{{0,1,2,3}}", 400 * 2 * 3 / 4),
    (ONE, "reduce-scatter", PAIRS, 400),
    (ONE, "all-to-all", PAIRS, 400 / 2),
    # Asynchronous and combined collectives.
    ("(f32[100]{0}, f32[300]{0})", "all-reduce-start", PAIRS, 1600),
    (ONE, "all-reduce-start", PAIRS, 400),
    ("((f32[50], f32[150]), (f32[100], f32[300]))", "all-gather-start", PAIRS, 800),
    ("(f32[50]{0}, f32[100]{0})", "all-gather-start", PAIRS, 200),
  ],
)
def test_bytes_sent_by_a_device(result, kind, groups, sent):
  line = f"  %x = {result} {kind}(%p, %q), replica_groups={groups}"
  assert hlo.replica_bytes(program(line), mesh()) == 2 * sent


def test_bytes_with_several_replicas_on_each_of_several_slices():
  # Four replicas of two devices, on two slices of four devices. XLA for v5e splits a
  # permutation by one replica into parts inside slices and parts between them.
  across = lambda i, *pairs: (
    f"  %send.{i} = (u8[100]{{0}}, u32[], token[]) send(%p, %t), frontend_attributes={{"
    f"_xla_megascale_target={{{','.join(f'{{{pair}}}' for pair in pairs)}}},"
    '_xla_megascale_transfer_type="ONE_TO_ONE"}'
  )
  forth = ("100000->200003", "200000->100003", "100001->200002", "200001->100002")
  back = ("100003->200000", "200003->100000", "100002->200001", "200002->100001")
  by_two = [f"{a}0000{d}->{b}0000{d}" for a, b in ((1, 2), (2, 1)) for d in range(4)]
  within = "  %c = u8[100]{0} collective-permute(%p), source_target_pairs={{2,0},{3,1}}"
  text = program(
    across(1, *forth),
    across(2, *back),
    across(3, *by_two),
    within,
    within.replace("{{2,0},{3,1}}", "{{0,2},{1,3}}"),
  )
  wide, at = mesh(replica=4, fsdp=2), lambda i: types.SimpleNamespace(slice_index=i)
  wide.devices = np.array([[at(r // 2)] * 2 for r in range(4)], dtype=object)
  # Both devices of a replica send their parts to three other replicas.
  assert hlo.replica_bytes(text, wide) == 2 * 3 * 100


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("stream", "hidden"), [("own", 1), ("shared", 0)])
def test_a_program_for_gpus_of_each_version_of_jax(version, stream, hidden):
  text = (FIXTURES / f"h100_{stream}_{version}.hlo").read_text()
  [window] = hlo.windows(text, mesh(4, 2))
  assert (window.hidden, window.loops) == (hidden, 1)
  assert (window.collective.kind, window.collective.dtype) == ("all-gather", "u8")
  # Both devices of a replica send 74,340 bytes to three other replicas.
  assert hlo.replica_bytes(text, mesh(4, 2)) == 2 * 3 * 74340
  # The collectives of fsdp, in loops, are read as well.
  inside = [c for c in hlo.collectives(text) if c.name != window.collective.name]
  assert {c.kind for c in inside} >= {"all-gather", "reduce-scatter", "all-reduce"}
  assert all(len(group) == 2 for c in inside for group in c.groups)
  assert all(c.groups and c.nbytes for c in inside)


@pytest.mark.parametrize(
  ("dtype", "size"),
  [
    *[("pred", 1), ("u4", 1), ("s8", 1), ("u16", 2), ("bf16", 2), ("f32", 4)],
    *[("s64", 8), ("u64", 8), ("f64", 8), ("c64", 8), ("c128", 16)],
    *[("f8e4m3fn", 1), ("f8e5m2", 1), ("f8e8m0fnu", 1), ("f4e2m1fn", 1)],
  ],
)
def test_bytes_of_every_type(dtype, size):
  line = f"  %x = {dtype}[100]{{0}} all-to-all(%p), replica_groups={{{{0,2}},{{1,3}}}}"
  [collective] = hlo.collectives(line)
  assert (collective.dtype, collective.nbytes) == (dtype, 100 * size)


def test_an_unknown_type_is_an_error():
  [collective] = hlo.collectives("  %x = q7[4]{0} all-reduce(%p), replica_groups={}")
  with pytest.raises(ValueError, match="HLO type 'q7' is unknown; add it to"):
    _ = collective.nbytes


@pytest.mark.parametrize(
  "kind",
  ["ragged-all-to-all", "collective-broadcast", "collective-broadcast-start", "swap"],
)
def test_an_unknown_collective_is_an_error(kind):
  line = f"  %x = (f32[4]{{0:T(128)}}, u32[]) {kind}(%p), replica_groups={{{{0,2}}}}"
  for read in (hlo.collectives, lambda text: hlo.windows(text, mesh())):
    with pytest.raises(ValueError, match=f"bytes of collective '{kind}' are not"):
      read(program(line))


def test_ends_and_attributes_that_repeat_groups_are_no_collectives():
  done = "  %d = f32[8]{0} all-to-all-done(%s), replica_groups={{0,2},{1,3}}"
  attribute = "  %r = f32[4] recv(%a), _xla_send_recv_source_target_pairs={{0,2}}"
  assert hlo.collectives(program(done, attribute)) == []


@pytest.mark.parametrize(
  ("lines", "message"),
  [
    ((SEND, SENT), r'send.3 \(.*="ppermute.3_0"\) has 0 recv instead of one'),
    ((SEND, RECV, RECV), "has 2 recv"),
    ((SEND.replace("_rendezvous", ""), RECV), r"\(no rendezvous\) has 0"),
  ],
)
def test_a_send_without_its_recv_is_an_error(lines, message):
  with pytest.raises(ValueError, match=message):
    hlo.windows(program(*lines), mesh())


def test_only_collectives_of_the_entry_computation_have_windows():
  body = "\n%body (p: f32[4]) -> f32[4] {\n" + PERMUTE + "\n" + PERMUTED + "\n}\n"
  text = program(LOOP).replace("\nENTRY", f"{body}\nENTRY") + body.replace("y", "y.2")
  assert len(hlo.collectives(text)) == 2
  assert hlo.windows(text, mesh()) == []


def test_groups_in_all_notations():
  permuted = "mesh['a'=3,'b'=2], device_ids=([2,3]T(1,0)) {'a'}"
  lines = [
    "%a = u8[2,1,40]{2,1,0} all-gather(%p), replica_groups=[2,2]<=[2,2]T(1,0)",
    "%b = (f32[8], f32[16]) all-gather-start(%q), replica_groups={{0,1},{2,3}}",
    "%d = f32[4]{0} all-reduce(%r), replica_groups=mesh['a'=2,'b'=3] {'b'}, to_apply",
    f"%e = (f32[4]{{0}}, f32[]) all-reduce(%r, %s), replica_groups={permuted}",
    "%c = f32[3,5]{1,0} add(f32[3,5] %x, f32[3,5] %y)",
  ]
  a, b, d, e, f = hlo.collectives("\n".join(lines))
  assert (a.dtype, a.nbytes, a.groups) == ("u8", 2 * 1 * 40, ((0, 2), (1, 3)))
  assert (b.kind, b.shape, b.groups) == ("all-gather", (16,), ((0, 1), (2, 3)))
  assert d.groups == ((0, 1, 2), (3, 4, 5))
  assert (e.nbytes, f.nbytes) == (16, 4)
  assert e.groups == f.groups == ((0, 1, 2), (3, 4, 5))
