"""A config file that reads a run's config.json, to repeat the run by hand.

python -m diloco.main --config=diloco/sweep/saved.py:RUN/config.json --workdir=ELSEWHERE

Fields that follow from others are left out, so that they also follow from flags.
Without a file, the config has the defaults; a sweep's --launch changes them by flags.
"""

import json
import pathlib

import ml_collections

from diloco.config import default_config
from diloco.config.resolve import leaves, saved_fields, underived
from diloco.errors import ConfigError
from diloco.util.command import one_line


def get_config(path: str = "") -> ml_collections.ConfigDict:
  if not path:
    return default_config()
  try:
    fields = saved_fields(json.loads(pathlib.Path(path).read_text()))
    c = default_config(*fields["plugins"])
    # train.steps gives the length of the run; train.tokens follows from it.
    c.update_from_flattened_dict(underived(leaves(c) | fields) | {"train.tokens": 0})
  except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
    raise ConfigError(
      f"{path} is no config.json of this version's runs: {one_line(error).rstrip('.')}."
    ) from error
  return c
