"""No field of TrainingArguments is ignored: each is followed, or refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

import mt_lightning as mt
from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.byte_tokenizer import byte_tokenizer
from mt_lightning.huggingface.trainer import fields
from mt_lightning.huggingface.trainer.sft import MAPPED as SFT_MAPPED
from mt_lightning.huggingface.trainer.sft import TextCollator
from tests.huggingface.trainer_cases import arguments, llama, losses


def test_every_field_is_in_one_table() -> None:
    assert fields.unknown_fields() == []
    assert not fields.MAPPED.keys() & fields.REFUSED.keys()


def test_the_defaults_are_accepted(tmp_path: Path) -> None:
    fields.check_arguments(TrainingArguments(output_dir=str(tmp_path)))


def test_one_error_lists_all_that_is_not_followed(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        neftune_noise_alpha=5.0,
        auto_find_batch_size=True,
        optim="lomo",
        ddp_static_graph=True,
        accelerator_config={"use_seedable_sampler": False},
    )
    with pytest.raises(ConfigError) as caught:
        mt.Trainer(llama(), args)
    message = str(caught.value)
    assert message.startswith("5 of the TrainingArguments cannot be followed")
    for name in (
        "neftune_noise_alpha=5.0",
        "auto_find_batch_size=True",
        "optim='lomo': use one of adamw_torch",
        "ddp_static_graph=True",
        "accelerator_config.use_seedable_sampler=False",
    ):
        assert name in message


# Values that transformers itself accepts on a CPU; the other refused fields need what is not here.
CHANGED: dict[str, Any] = {
    "optim_target_modules": ["q_proj"],
    "fp16": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "torch_compile": True,
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "neftune_noise_alpha": 1.0,
    "auto_find_batch_size": True,
    "enable_jit_checkpoint": True,
    "push_to_hub": True,
    "hub_token": "t",
    "hub_private_repo": True,
    "hub_model_id": "a/b",
    "hub_strategy": "end",
    "hub_always_push": True,
    "hub_revision": "main",
    "ignore_data_skip": True,
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 1,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "debug": "underflow_overflow",
}


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_a_field_that_is_not_followed_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"- {name}="):
        fields.check_arguments(arguments(tmp_path, **{name: CHANGED[name]}))


def test_a_field_of_a_newer_transformers_is_refused_unless_it_is_the_default(
    tmp_path: Path,
) -> None:
    @dataclasses.dataclass
    class Newer(TrainingArguments):
        forget_gate: float = 0.5

    fields.check_arguments(Newer(output_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"forget_gate=0.7: this version does not know it"):
        fields.check_arguments(Newer(output_dir=str(tmp_path), forget_gate=0.7))


@dataclasses.dataclass
class SFTConfig(TrainingArguments):
    """Has the fields of TRL's class that matter here, and some of its other defaults."""

    learning_rate: float = 2e-5
    dataset_text_field: str = "text"
    max_length: int | None = 1024
    completion_only_loss: bool | None = None
    packing: bool = False
    packing_strategy: str = "bfd"
    eval_packing: bool | None = None
    eos_token: str | None = None
    assistant_only_loss: bool = False


def sft(folder: Path, **settings: Any) -> SFTConfig:
    defaults = {"save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "max_steps": 2}
    return SFTConfig(output_dir=str(folder), **{**defaults, **settings})


def test_the_arguments_of_trl_are_taken(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    text = [{"text": f"sample {i} of a text", "source": "x"} for i in range(8)]
    args = sft(tmp_path, max_length=12, per_device_train_batch_size=4, logging_steps=1)
    model = llama(vocab_size=257)
    trainer = mt.Trainer(model, args, train_dataset=text, processing_class=tokenizer)
    trainer.train()
    assert len(losses(trainer)) == 2
    batch = TextCollator(args, tokenizer)([{"text": "ab"}, {"text": "a longer sample"}])
    assert batch["input_ids"].shape == (2, 12)
    wanted = [*tokenizer("ab")["input_ids"], tokenizer.eos_token_id, *[-100] * 9]
    assert batch["labels"][0].tolist() == wanted
    assert batch["attention_mask"].sum(1).tolist() == [3, 12]
    masked = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}
    batch = TextCollator(args, tokenizer)([masked])
    assert batch["labels"].tolist() == [[-100, 6, 7]]


def test_what_trl_would_do_and_this_does_not_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(ConfigError, match="packing_strategy='wrapped': this version does not know"):
        mt.Trainer(llama(), sft(tmp_path, packing_strategy="wrapped"), processing_class=tokenizer)
    with pytest.raises(ConfigError, match="SFTConfig needs a tokenizer"):
        mt.Trainer(llama(), sft(tmp_path))
    collate = TextCollator(sft(tmp_path), tokenizer)
    with pytest.raises(ConfigError, match="the tokenizer .* has no chat template"):
        collate([{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(ConfigError, match="completion_only_loss=True, and a sample has no prompt"):
        TextCollator(sft(tmp_path, completion_only_loss=True), tokenizer)([{"text": "a"}])
    with pytest.raises(ConfigError, match="'<nope>' is no token"):
        TextCollator(sft(tmp_path, eos_token="<nope>"), tokenizer)


def test_the_page_lists_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    for name, what in {**fields.MAPPED, **fields.REFUSED, **SFT_MAPPED}.items():
        assert f"| `{name}` | {what} |" in page, name
