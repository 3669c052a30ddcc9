"""Training steps take the loss in chunks, whatever the model does with its logits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import mt_lightning as mt
from mt_lightning.errors import ConfigError, StepError
from mt_lightning.huggingface import CausalLMModule
from mt_lightning.losses import chunked
from mt_lightning.losses.deferred import deferred_logits

MakeLlama = Callable[..., LlamaForCausalLM]
VOCABULARY = 131

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
# What each of them stands for: another way to get from hidden states to a loss.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "GPT2": GPT2,  # tied, positional arguments
    "Gemma2": {**SIZES, "final_logit_softcapping": 0.5},
    "Cohere": {**SIZES, "logit_scale": 0.3},
    "Granite": {**SIZES, "logits_scaling": 3.0},
    "Mixtral": {**SIZES, "num_local_experts": 2, "output_router_logits": True},  # a further loss
    "Phi": SIZES,  # a bias
    "Bart": {  # no shift, a cross entropy of its own
        **{"vocab_size": VOCABULARY, "d_model": 16, "pad_token_id": 0, "bos_token_id": 1},
        **{"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24},
        **{"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24},
    },
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name])
    kind = f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    # Without dropout: a forward in chunks must draw nothing else, but is compared with another.
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)  # logits that a soft cap bends
    return model


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(ids < 20, -100)}


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        grad for grad in torch.autograd.grad(loss, trained, allow_unused=True) if grad is not None
    ]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_way_to_the_loss_is_followed(name: str) -> None:
    model = build(name)
    given = {**batch(), "use_cache": False}
    own = model(**given).loss
    own_gradients = gradients(model, own)
    for size in (24, 7):
        with deferred_logits(model.get_output_embeddings(), size) as deferral:
            loss = model(**given).loss
        assert (deferral.chunked, deferral.whole) == (1, [])
        equal = torch.equal if size == 24 else torch.allclose
        assert equal(loss, own)
        for grad, want in zip(gradients(model, loss), own_gradients, strict=True):
            if size == 24:
                assert torch.equal(grad, want)
            else:
                # In fp64 either lies within 1.1e-5 of the largest gradient: each sums large terms.
                assert (grad - want).abs().max() <= 3e-5 * want.abs().max() + 1e-6
    assert "forward" not in vars(model.get_output_embeddings())


def test_the_number_of_items_is_respected() -> None:
    model = build("Llama")
    with deferred_logits(model.lm_head, 7) as deferral:
        loss = model(**batch(), num_items_in_batch=torch.tensor(100)).loss
    assert deferral.chunked == 1
    torch.testing.assert_close(loss, model(**batch(), num_items_in_batch=torch.tensor(100)).loss)


class Net(nn.Module):
    """A model whose loss is what a test makes of its logits."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.loss = loss

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.head(self.body(ids)), ids)


def entropy(logits: Tensor, ids: Tensor, **settings: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), **settings)


def with_accuracy(logits: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == ids).float().mean()
    return entropy(logits, ids) * (1 + accuracy)


def with_z_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return entropy(logits, ids) + 0.1 * logits.logsumexp(-1).square().mean()


def masked_in_place(logits: Tensor, ids: Tensor) -> Tensor:
    cast = logits.float()
    view = logits[:, :-1]
    logits[..., 3] = -5.0
    logits *= 0.5
    return entropy(cast, ids) + entropy(view, ids[:, 1:])


def scaled_in_place(logits: Tensor, ids: Tensor) -> Tensor:
    doubled = logits * 2.0
    logits.mul_(3.0)
    return entropy(doubled, ids) + entropy(logits, ids)


WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "accuracy": with_accuracy,
    "z_loss": with_z_loss,
    "in_place": masked_in_place,
    "scaled_in_place": scaled_in_place,
    "class_weights": lambda z, y: entropy(z, y, weight=torch.linspace(0, 1, 50)),
    "per_token": lambda z, y: entropy(z, y, reduction="none").square().mean(),
    "distribution": lambda z, y: functional.cross_entropy(
        z.flatten(0, 1), functional.one_hot(y, 50).float().flatten(0, 1)
    ),
    "channels_first": lambda z, y: functional.cross_entropy(z.transpose(1, 2), y),
    "temperature": lambda z, y: entropy(z / z.detach().std(), y),
    "other_vocabulary": lambda z, y: z.view(-1, 25).square().mean() + z[..., :40].mean(),
    "data": lambda z, y: entropy(z, y) + z.data.mean(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_anything_else_is_computed_as_it_was(name: str) -> None:
    model = Net(WHOLE[name])
    ids = torch.randint(50, (2, 9))
    own = model(ids)
    with deferred_logits(model.head, 4) as deferral:
        loss = model(ids)
    assert deferral.whole
    torch.testing.assert_close(loss, own)
    torch.testing.assert_close(gradients(model, loss), gradients(model, own))


def test_slices_and_casts_are_followed() -> None:
    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        shifted = (0.5 * logits / 3.0).to(torch.float32)[..., :-1, :].contiguous()
        return nn.CrossEntropyLoss(reduction="sum", ignore_index=3, label_smoothing=0.1)(
            shifted.view(-1, shifted.size(-1)), ids[..., 1:].reshape(-1).to(logits.device)
        )

    model, ids = Net(loss), torch.randint(50, (2, 9))
    own = model(ids)
    with deferred_logits(model.head, 4) as deferral:
        ours = model(ids)
    assert (deferral.chunked, deferral.whole) == (1, [])
    torch.testing.assert_close(ours, own)
    torch.testing.assert_close(gradients(model, ours), gradients(model, own))


def test_a_function_that_hides_the_logits_is_refused() -> None:
    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            return logits.square().sum()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0].expand(2, 9, 50)

    model = Net(lambda logits, ids: Squares.apply(logits) + logits.mean())  # type: ignore
    with deferred_logits(model.head, 4):
        loss = model(torch.randint(50, (2, 9)))
    with pytest.raises(StepError, match="loss_chunk_size=None"):
        loss.backward()


def test_an_error_leaves_the_head_as_it_was() -> None:
    model = Net(lambda logits, ids: logits.no_such_method())  # type: ignore
    with pytest.raises(AttributeError), deferred_logits(model.head, 4):
        model(torch.randint(50, (2, 9)))
    assert "forward" not in vars(model.head)


def test_a_head_that_shows_no_whole_weight_is_called_as_it_is() -> None:
    model = Net(entropy)
    weight, own = model.head.weight, model.head.forward

    def gather(hidden: Tensor) -> Tensor:
        model.head.weight = weight
        return own(hidden)

    model.head.weight = nn.Parameter(torch.empty(0))
    model.head.forward = gather  # type: ignore
    with deferred_logits(model.head, 4) as deferral:
        model(torch.randint(50, (2, 9))).backward()
    assert (deferral.chunked, deferral.whole) == (0, [])
    assert weight.grad is not None
    assert model.head.forward is gather


class Untyped(nn.Module):
    """Not a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(entropy)

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> CausalLMOutput:
        return CausalLMOutput(loss=self.net(input_ids))  # type: ignore


def test_a_model_that_needs_its_logits_says_so_once(
    tiny_llama: MakeLlama, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    own = model.loss_function

    def with_penalty(logits: Tensor, **given: Any) -> Tensor:
        return own(logits=logits, **given) + logits.logsumexp(-1).mean()

    compiled = tiny_llama()
    compiled.compile(backend="eager")
    caplog.set_level(logging.INFO, "mt_lightning")
    for case, message in ((model, "logsumexp"), (Untyped(), "NoneType"), (compiled, "compiled")):
        module = CausalLMModule(case)
        module.log = lambda *args, **kwargs: None
        if case is model:
            model.loss_function = with_penalty
        for _ in range(2 if case is not compiled else 0):
            module.training_step({"input_ids": torch.randint(50, (1, 9))}, 0)
        if case is compiled:
            module._training_loss(case, lambda: CausalLMOutput(loss=torch.zeros(())))  # type: ignore
        lines = [
            record.message for record in caplog.records if "all tokens at once" in record.message
        ]
        assert len(lines) == 1
        assert message in lines[0]
        caplog.clear()


def test_it_can_be_turned_off(tiny_llama: MakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_lightning.huggingface.training_loss.deferred_logits", None)
    module = CausalLMModule(tiny_llama(), loss_chunk_size=None)
    module.log = lambda *args, **kwargs: None
    module.training_step({"input_ids": torch.randint(257, (1, 9))}, 0)
    for size in (0, "all"):
        with pytest.raises(ConfigError, match=f"{size!r} tokens is not possible"):
            CausalLMModule(tiny_llama(), loss_chunk_size=size)  # type: ignore


class OwnHead(LightningModule):
    """Calls `chunked_loss` itself, on a head that is paged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(200, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 200)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.embedding(batch["input_ids"])
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        return mt.chunked_loss(hidden, self.head, batch["labels"], chunk_size=7) * 0.3

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def llama(tied: bool, size: int | None, frozen: bool = False) -> CausalLMModule:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{**SIZES, "hidden_size": 32, "vocab_size": 300, "head_dim": 16, "num_hidden_layers": 2},
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.requires_grad_(not frozen)
    return CausalLMModule(model, loss_chunk_size=size)


MODULES: dict[str, Callable[[], LightningModule]] = {
    "tied": lambda: llama(True, 7),
    "untied": lambda: llama(False, 7),
    "frozen_head": lambda: llama(False, 7, frozen=True),
    "one_chunk": lambda: llama(True, 24),
    "own_head": OwnHead,
}


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize(
    ("clip", "precision"),
    [(None, "32-true"), (0.5, "bf16-mixed")],
    ids=["eager", "deferred-bf16"],
)
@pytest.mark.parametrize("name", MODULES)
def test_paging_changes_no_bit_and_takes_no_chunk_twice(
    name: str, clip: float | None, precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    split = chunked._chunks
    monkeypatch.setattr(chunked, "_chunks", lambda *args: passes.append(1) or split(*args))
    results = []
    for mode in ("plain", "paged"):
        module = MODULES[name]()
        passes.clear()
        strategy = mt.MegaTrainStrategy(offload_dir=tmp_path / "pages", max_ram_gb=0.1)
        trainer = Trainer(
            strategy="auto" if mode == "plain" else strategy,
            precision=precision,
            accelerator="cpu",
            max_steps=3,
            accumulate_grad_batches=2,
            gradient_clip_val=clip,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, DataLoader([batch(seed) for seed in range(6)], batch_size=None))  # type: ignore
        results.append({n: p.detach().clone() for n, p in module.named_parameters()})
        # One pass of chunks for the value and one for the gradients of each of six batches.
        assert len(passes) == (0 if name == "one_chunk" else 12)
    plain, paged = results
    assert all(torch.equal(paged[key], plain[key]) for key in plain)
