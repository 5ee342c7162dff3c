"""Many jobs, one cluster: throughput model, traces, policies, state machine, drivers."""
