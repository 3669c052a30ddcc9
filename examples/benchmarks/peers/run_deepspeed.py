"""DeepSpeed ZeRO-3 with parameters and optimizer on CPU memory or NVMe, on the common workload.

It has to be told that this is a CPU (DS_ACCELERATOR=cpu), and builds its operators at first use,
which takes some ten minutes once.
"""

from __future__ import annotations

import os

os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")

import deepspeed
from deepspeed.accelerator import get_accelerator
from workload import LEARNING_RATE, Meter, arguments, batches, build_model


def main() -> None:
    """Train and report."""
    args = arguments(__doc__)
    # Parameters on NVMe would turn to bf16 where fp16 is not supported.
    get_accelerator().is_fp16_supported = lambda: True  # pyright: ignore
    place = {"device": args.optimizer, "pin_memory": False}
    if args.optimizer == "nvme":
        place |= {"nvme_path": str(args.directory), "buffer_count": 5, "buffer_size": 10**8}
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "zero_optimization": {
            "stage": 3,
            "offload_param": dict(place),
            "offload_optimizer": {**place, "buffer_count": 4},
            "sub_group_size": 10**8,
            "stage3_max_live_parameters": 10**8,
            "stage3_prefetch_bucket_size": 5 * 10**7,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "thread_count": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_allow_untested_optimizer": True,
    }
    deepspeed.init_distributed("gloo")
    model = build_model(args)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.train()
    meter = Meter()
    for tokens in batches(args):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        meter.step_ended(loss.item())
    meter.report()


if __name__ == "__main__":
    main()
