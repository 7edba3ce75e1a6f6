"""The claims of both papers about learning, from paper_claims.toml.

`python -m diloco reproduce` compares them with runs of configs/ablations.py and
configs/ladder.py.
"""

import tomllib
from typing import Any

from diloco.reproduce.claim import Claim
from diloco.util.shipped import PACKAGE

LADDER = "ladder"
# Per cent of the loss that Streaming DiLoCo calls negligible (section 3.3.2).
SMALL = 0.2


def read() -> tuple[Claim, ...]:
  """Reads the claims in the order of the file."""
  text = (PACKAGE / "reproduce/paper_claims.toml").read_text()
  found: list[dict[str, Any]] = tomllib.loads(text)["claims"]
  for claim in found:
    claim["than"] = tuple(claim["than"]) if "than" in claim else None
  return tuple(Claim(**claim) for claim in found)


CLAIMS = read()
