"""The documents' probe finds leaks of every kind, and refuses no model for how it keeps documents apart."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.errors import ModelError
from shoal.parallel import DocumentsGuard, require_documents

VOCABULARY, WIDTH = 61, 16


class Mixed(nn.Module):
    """A model that mixes a sequence as the test says: a function of the hidden states and the positions."""

    def __init__(self, mix, limit=1024):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(limit, WIDTH)
        self.mix = mix
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1]).expand_as(tokens)
        hidden = self.embed(tokens) + self.place(position_ids)
        return self.head(hidden + self.mix(hidden, position_ids))


def starts_of(positions):
    return torch.arange(positions.shape[1]) - positions


def numbers_of(positions):
    return (positions == 0).cumsum(1)


def own(positions):
    """Which tokens see which: the earlier ones of their own document."""
    every, starts = torch.arange(positions.shape[1]), starts_of(positions)
    return (starts[:, :, None] == starts[:, None]) & (every[:, None] >= every)


def causal(positions):
    every = torch.arange(positions.shape[1])
    return (every[:, None] >= every).expand(len(positions), -1, -1)


def distances(positions):
    every = torch.arange(positions.shape[1])
    return every[:, None] - every


def attend(hidden, seen):
    return F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=seen)


def apart(hidden, positions):
    return attend(hidden, own(positions))


def selected(hidden, seen, count=4):
    """Which tokens see which: of those that they see, the few with the largest scores."""
    scores = (hidden @ hidden.transpose(1, 2)).masked_fill(~seen, -torch.inf)
    return torch.zeros_like(seen).scatter(-1, scores.topk(min(count, seen.shape[-1]), -1).indices, True)


# -- models that leak -----------------------------------------------------------------------------------


def far(hidden, positions):
    """Sees other documents at distances of more than 150 tokens alone."""
    return attend(hidden, own(positions) | (causal(positions) & (distances(positions) > 150)))


def many(hidden, positions):
    """Sees other documents if a sample has more than six."""
    is_many = numbers_of(positions).amax(1) > 6
    return attend(hidden, own(positions) | (causal(positions) & is_many[:, None, None]))


def third(hidden, positions):
    """Sees other documents from the third one on."""
    return attend(hidden, own(positions) | (causal(positions) & (numbers_of(positions) > 2)[:, :, None]))


def over_time(hidden, positions):
    """A norm over the time axis, which sees later documents too."""
    return apart(hidden, positions) / hidden.std(1, keepdim=True)


def over_batch(hidden, positions):
    """A norm over the samples of a batch."""
    return apart(hidden - hidden.mean(0), positions)


def of_equal_length(hidden, positions):
    """Takes documents of one length for one document."""
    starts = starts_of(positions)
    lengths = (starts[:, :, None] == starts[:, None]).sum(-1)
    alike = lengths[:, :, None] == lengths[:, None]
    return attend(hidden, own(positions) | (causal(positions) & alike))


def selection(hidden, positions):
    """Selects tokens of all documents, and attends to those of its own: others take places in the choice."""
    itself = torch.eye(hidden.shape[1], dtype=torch.bool)
    return attend(hidden, own(positions) & (selected(hidden, causal(positions)) | itself))


def chunks(hidden, positions):
    """Attends within chunks of the sample."""
    chunk = torch.arange(positions.shape[1]) // 16
    return attend(hidden, causal(positions) & (chunk[:, None] == chunk))


def window(hidden, positions):
    """Attends to the last tokens, of whichever document."""
    return attend(hidden, causal(positions) & (distances(positions) < 4))


def hashed(hidden, positions):
    """Attends to tokens of the same hash."""
    hashes = hidden[..., :4].argmax(-1)
    return attend(hidden, causal(positions) & (hashes[:, :, None] == hashes[:, None]))


def blocks(hidden, positions):
    """Attends to its own document, and to one earlier block of the sample, as block-sparse attention does."""
    block = torch.arange(positions.shape[1]) // 8
    return attend(hidden, own(positions) | (block[:, None] == block + 3))


def global_token(hidden, positions):
    """Sees the first token of the sample from everywhere."""
    seen = own(positions).clone()
    seen[:, :, 0] = True
    return attend(hidden, seen)


class Memory:
    """Carries the last hidden state into the next call."""

    state = None

    def __call__(self, hidden, positions):
        before, self.state = self.state, hidden.mean((0, 1)).detach()
        return apart(hidden, positions) + (0.0 if before is None else before)


class InTraining(nn.Module):
    """Sees the other documents in training alone."""

    def forward(self, hidden, positions):
        return attend(hidden, causal(positions) if self.training else own(positions))


@pytest.mark.parametrize(
    "mix",
    [
        *(far, many, third, over_time, over_batch, of_equal_length, selection, chunks, window, hashed),
        *(blocks, global_token, Memory(), InTraining()),
    ],
    ids=lambda mix: getattr(mix, "__name__", type(mix).__name__),
)
def test_a_leak_is_found(mix):
    with pytest.raises(ModelError, match="cannot keep the documents of packed samples apart"):
        require_documents(Mixed(mix))


@pytest.mark.parametrize("mix", [many, third, over_time, selection, window])
def test_a_leak_is_found_in_samples_as_short_as_a_model_takes(mix):
    with pytest.raises(ModelError, match="cannot keep the documents of packed samples apart"):
        require_documents(Mixed(mix, limit=32))


# -- models that do not ---------------------------------------------------------------------------------


def selection_apart(hidden, positions):
    return attend(hidden, own(positions) & selected(hidden, own(positions)))


def chunks_apart(hidden, positions):
    chunk = positions // 16
    return attend(hidden, own(positions) & (chunk[:, :, None] == chunk[:, None]))


def window_apart(hidden, positions):
    return attend(hidden, own(positions) & (distances(positions) < 4))


def hashed_apart(hidden, positions):
    hashes = hidden[..., :4].argmax(-1)
    return attend(hidden, own(positions) & (hashes[:, :, None] == hashes[:, None]))


def both_ways(hidden, positions):
    starts = starts_of(positions)
    return attend(hidden, starts[:, :, None] == starts[:, None])


def over_time_apart(hidden, positions):
    """A norm over the tokens of each document so far."""
    seen = own(positions).to(hidden)
    return hidden / (seen @ hidden.square() / seen.sum(-1, keepdim=True)).sqrt()


class Counts(nn.Module):
    """Counts its calls, and drops values in training."""

    calls = 0

    def forward(self, hidden, positions):
        self.calls += 1
        return F.dropout(apart(hidden, positions), 0.5, self.training)


@pytest.mark.parametrize(
    "mix",
    [
        *(apart, selection_apart, chunks_apart, window_apart, hashed_apart, both_ways, over_time_apart),
        Counts(),
    ],
    ids=lambda mix: getattr(mix, "__name__", type(mix).__name__),
)
def test_a_model_that_keeps_documents_apart_is_let_through(mix, recwarn):
    require_documents(Mixed(mix))
    assert not [each for each in recwarn if "prob" in str(each.message)]


# -- models of transformers -----------------------------------------------------------------------------


def small(kind, *, masked=False, **changes):
    pytest.importorskip("transformers")
    from shoal.models import tiny_hugging_face

    if kind not in tiny_hugging_face.kinds():
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    return (tiny_hugging_face.masked if masked else tiny_hugging_face.causal)(kind, **changes).eval()


def test_windows_count_if_samples_are_longer():
    """This kind chooses among tokens of all documents, in samples that are longer than its window."""
    model = small("doge", keep_window_size=256)
    guard = DocumentsGuard(model)
    guard.require(is_promised=True, length=200)
    with pytest.raises(ModelError, match="differs from that for the document alone"):
        guard.require(is_promised=True, length=300)
    with pytest.raises(ModelError, match="differs from that for the document alone"):
        require_documents(model)


@pytest.mark.parametrize("kind", ["modernbert", "modernvbert", "neomme", "ultrabert"])
def test_a_masked_model_with_windows_keeps_them_in_packed_documents(kind):
    model = small(kind, masked=True)
    lengths = (30, 3, 1, 14)
    tokens = torch.randint(20, 90, (2, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths]).expand_as(tokens)
    with torch.no_grad():
        alone = [model(part).logits for part in tokens.split(lengths, 1)]
        DocumentsGuard(model).require(is_promised=True)
        packed = model(tokens, position_ids=positions).logits
    # Rounding of fp32 over two layers; what a window of 4 tokens leaves out moves logits by 0.1.
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=2e-5)
