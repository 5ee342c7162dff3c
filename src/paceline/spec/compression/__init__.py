"""Ways to make gradients small for the wire, one file each: settings, exact bytes, work, and evidence on
accuracy.

    parse("terngrad")
    parse("dgc:ratio=0.01,momentum=0.9")

Bytes one rank contributes for n float32 elements:

    fp32, fp16, bf16   4 n, 2 n, 2 n
    terngrad           ceil(n / 5), and 4 that are max-all-reduced first (or sent along, if scalers are not
                       shared)
    qsgd               4 per bucket, and ceil(bits * m / 8) for each bucket of m elements
    signsgd            ceil(n / 8) + 4
    onebit             ceil(n / 8) + 8
    topk, dgc          k values and k sorted indices in Elias-Fano code, k = max(1, round(ratio * n))
    randomk            4 k
    powersgd           4 r (rows + columns) for a matrix where that is less than 4 n, otherwise 4 n

What encoders were measured to take of a device is in `catalog/encoders.toml`.
"""

from __future__ import annotations

from paceline.spec.compression.casts import BFloat16, Float16, Float32
from paceline.spec.compression.powersgd import PowerSGD
from paceline.spec.compression.qsgd import QSGD
from paceline.spec.compression.scheme import (
    SCHEMES,
    Exchange,
    Scheme,
    Shape,
    Work,
    from_dict,
    numel,
    parse,
    register,
)
from paceline.spec.compression.sign import OneBit, SignSGD
from paceline.spec.compression.sparse import DGC, VALUES, RandomK, Sparse, TopK
from paceline.spec.compression.terngrad import TernGrad

__all__ = [
    "DGC",
    "QSGD",
    "SCHEMES",
    "VALUES",
    "BFloat16",
    "Exchange",
    "Float16",
    "Float32",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "Scheme",
    "Shape",
    "SignSGD",
    "Sparse",
    "TernGrad",
    "TopK",
    "Work",
    "from_dict",
    "numel",
    "parse",
    "register",
]
