# SPDX-License-Identifier: Apache-2.0
"""An elastic script with its own optimizer: `elasticdl run --workers 2 examples/torch_own_step.py`.

The job adds up the gradients of all workers; the script takes the steps. The images are synthetic.
"""

from __future__ import annotations

import torch
from torch import nn
from torch_mnist import images

import elasticdl


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum (https://arxiv.org/abs/2302.06675)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            beta_1, beta_2 = group["betas"]
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                update = momentum.lerp(parameter.grad, 1 - beta_1).sign_()
                parameter.sub_(update, alpha=group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta_2)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(8 * 12 * 12, 10),
    )  # fmt: skip
    head = {"params": model[-1].parameters(), "lr": 5e-4, "weight_decay": 0.1}
    optimizer = Lion([{"params": model[:-1].parameters()}, head])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20))
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=True)

    job = elasticdl.init(model, optimizer, scheduler=scheduler, ema=ema)
    for step in job.steps(images(4000, seed=1), batch_size=50, epochs=2):
        for image, label in step:
            loss = nn.functional.cross_entropy(model(image), label)
            loss.backward()
            job.allreduce(loss=loss)  # Optional: reports the loss.
        job.clip_grad_norm(1.0)
        optimizer.step()
        scheduler.step()
        ema.update_parameters(model)

    if job.is_leader:
        image, label = images(1000, seed=2).tensors
        right = ema.eval()(image).argmax(1) == label
        print(f"accuracy {right.float().mean():.3f}")


if __name__ == "__main__":
    main()
