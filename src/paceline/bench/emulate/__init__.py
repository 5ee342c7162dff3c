"""A cluster on one machine: hosts are network namespaces with shaped links and CPU limits; processes, sockets
and bytes are real.

    with EmulatedCluster(hosts=2, link_Bps=12.5e6, cpus=1.0) as cluster:
        cluster.launch([sys.executable, "train.py"])    # one rank per host, with the variables that
                                                        # torch.distributed reads
        cluster.traffic()                               # bytes that each host sent and received

Bandwidth is shaped by a token bucket at both ends of every link. Latency is the machine's own.
"""

from paceline.bench.emulate.cluster import EmulatedCluster, Traffic
from paceline.bench.emulate.sweep import sweep

__all__ = ["EmulatedCluster", "Traffic", "sweep"]
