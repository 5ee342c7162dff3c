"""Small networks, their optimizers and batches, for the ranks of tests."""

import torch


def model(seed=0, kind="mlp"):
    """A small network of one of several kinds."""
    from torch import nn

    torch.manual_seed(seed)
    if kind == "mlp":
        return nn.Sequential(
            nn.Linear(20, 64),
            nn.ReLU(),
            nn.Linear(64, 300),
            nn.ReLU(),
            nn.Linear(300, 70),
            nn.ReLU(),
            nn.Linear(70, 10),
        )
    if kind == "cnn":
        return nn.Sequential(
            nn.Unflatten(1, (1, 4, 5)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(320, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    return Tied()


class Tied(torch.nn.Module):
    """Weights used twice, an attention that reads its projection's weight, a layer that is not always
    used.
    """

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(20, 32, bias=False)
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.spare = torch.nn.Linear(20, 20)
        self.head = torch.nn.Linear(20, 10)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 3 == 0:
            x = x + self.spare(x)
        h = self.embed(x).unsqueeze(1)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(torch.nn.functional.linear(h.squeeze(1), self.embed.weight.t()))


def optimizer_of(name, parameters):
    parameters = list(parameters)
    if name == "adam":
        return torch.optim.AdamW(parameters, lr=3e-3)
    if name in ("lars", "lamb"):
        from paceline.train import LAMB, LARS

        return (
            LARS(parameters, lr=0.5, weight_decay=1e-3, eta=0.02)
            if name == "lars"
            else LAMB(parameters, lr=0.01)
        )
    half = len(parameters) // 2
    return torch.optim.SGD(
        [{"params": parameters[:half]}, {"params": parameters[half:], "weight_decay": 1e-3}],
        lr=0.05,
        momentum=0.9,
    )


def batch(step, rank, size=8):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 20, generator=generator)
    return x, (x[:, :10].argmax(1))


def decoder(kind="gpt"):
    """A tiny decoder of the catalog, the same on all ranks, and a batch of ids for all of them."""
    from paceline.catalog.models.gpt import gpt
    from paceline.catalog.models.llama import llama

    torch.manual_seed(0)
    if kind == "gpt":
        net, _, _ = gpt(batch=4, seq=16, width=32, depth=4, heads=4, vocab=50, context=16)
    else:
        net, _, _ = llama(batch=4, seq=16, width=32, depth=4, heads=4, kv_heads=2, inner=64, vocab=50)
    ids = torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(1))
    return net, ids


def token_loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def alone(kind, steps):
    """Losses of one process with the whole batch."""
    net, ids = decoder(kind)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = token_loss(net(ids), ids)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def descend(net, opt, ids):
    """A step; its loss."""
    opt.zero_grad()
    loss = token_loss(net(ids), ids)
    loss.backward()
    opt.step()
    return loss.item()
