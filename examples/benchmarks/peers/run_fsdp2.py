"""FSDP2 (`fully_shard`) with CPU offload on one process, on the common workload."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from workload import LEARNING_RATE, Meter, arguments, batches, build_model


def main() -> None:
    """Train and report."""
    args = arguments(__doc__)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    model = build_model(args)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = CPUOffloadPolicy(pin_memory=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    model.train()
    meter = Meter()
    for tokens in batches(args):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step_ended(loss.item())
    meter.report(versions={"torch": torch.__version__})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
