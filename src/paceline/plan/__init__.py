"""Search for the best plan: space, bounds, certificate, and what other tools need to run it."""
