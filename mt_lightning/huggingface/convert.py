"""Convert a GGUF file into a safetensors model folder, in a process of its own.

Dequantising a GGUF file holds the whole model in anonymous memory (about 1 GiB for 135M
parameters). In a child process, once, that memory never counts against the run; the folder it
leaves is memory-mapped by every later load.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mt_lightning.errors import ConfigError


def convert_gguf(gguf_path: Path, destination: Path) -> None:
    """Write the fp32 safetensors copy of a GGUF model, in a child process.

    The folder appears whole or not at all: it is written beside its final name and renamed.

    Args:
        gguf_path: the GGUF file.
        destination: the folder to make; its parent is created.

    Raises:
        ConfigError: if the child fails; the message carries its last lines.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__, str(gguf_path), str(partial)],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode != 0:
            last_lines = "\n".join(child.stderr.strip().splitlines()[-5:])
            raise ConfigError(
                f"Converting {gguf_path} into {destination} failed with exit code "
                f"{child.returncode}:\n{last_lines}\n"
                "It needs about 1.2 GiB of memory and 0.6 GB of disk; set MT_LIGHTNING_CACHE to "
                "put the copy on another drive."
            )
        try:
            partial.rename(destination)
        except OSError:  # another process was faster: its copy is as good as ours
            if not destination.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_safetensors(gguf_path: Path, destination: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {
        "pretrained_model_name_or_path": str(gguf_path.parent),
        "gguf_file": gguf_path.name,
    }
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain fp32 now; transformers would refuse to save a "quantized" model.
    setattr(model, "hf_quantizer", None)  # noqa: B010
    model.save_pretrained(destination)
    AutoTokenizer.from_pretrained(**source).save_pretrained(destination)


if __name__ == "__main__":
    _write_safetensors(Path(sys.argv[1]), Path(sys.argv[2]))
