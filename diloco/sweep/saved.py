"""A config file that reads a run's config.json, to repeat the run by hand.

python -m diloco.main --config=diloco/sweep/saved.py:RUN/config.json --workdir=ELSEWHERE
"""

import json
import pathlib

from diloco.config import ConfigError, default_config


def get_config(path: str = ""):
  if not path:
    raise ConfigError("saved.py needs a file: --config=.../saved.py:RUN/config.json.")
  saved = json.loads(pathlib.Path(path).read_text())
  saved["overlap"]["taus"] = tuple(saved["overlap"]["taus"])  # JSON has only lists.
  c = default_config()
  c.update(saved)
  return c
