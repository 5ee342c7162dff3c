"""Data that a user has: MNIST as it is distributed, CIFAR-10's binary version, folders of images by class.

    mnist:FOLDER      train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-..., also .gz
    cifar10:FOLDER    data_batch_1.bin to data_batch_5.bin, test_batch.bin
    images:FOLDER     train/CLASS/*.jpg and val/CLASS/*.jpg, as ImageNet is laid out; shrunk to 32 x 32

Nothing is downloaded. All of a data set is held in memory, as the other tasks'.
"""

from __future__ import annotations

import gzip
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import DataError, MissingExtra
from paceline.train.tasks import Task

#: side of what images are shrunk to, and endings of their files
_SIDE, _ENDINGS = 32, (".jpg", ".jpeg", ".png", ".webp")
#: share of the training samples that settings are chosen on
_HELD = 0.1
_CIFAR_BYTES, _CIFAR_SIDE = 3073, 32
#: first bytes of files of images and of labels, by the number of their dimensions
_MAGIC = {3: 2051, 1: 2049}
Pair = tuple[Tensor, Tensor]


def task(kind: str, folder: Path) -> Task:
    """The task of a data set in a folder."""
    if not folder.is_dir():
        raise DataError(f"{kind}:{folder}: no such folder; give the one that holds the data set")
    train, test = {"mnist": _mnist, "cifar10": _cifar10, "images": _images}[kind](folder)
    order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(0))
    held = max(1, int(_HELD * len(order)))
    parts = [tuple(part[which] for part in train) for which in (order[held:], order[:held])]
    classes = 1 + int(max(train[1].max(), test[1].max()))
    channels, side = train[0].shape[1], train[0].shape[-1]
    return Task(
        name=f"{kind}:{folder}",
        model=partial(model, channels, side, classes),
        train=(parts[0][0], parts[0][1]),
        validation=(parts[1][0], parts[1][1]),
        test=test,
        batch=128,
        epochs=10,
        lr=0.05,
        momentum=0.9,
        weight_decay=5e-4,
        target=0.98 if kind == "mnist" else 0.7,
    )


def model(channels: int, side: int, classes: int) -> nn.Module:
    """Three convolutions, each normalised by groups (which no rank does otherwise than another) and pooled,
    and a fully connected layer.
    """
    sizes = (channels, 32, 64, 128)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(sizes[-1] * (side // 8) ** 2, classes))


def _scaled(images: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Tensor:
    """Bytes as values from -1 to 1."""
    return torch.from_numpy(images.copy()).float() / 127.5 - 1


def _mnist(folder: Path) -> tuple[Pair, Pair]:
    train, test = (
        (
            _scaled(_idx(folder, f"{part}-images-idx3-ubyte", 3)).unsqueeze(1),
            torch.from_numpy(_idx(folder, f"{part}-labels-idx1-ubyte", 1).astype(np.int64)),
        )
        for part in ("train", "t10k")
    )
    return train, test


def _idx(folder: Path, name: str, dimensions: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """An array in the format of MNIST's files: a number that says what it is, sizes, bytes."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise DataError(f"{folder} holds neither {name} nor {name}.gz, files of MNIST")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    head = np.frombuffer(raw[: 4 * (1 + dimensions)], dtype=">u4")
    body = np.frombuffer(raw, dtype=np.uint8, offset=min(len(raw), 4 * (1 + dimensions)))
    if len(head) <= dimensions or head[0] != _MAGIC[dimensions] or body.size != np.prod(head[1:]):
        raise DataError(f"{path} is no file of MNIST: its head and its length do not agree")
    return body.reshape([int(size) for size in head[1:]])


def _cifar10(folder: Path) -> tuple[Pair, Pair]:
    parts = [[f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"]]
    train, test = ([_cifar_file(folder / name) for name in names] for names in parts)
    return _joined(train), _joined(test)


def _cifar_file(path: Path) -> Pair:
    """Records of a label and three planes of a color."""
    if not path.exists():
        hint = "the binary version of CIFAR-10 has it (cifar-10-binary.tar.gz)"
        raise DataError(f"{path.parent} holds no {path.name}; {hint}")
    raw = np.fromfile(path, dtype=np.uint8)
    if not raw.size or raw.size % _CIFAR_BYTES:
        raise DataError(f"{path}: {raw.size} bytes are no whole number of records of {_CIFAR_BYTES}")
    records = raw.reshape(-1, _CIFAR_BYTES)
    images = records[:, 1:].reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE)
    return _scaled(images), torch.from_numpy(records[:, 0].astype(np.int64))


def _joined(parts: list[Pair]) -> Pair:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _images(folder: Path) -> tuple[Pair, Pair]:
    if find_spec("PIL") is None:
        raise MissingExtra("pillow", "vision", f"images:{folder}")
    names = sorted(path.name for path in (folder / "train").glob("*") if path.is_dir())
    if not names:
        raise DataError(f"{folder} has no folders of classes in train/, as ImageNet has: train/CLASS/*.jpg")
    return _classes(folder / "train", names), _classes(folder / "val", names)


def _classes(folder: Path, names: list[str]) -> Pair:
    image = import_module("PIL.Image")
    found, labels = [], []
    for label, name in enumerate(names):
        for path in sorted((folder / name).glob("*")):
            if path.suffix.lower() in _ENDINGS:
                with image.open(path) as opened:
                    found.append(np.asarray(opened.convert("RGB").resize((_SIDE, _SIDE))))
                labels.append(label)
    if not found:
        raise DataError(f"{folder} has no images of the classes {', '.join(names[:5])}")
    return _scaled(np.stack(found).transpose(0, 3, 1, 2)), torch.tensor(labels)
