"""Says which program XLA is compiling, if that takes long."""

import sys
import threading

import jax
import tqdm

# JAX records these names right before and right after XLA compiles a program.
_BEFORE = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_AFTER = "/jax/core/compile/backend_compile_duration"
_PATIENCE = 2.0  # Seconds that a compilation takes before a line tells it.


class _Clock(threading.local):
  """The timer of the program that this thread compiles."""

  timer: threading.Timer | None = None


_clock = _Clock()


def announce_compilations() -> None:
  """Writes a line to stderr for every compilation that takes long."""
  jax.monitoring.register_event_duration_secs_listener(_listen)


def _listen(event: str, duration_secs: float, **about: str | int) -> None:
  del duration_secs
  if event not in (_BEFORE, _AFTER):
    return
  if _clock.timer:  # Also of a compilation that failed, or if this listens twice.
    _clock.timer.cancel()
    _clock.timer = None
  if event == _BEFORE:
    program = str(about.get("fun_name", "a program")).removeprefix("jit(").lstrip("_")
    line = f"Compiling {program.removesuffix(')')} ..."
    _clock.timer = threading.Timer(_PATIENCE, tqdm.tqdm.write, (line, sys.stderr))
    _clock.timer.daemon = True
    _clock.timer.start()
