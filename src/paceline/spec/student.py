"""Quantiles of Student's t, for intervals of few runs."""

from __future__ import annotations

#: two-sided 95 % quantiles of Student's t by degrees of freedom; beyond, the normal one
_T95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
)


def t95(freedom: int) -> float:
    """The two-sided 95 % quantile for so many degrees of freedom."""
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.4 / freedom
