"""Context parallelism of a model of one's own: `torchrun --nproc-per-node 2` and the file."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.models.attention import causal_attention
from shoal.models.transformer import positions_from_zero

LETTERS, WIDTH, HEADS, SEQ = 8, 32, 4, 64


class Block(nn.Module):
    """Attention beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.attend = causal_attention  # in place of scaled_dot_product_attention: Shoal replaces it

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `[batch, seq, WIDTH]` to the same shape."""
        query, key, value = self.mixed(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.attend(query, key, value)
        return hidden + self.output(mixed.transpose(1, 2).flatten(-2))


class Copier(nn.Module):
    """Letters `[batch, seq]` to logits of letters `[batch, seq, LETTERS]`."""

    def __init__(self) -> None:
        super().__init__()
        self.letter = nn.Embedding(LETTERS, WIDTH)
        self.place = nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, LETTERS)
        self.positions = positions_from_zero  # in place of arange: Shoal replaces it

    def forward(self, letters: Tensor) -> Tensor:
        """The logits."""
        hidden = self.letter(letters) + self.place(self.positions(letters.shape[1], letters.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("shoal")
torch.manual_seed(0)
model = shoal.parallelize(Copier(), f"cp={ranks}")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(100):  # all ranks draw the same; each takes its part of every sequence
    letters = torch.randint(LETTERS, (16, SEQ))
    wanted = letters.roll(1, 1)  # the letter before, which another rank may hold
    part, targets = model.local_sequence(letters), model.local_sequence(wanted)
    loss = F.cross_entropy(model(part).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

print(f"loss {loss.item():.3f} with {part.shape[1]} of {SEQ} letters on this rank")
