# SPDX-License-Identifier: Apache-2.0
"""Sums vectors with PyTorch's gloo: one of several processes, controlled through stdin.

Usage: gloo_bench.py RANK WORLD_SIZE PORT. For each line `BYTES ROUNDS`, prints the median seconds
of one round, as wall time and CPU time.
"""

import statistics
import sys
import time

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    print(f"no torch: {error}", flush=True)
    sys.exit(0)


def main() -> None:
    rank, world_size, port = (int(word) for word in sys.argv[1:4])
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    print("ready", flush=True)
    for line in sys.stdin:
        n_bytes, n_rounds = (int(word) for word in line.split())
        tensor = torch.ones(n_bytes // 4)
        times, work = [], []
        for _ in range(n_rounds + 2):
            dist.barrier()
            start, start_work = time.perf_counter(), time.process_time()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - start)
            work.append(time.process_time() - start_work)
            tensor.fill_(1.0)
        print(statistics.median(times[2:]), statistics.median(work[2:]), flush=True)


main()
