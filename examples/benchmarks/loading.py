"""Peak memory of loading a checkpoint: transformers alone, and after mt.init.

    python examples/benchmarks/loading.py
    python examples/benchmarks/loading.py --kinds bf16 fp8 --width 256

Checkpoints with random weights are made in a temporary folder, one of each kind. Each is loaded in
fresh processes, which hash all parameters. Memory is anonymous memory, beyond that before the load;
mapped files do not count, since the kernel can drop them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import mt_lightning as mt
from mt_lightning.callbacks.memory import MemorySampler, process_memory_bytes
from mt_lightning.huggingface.loading import gguf_path_of_smollm2

MIB = 1 << 20
BLOCK = 128
"""Rows and columns that share a scale in the FP8 checkpoint."""


def sizes(width: int, layers: int) -> dict[str, int]:
    """Return what all configs have in common."""
    return {
        "vocab_size": 2 * width,
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }


def llama(width: int, layers: int) -> LlamaForCausalLM:
    """Return a Llama with random weights."""
    torch.manual_seed(0)
    settings = {**sizes(width, layers), "intermediate_size": 2 * width}
    return LlamaForCausalLM(LlamaConfig(**settings))


def save_fp32(folder: Path, width: int, layers: int) -> None:
    """Save weights as they are wanted."""
    llama(width, layers).save_pretrained(folder)


def save_bf16(folder: Path, width: int, layers: int) -> None:
    """Save weights of another dtype than the wanted one."""
    llama(width, layers).bfloat16().save_pretrained(folder)


def save_sharded(folder: Path, width: int, layers: int) -> None:
    """Save bf16 weights in several files."""
    shard = f"{max(1, width * width * 16 // 1_000_000)}MB"
    llama(width, layers).bfloat16().save_pretrained(folder, max_shard_size=shard)


def save_moe(folder: Path, width: int, layers: int) -> None:
    """Save experts one by one, which transformers fuses when it loads them."""
    torch.manual_seed(0)
    config = MixtralConfig(**sizes(width, layers), num_local_experts=8)
    MixtralForCausalLM(config).bfloat16().save_pretrained(folder)


def save_fp8(folder: Path, width: int, layers: int) -> None:
    """Save linear layers in FP8 with a scale for each block."""
    llama(width, layers).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [each for each in tensors if each.endswith("proj.weight")]:
        weight = tensors[name].float()
        rows, columns = (size // BLOCK for size in weight.shape)
        blocks = weight.view(rows, BLOCK, columns, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / 448.0
        scaled = blocks / scale[:, None, :, None]
        tensors[name] = scaled.view(weight.shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    _add_to_config(folder, {**settings, "activation_scheme": "dynamic"})


def save_mxfp4(folder: Path, width: int, layers: int) -> None:
    """Save experts in MXFP4: pairs of 4 bits, and an exponent for each 32 of them."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = GptOssConfig(**sizes(width, layers), head_dim=32, **experts)
    GptOssForCausalLM(config).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        size = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*size, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, size, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _add_to_config(folder, {"quant_method": "mxfp4"})


def save_gguf(folder: Path, width: int, layers: int) -> None:
    """Link the GGUF file of SmolLM2-135M; `width` and `layers` are its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.gguf").symlink_to(gguf_path_of_smollm2())


KINDS: dict[str, Callable[[Path, int, int], None]] = {
    "fp32": save_fp32,
    "bf16": save_bf16,
    "sharded": save_sharded,
    "moe": save_moe,
    "fp8": save_fp8,
    "mxfp4": save_mxfp4,
    "gguf": save_gguf,
}


def load(folder: Path, **settings: Any) -> torch.nn.Module:
    """Load any of them as float32, as a user does."""
    if (folder / "model.gguf").exists():
        settings["gguf_file"] = "model.gguf"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings)


def digest_of(model: torch.nn.Module) -> str:
    """Return a hash of all parameters and their names."""
    digest = hashlib.sha256()
    for name, param in model.named_parameters():
        digest.update(name.encode())
        digest.update(param.detach().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _add_to_config(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def _measure(folder: Path, *, streamed: bool) -> dict[str, Any]:
    """Load in this process; called in a fresh one."""
    if streamed:
        mt.init(offload_dir=folder / "pages")
    with tempfile.TemporaryDirectory() as small:  # imports, and threads that start once
        save_fp32(Path(small), 64, 1)
        load(Path(small))
    sampler, before = MemorySampler(interval_s=0.002), process_memory_bytes()
    sampler.start()
    model = load(folder)
    sampler.stop()
    params = list(model.parameters())
    return {
        "peak_mib": (sampler.peak_bytes - before) / MIB,
        "held_mib": (process_memory_bytes() - before) / MIB,
        "weights_mib": sum(p.numel() * p.element_size() for p in params) / MIB,
        "largest_mib": max(p.numel() * p.element_size() for p in params) / MIB,
        "digest": digest_of(model),
    }


def _in_child(folder: Path, mode: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", mode, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--directory", default=None, help="where to make the checkpoints")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        mode, folder = options.child
        print(json.dumps(_measure(Path(folder), streamed=mode == "streamed")))
        return
    print("| checkpoint | weights: MiB | largest tensor | default: peak | streamed: peak | hash |")
    print("|---|---|---|---|---|---|")
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(dir=options.directory) as parent:
            folder = Path(parent) / kind
            KINDS[kind](folder, options.width, options.layers)
            plain, streamed = (_in_child(folder, mode) for mode in ("plain", "streamed"))
        same = "equal" if plain["digest"] == streamed["digest"] else "DIFFERENT"
        print(
            f"| {kind} | {plain['weights_mib']:.0f} | {plain['largest_mib']:.1f} | "
            f"{plain['peak_mib']:.0f} | {streamed['peak_mib']:.0f} | {same} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
