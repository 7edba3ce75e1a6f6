"""A config from the JSON that a sweep wrote, so that a run can be repeated by hand.

python -m diloco.main --config=diloco/sweep/saved.py:RUN/config.json --workdir=RUN
"""

import json

from diloco.config import ConfigError, default_config


def get_config(path: str = ""):
  if not path:
    raise ConfigError("saved.py needs a file: --config=.../saved.py:RUN/config.json.")
  c = default_config()
  with open(path) as file:
    saved = json.load(file)
  saved["overlap"]["taus"] = tuple(saved["overlap"]["taus"])  # JSON has only lists.
  c.update(saved)
  return c
