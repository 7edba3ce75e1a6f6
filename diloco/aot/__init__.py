"""Dry run for TPUs and GPUs: compiles training programs without the devices."""

import os


def look_for_no_device() -> None:
  """Keeps JAX on the CPU; libtpu looks for no TPU and for no process that uses one."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
