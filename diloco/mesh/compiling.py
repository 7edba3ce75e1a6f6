"""Says which program XLA is compiling, if that takes long."""

import functools
import sys
import threading

import jax
import tqdm

# JAX records these names right before and right after XLA compiles a program.
_BEFORE = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_AFTER = "/jax/core/compile/backend_compile_duration"
_PATIENCE = 2.0  # Seconds of compilation until a line names the program.


class _Clock(threading.local):
  """The timer of the program that this thread compiles."""

  timer: threading.Timer | None = None


_clock = _Clock()


@functools.cache  # Once per process.
def announce_compilations() -> None:
  """Writes a line to stderr for every compilation that takes long."""
  jax.monitoring.register_event_duration_secs_listener(_listen)


def _listen(event: str, duration_secs: float, **about: str | int) -> None:
  del duration_secs
  if event == _BEFORE:
    program = str(about.get("fun_name", "a program")).removeprefix("jit(").lstrip("_")
    line = f"Compiling {program.removesuffix(')')} ..."
    _clock.timer = threading.Timer(_PATIENCE, tqdm.tqdm.write, (line, sys.stderr))
    _clock.timer.daemon = True
    _clock.timer.start()
  elif event == _AFTER and _clock.timer:
    _clock.timer.cancel()
    _clock.timer = None
