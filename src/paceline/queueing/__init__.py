"""Throughput of a training job against its nodes: queueing models fed by a profile of one or two of them.

Two models of one job: `mva` solves a closed network in closed form, in microseconds, for schedulers and
searches; `simulate` replays the profiled steps event by event, and serves every answer shown to a person.
`synchronous` adds barriers and collectives.
"""
