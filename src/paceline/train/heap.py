"""Memory of the host that a step frees and the next one needs again.

glibc hands large blocks back to the system, and the top of its heap when enough of it is free: every step
then asks for its gradients page by page, which took a tenth of the time of small networks. Kept, they cost
what the process had at its fullest, which it needs in every step.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

#: mallopt's names; bytes free at the top before they go back, and bytes of a block from which on it is the
#: system's own: the most that glibc takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _BLOCK_BYTES = 1 << 30, 32 << 20
#: by which users say what they want of malloc
_SAID = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


@cache
def keep() -> bool:
    """Has this process keep what it frees; whether it does. Not where the environment speaks of malloc, nor
    with another C library.
    """
    if platform.libc_ver()[0] != "glibc" or any(os.environ.get(name) for name in _SAID):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES))
