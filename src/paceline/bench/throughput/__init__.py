"""Measured throughput of parameter-server training against the models that predict it from one or two
workers.

    python -m paceline.bench.throughput.measure OUT.csv       takes the data set (Linux, root, 16 cores or so)
    paceline bench throughput                                 scores both models on it
"""
