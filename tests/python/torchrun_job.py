# SPDX-License-Identifier: Apache-2.0
"""An elastic job for torchrun: the built-in MLP under DDP with gloo.

For every step, rank 0 writes a line `step time pids` to the given file, so the benchmark that kills
a worker sees when the next step is done. As in torchrun's own examples, the job keeps a snapshot
and resumes from it after a restart.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 16
SNAPSHOT_STEPS = 100


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def join() -> None:
    # The agent's store still has addresses of the previous attempt, so each has its own prefix.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)
    store = dist.PrefixStore("attempt-" + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def main() -> None:
    out = sys.argv[1]
    torch.set_num_threads(1)
    join()
    rank = dist.get_rank()
    torch.manual_seed(rank)
    network = DistributedDataParallel(model())
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    snapshot = out + ".snapshot"
    step = 0
    if os.path.exists(snapshot):
        state = torch.load(snapshot, weights_only=True)
        network.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    pids = ",".join(str(int(pid)) for pid in pids)
    images, labels = torch.rand(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))
    with open(out, "a", buffering=1) as steps:
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
            step += 1
            if rank == 0:
                if step % SNAPSHOT_STEPS == 0:
                    state = {
                        "model": network.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    }
                    torch.save(state, snapshot + ".new")
                    os.replace(snapshot + ".new", snapshot)
                steps.write(f"{step} {time.time():.6f} {pids}\n")


if __name__ == "__main__":
    main()
