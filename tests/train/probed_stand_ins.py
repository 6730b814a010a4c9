"""A model whose forward in evaluation mode, as a probe at start makes it, waits until a file is there."""

import os
import time
from pathlib import Path

from torch import nn

from shoal.models.attention import causal_attention


class Waiting(nn.Module):
    """Attention alone. `WAITING` names a folder: it writes `begun` there, and waits for `go`."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 16), nn.Linear(16, 512, bias=False)
        self.attend = causal_attention

    def forward(self, tokens):
        folder = Path(os.environ["WAITING"])
        if not self.training:
            (folder / "begun").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        heads = self.embed(tokens).unflatten(-1, (2, -1)).transpose(1, 2)
        return self.head(self.attend(heads, heads, heads).transpose(1, 2).flatten(2))
