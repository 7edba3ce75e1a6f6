"""The model of `diloco.model.decoder` in torch, for benchmarks of other packages."""

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, HEADS, WIDTH, VOCABULARY, LENGTH = 4, 2, 128, 2048, 128
Z_LOSS, BOS = 1e-4, 2


class Block(nn.Module):
  """A block of `diloco.model.decoder`."""

  def __init__(self) -> None:
    super().__init__()
    self.norms = nn.ModuleList(_norm(WIDTH) for _ in range(2))
    self.head_norms = nn.ModuleList(_norm(WIDTH // HEADS) for _ in range(2))
    self.qkv, self.out = _linear(WIDTH, 3 * WIDTH), _linear(WIDTH, WIDTH)
    self.up, self.down = _linear(WIDTH, 4 * WIDTH), _linear(4 * WIDTH, WIDTH)
    for matrix in self.qkv.weight.data.split(WIDTH):  # Each of q, k and v by itself.
      nn.init.xavier_uniform_(matrix)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    split = (*x.shape[:-1], HEADS, WIDTH // HEADS)
    q, k, v = (
      part.reshape(split).transpose(1, 2)
      for part in self.qkv(self.norms[0](x)).split(WIDTH, -1)
    )
    y = F.scaled_dot_product_attention(
      self.head_norms[0](q), self.head_norms[1](k), v, is_causal=True
    )
    x = x + self.out(y.transpose(1, 2).reshape(x.shape))
    return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Decoder(nn.Module):
  """The whole model; called with (ids,), it returns the mean loss over tokens."""

  def __init__(self) -> None:
    super().__init__()
    self.tokens, self.positions = (
      nn.Parameter(torch.randn(rows, WIDTH) / WIDTH**0.5)
      for rows in (VOCABULARY, LENGTH)
    )
    self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
    self.norm = _norm(WIDTH)

  def forward(self, batch: tuple[torch.Tensor]) -> torch.Tensor:
    targets = batch[0].long()
    inputs = F.pad(targets[:, :-1], (1, 0), value=BOS)
    x = self.blocks(F.embedding(inputs, self.tokens) + self.positions)
    logits = (self.norm(x) @ self.tokens.T).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten())
    if self.training:
      loss = loss + Z_LOSS * logits.logsumexp(-1).square().mean()
    return loss


def _norm(width: int) -> nn.LayerNorm:
  return nn.LayerNorm(width, eps=1e-6, bias=False)


def _linear(inputs: int, outputs: int) -> nn.Linear:
  layer = nn.Linear(inputs, outputs, bias=False)
  nn.init.xavier_uniform_(layer.weight)
  return layer
