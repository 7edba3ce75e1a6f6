"""Explains out-of-memory errors: which program did not fit, and which fields help."""

import pathlib
import re
import traceback

import jax

PACKAGE = pathlib.Path(__file__).parents[1]
_SHARD = "more devices (mesh.fsdp)"
_STEP = (
  "a larger train.accumulate, model.remat=full, a smaller model.loss_chunk such as 256,"
  f" or {_SHARD}"
)
# {file or folder that called the program: (name of the program, remedy)}
_PROGRAMS = {
  "algorithm/inner.py": ("the inner step", _STEP),
  "algorithm/method.py": ("an inner step or the first state", _STEP),
  "log/log.py": ("the inner step", _STEP),  # The log waits for the inner step.
  "algorithm/outer.py": ("the outer step", f"outer.offload=true or {_SHARD}"),
  "algorithm/state.py": (
    "parameters and optimizer states",
    f"model.param_dtype=bfloat16, outer.offload=true, a smaller model, or {_SHARD}",
  ),
  "evaluate/": ("the evaluation", "a smaller eval.batch_size or model.loss_chunk=256"),
  "model/sampling.py": ("text generation", "log.sample_tokens=0"),
  "checkpoint/checkpoints.py": ("restoring the checkpoint", _SHARD),
  "data/": ("the batches", "a smaller train.batch_size or data.prefetch"),
}


def explain(error: BaseException) -> str | None:
  """Returns a sentence about an out-of-memory error; None for any other error."""
  text = str(error)
  exhausted = isinstance(error, jax.errors.JaxRuntimeError) and (
    "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
  )
  if not (exhausted or isinstance(error, MemoryError)):
    return None
  name, remedy = "a program", f"a smaller train.batch_size, or {_SHARD}"
  # The innermost frame comes last, so its program replaces those of earlier frames.
  for frame in traceback.extract_tb(error.__traceback__):
    path = pathlib.Path(frame.filename)
    if path.is_relative_to(PACKAGE):
      name_here = path.relative_to(PACKAGE).as_posix()
      known = [p for p in _PROGRAMS if name_here.startswith(p)]
      name, remedy = _PROGRAMS[known[0]] if known else (name, remedy)
  size = re.search(r"alloc\w* ([\d.]+ ?\w*)", text)
  device = jax.devices()[0].device_kind
  return (
    f"out of memory: {name} did not fit on {device}"
    + (f" (asked for {size[1]})" if size else "")
    + f"; {remedy} helps."
  )
