"""An outer rate and momentum that fall along a cosine, as in Pier (arXiv 2511.17849).

  outer.optimizer = "falling(momentum=0.9, nesterov=True, final_fraction=0.1)"

Late in training, the inner rate is small and so are new outer gradients, but a large
momentum still contains older, larger ones. So both may fall, from the first update of a
fragment on, those of a warm start included; the optimizer counts them.

The source is the authors' code, see `warm_start`: it lowers the rate from 1.1 to 0.9
and the momentum from 0.99 to 0.9. Before that, its rate rises along a line; this file
does not do that.
"""

import dataclasses
from typing import Any

import optax

from diloco.algorithm.optimizers import OWN, TUNED
from diloco.config import Config
from diloco.spec import plugins
from diloco.spec.call_text import parse

NAME = "falling"


def falling(
  learning_rate: optax.ScalarOrSchedule,
  momentum: optax.ScalarOrSchedule,
  nesterov: bool = False,
  final_fraction: float = 1.0,
  final_momentum: float | None = None,
  syncs: int = 0,
) -> optax.GradientTransformation:
  """Makes the optimizer.

  Args:
    learning_rate, momentum, nesterov: of SGD, before the first update.
    final_fraction: final learning rate / initial one, from 0 to 1.
    final_momentum: from 0 to 1; None: the momentum is constant.
    syncs: outer updates of a fragment until both are at their final values, which later
      updates keep. A run's config has as many as the fragment with the most updates.

  Raises:
    ValueError: an argument is out of range, or nothing falls.
  """
  if not isinstance(syncs, int) or isinstance(syncs, bool) or syncs < 1:
    raise ValueError(f"syncs is {syncs}, but must be a whole number of at least 1")
  if not (0 <= final_fraction <= 1 and 0 <= (final_momentum or 0) <= 1):
    raise ValueError(
      f"final_fraction is {final_fraction} and final_momentum is {final_momentum}, but"
      " they must lie in 0..1"
    )
  if final_fraction == 1 and final_momentum is None:
    raise ValueError("nothing falls; give final_fraction or final_momentum")
  last = max(syncs - 1, 1)
  rate = optax.cosine_decay_schedule(learning_rate, last, alpha=final_fraction)
  fall, end = optax.cosine_decay_schedule(1.0, last), final_momentum
  end = momentum if end is None else end
  # Its state has the current numbers, which the outer step logs.
  return optax.inject_hyperparams(optax.sgd)(
    learning_rate=rate,
    momentum=lambda count: end + (momentum - end) * fall(count),
    nesterov=nesterov,
  )


@dataclasses.dataclass(frozen=True)
class Falling(plugins.Extension):
  """`falling` has no fields of its own; outer.optimizer chooses it."""

  def fill_in(self, c: Config) -> dict[str, Any]:
    """Writes the number of updates into the text, so that it ends with the run."""
    name, arguments = parse("outer.optimizer", c.outer.optimizer)
    if name != NAME or arguments.get("syncs"):
      return {}
    schedule = c.make_schedule()
    if all(x.updates_early(c) for x in c.extensions):
      schedule = dataclasses.replace(schedule, joint_steps=0)
    arguments["syncs"] = max(c.num_syncs(schedule))
    text = ", ".join(f"{k}={x!r}" for k, x in arguments.items())
    return {"outer.optimizer": f"{NAME}({text})"}


OWN["outer.optimizer"][NAME] = falling
TUNED.add(NAME)
plugins.register(NAME, Falling)
