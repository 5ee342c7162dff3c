"""Ten training scripts as people write them. All that they know of Paceline is `model, optimizer =
parallelize(model, optimizer)`.

`parallelize` is `paceline.train.parallelize` with a plan, or torch's DistributedDataParallel, or a reference
written by hand. Each script fills `log` with what its user would print or keep; `rank` picks the samples,
`folder` is where files go.
"""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

#: updates of each script, and of them those before the script is stopped and started again
STEPS, STOP = 24, 12
FEATURES, HIDDEN, CLASSES, TOKENS = 16, 64, 4, 32
CLIP, DECAY, OVERFLOW = 0.1, 0.8, 5
CENTRES = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A body with layers large enough to be compressed, and a head."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Dropout(dropout), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()
        )
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


class Language(nn.Module):
    """The next token from the last; the output layer has the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.output = nn.Linear(HIDDEN, TOKENS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(torch.tanh(self.mix(self.embedding(tokens))))


def build(make=Net, **options):
    """The same module on every rank."""
    torch.manual_seed(0)
    return make(**options)


def batch(step, rank, count=16):
    """Noisy points round the centres of their classes; other ones for every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return CENTRES[labels] + torch.randn(count, FEATURES, generator=generator), labels


def snapshot(model):
    """A copy of what is in the model now."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def accumulation(parallelize, log, rank, folder):
    """Four small batches make one update."""
    net = build()
    model, optimizer = parallelize(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    for step in range(STEPS):
        for part in range(4):
            x, y = batch(4 * step + part, rank, count=4)
            loss = cross_entropy(model(x), y) / 4
            loss.backward()
            log["losses"].append(4 * loss.item())
        optimizer.step()
        optimizer.zero_grad()


def clipping(parallelize, log, rank, folder):
    """Gradients are clipped by their common norm."""
    net = build()
    model, optimizer = parallelize(net, torch.optim.SGD(net.parameters(), lr=0.5))
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        log["losses"].append(loss.item())
        log["norms"].append(float(norm))


def schedule(parallelize, log, rank, folder):
    """The learning rate warms up from zero and falls to zero again, well before the end."""
    net = build()
    model, optimizer = parallelize(net, torch.optim.Adam(net.parameters(), lr=0.02))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: max(0.0, min(step / 3, 1 - (step - 3) / 6))
    )
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        log["rates"].append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        log["losses"].append(loss.item())
    assert log["rates"][-1] == 0


def scaling(parallelize, log, rank, folder):
    """Losses are scaled; in one step that of one rank overflows."""
    net = build()
    model, optimizer = parallelize(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        overflow = step == OVERFLOW and rank == 0
        scaler.scale(loss * 1e38 if overflow else loss).backward()
        if step == OVERFLOW:
            log["before"] = snapshot(net)
        scaler.step(optimizer)
        if step == OVERFLOW:
            log["after"] = snapshot(net)
        scaler.update()
        log["losses"].append(loss.item())
        log["scales"].append(scaler.get_scale())


def averaged(parallelize, log, rank, folder):
    """A moving average of the parameters is kept beside the model."""
    net = build()
    model, optimizer = parallelize(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    log["start"] = snapshot(net)
    ema = {name: p.detach().clone() for name, p in net.named_parameters()}
    parameters = dict(net.named_parameters())
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in parameters.items():
                ema[name].lerp_(p, 1 - DECAY)
        log["losses"].append(loss.item())
        log["history"].append(snapshot(net))
    log["ema"] = ema


def frozen(parallelize, log, rank, folder):
    """The first layers keep what they have learnt elsewhere; the optimizer has the others only."""
    net = build()
    net.body[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    model, optimizer = parallelize(net, optimizer)
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        log["losses"].append(loss.item())


def tied(parallelize, log, rank, folder):
    """A language model whose output layer is its embedding."""
    net = build(Language)
    model, optimizer = parallelize(net, torch.optim.SGD(net.parameters(), lr=0.2))
    for step in range(STEPS):
        tokens = torch.randint(TOKENS, (32,), generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens), (5 * tokens + 1) % TOKENS)
        loss.backward()
        optimizer.step()
        log["losses"].append(loss.item())
        log["tied"].append(net.output.weight is net.embedding.weight)


def several(parallelize, log, rank, folder):
    """An encoder and a classifier with an optimizer each; the classifier learns twice, once with the encoder
    held still.
    """
    whole = build()
    encoder, encoding = parallelize(whole.body, torch.optim.Adam(whole.body.parameters(), lr=0.005))
    classifier, classifying = parallelize(
        whole.head, torch.optim.SGD(whole.head.parameters(), lr=0.05, momentum=0.9)
    )
    for step in range(STEPS):
        x, y = batch(step, rank)
        before = snapshot(whole.body)
        classifying.zero_grad()
        cross_entropy(classifier(encoder(x).detach()), y).backward()
        classifying.step()
        middle = snapshot(whole.body), snapshot(whole.head)
        encoding.zero_grad()
        classifying.zero_grad()
        loss = cross_entropy(classifier(encoder(x)), y)
        loss.backward()
        encoding.step()
        log["losses"].append(loss.item())
        log["others"].append([before, middle[0]])
        log["others"].append([middle[1], snapshot(whole.head)])


def resume(parallelize, log, rank, folder):
    """Rank 0 saves what a plain loop would save; the script is stopped, and started again from there."""
    path = folder / "checkpoint.pt"
    while len(log["losses"]) < STEPS:
        net = build()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.8)
        first = 0
        if path.exists():
            saved = torch.load(path)
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
            first = saved["step"]
            log["moments"] = [float(optimizer.state[p]["exp_avg"].norm()) for p in net.parameters()]
        model, optimizer = parallelize(net, optimizer)
        for step in range(first, STEPS):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            log["losses"].append(loss.item())
            log["rates"].append(scheduler.get_last_lr()[0])
            if step + 1 == STOP:
                if rank == 0:
                    torch.save(
                        {
                            "model": net.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "scheduler": scheduler.state_dict(),
                            "step": step + 1,
                        },
                        path,
                    )
                yield  # the process ends here, and another one begins
                break


def evaluation(parallelize, log, rank, folder):
    """Every few steps the model is evaluated, without dropout, and the best one is kept."""
    net = build(dropout=0.2)
    model, optimizer = parallelize(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    torch.manual_seed(100 + rank)
    x_held, y_held = batch(10_000, 0, count=64)
    best = float("inf")
    for step in range(STEPS):
        model.train()
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        log["losses"].append(loss.item())
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                held = cross_entropy(model(x_held), y_held).item()
            twin = build(dropout=0.2).eval()
            twin.load_state_dict(net.state_dict())
            log["evaluations"].append(held)
            log["recomputed"].append(cross_entropy(twin(x_held), y_held).item())
            if held < best:
                best, log["best"] = held, copy.deepcopy(net.state_dict())


SCRIPTS = {
    script.__name__: script
    for script in (
        accumulation,
        clipping,
        schedule,
        scaling,
        averaged,
        frozen,
        tied,
        several,
        resume,
        evaluation,
    )
}
