"""Fit the constants of `cost/fitted/*.toml` from measurements: `python -m paceline.bench.fit --data DIR`."""
