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
    parameters, state = dict(place), dict(place)
    if args.optimizer == "nvme":
        largest = max(4 * args.width, args.vocab) * args.width
        # Every parameter that is alive holds a buffer of the largest one's size.
        parameters |= {"nvme_path": str(args.directory), "buffer_size": largest}
        parameters["buffer_count"] = args.buffers
        # As many as their default are kept in memory beside the copy on the drive: here none.
        parameters["max_in_cpu"] = args.max_in_cpu
        buffers = 12 if args.pipeline else 4
        state |= {"nvme_path": str(args.directory), "buffer_count": buffers}
        state |= {"pipeline_read": args.pipeline, "pipeline_write": args.pipeline}
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "zero_optimization": {
            "stage": 3,
            "offload_param": parameters,
            "offload_optimizer": state,
            "sub_group_size": args.sub_group_size,
            # What Hugging Face's "auto" makes of a model of this width.
            "reduce_bucket_size": args.width**2,
            "stage3_prefetch_bucket_size": int(0.9 * args.width**2),
            "stage3_param_persistence_threshold": 10 * args.width,
            "stage3_max_live_parameters": 16 * args.width**2,
            # With the default of 1e9 a smaller model is never released, and runs out of buffers.
            "stage3_max_reuse_distance": args.reuse_distance,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": args.aio_threads},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
    }
    deepspeed.init_distributed("gloo")
    model = build_model(args)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.train()
    meter = Meter()
    for tokens in batches(args):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        meter.step_ended(loss.item())
    meter.report(versions={"deepspeed": deepspeed.__version__})


if __name__ == "__main__":
    main()
