"""CompressedAdamW is an optimizer as any of torch's, in any training loop."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import lightning.pytorch as lightning
import pytest
import torch

from mt_lightning.errors import ConfigError
from mt_lightning.optim.compressed_adamw import CompressedAdamW
from mt_lightning.optim.packed.formats import FORMATS
from mt_lightning.optim.packed.place import Place
from mt_lightning.optim.packed.random import key
from mt_lightning.optim.packed.records import R1
from mt_lightning.optim.packed.update import adamw_step
from tests.optim.packed_cases import by_name, fresh, scalars

EVERY_FORMAT = ["dynamic", "lossless", *FORMATS]


def _model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Embedding(50, 100),
        torch.nn.Linear(100, 70),
        torch.nn.Tanh(),
        torch.nn.Linear(70, 50),
    )


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randint(0, 50, (32,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), batch.roll(1) % 7)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize("format", EVERY_FORMAT)
def test_it_learns(format: str) -> None:
    model = _model()
    losses = _train(model, CompressedAdamW(model.parameters(), lr=1e-2, format=format), range(40))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("format", EVERY_FORMAT)
def test_state_takes_the_bytes_of_its_format(format: str) -> None:
    model = _model()
    optimizer = CompressedAdamW(model.parameters(), format=format)
    _train(model, optimizer, range(2))
    for param in model.parameters():
        state = optimizer.state[param]
        assert state["step"].dtype == torch.float32
        assert state["step"].item() == 2
        assert state["shape"] == tuple(param.shape)
        if format == "lossless":
            assert set(state) == {"step", "shape", "stride", "lossless"}
            assert state["lossless"].numel() < 8 * param.numel() + 100
            continue
        assert set(state) == {"step", "shape", "stride", "format", "packed"}
        name = format
        if format == "dynamic":
            name = "m8v8" if param.dim() > 1 and param.numel() >= 4096 else "fp32"
        assert state["format"] == name
        place = Place.of(tuple(param.shape), param.stride())
        assert state["packed"].shape == (FORMATS[name].state_bytes(place),)
        assert state["packed"].dtype == torch.uint8


def test_a_step_is_that_of_the_kernel_with_the_documented_key() -> None:
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.randn(64, 100))
    optimizer = CompressedAdamW(
        [{"params": [first]}, {"params": [second], "format": "R1", "seed": 9}], lr=1e-3
    )
    expected, records = second.detach().clone().view(-1), fresh(R1, 6400)
    for step in (1, 2, 3):
        grad = torch.randn(64, 100)
        second.grad = grad.clone()
        optimizer.step()
        constants = scalars(step, beta2=0.999, weight_decay=0.01)
        adamw_step(R1, expected, grad.view(-1), records, constants, key=key(9, step, 1))
    assert torch.equal(second.detach().view(-1), expected)
    assert torch.equal(optimizer.state[second]["packed"].view(-1), records)
    assert first not in optimizer.state


def test_the_seed_decides_the_draws() -> None:
    def run(seed: int) -> torch.Tensor:
        model = _model()
        optimizer = CompressedAdamW(model.parameters(), format="R1", seed=seed)
        _train(model, optimizer, range(5))
        return _weights(model)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


@pytest.mark.parametrize("format", EVERY_FORMAT)
def test_a_resumed_run_equals_an_uninterrupted_one(format: str, tmp_path: Path) -> None:
    whole, part = _model(), _model()
    _train(whole, CompressedAdamW(whole.parameters(), format=format), range(8))
    optimizer = CompressedAdamW(part.parameters(), format=format)
    _train(part, optimizer, range(4))
    torch.save({"model": part.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x")
    saved = torch.load(tmp_path / "x", weights_only=True)
    resumed = _model(seed=1)
    resumed.load_state_dict(saved["model"])
    optimizer = CompressedAdamW(resumed.parameters(), format=format, lr=7.0)
    optimizer.load_state_dict(saved["optimizer"])
    _train(resumed, optimizer, range(4, 8))
    assert torch.equal(_weights(resumed), _weights(whole))


def test_loading_keeps_bytes_and_shares_none_of_them() -> None:
    model = _model()
    optimizer = CompressedAdamW(model.parameters(), format="R1")
    _train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    twin = _model()
    other = CompressedAdamW(twin.parameters(), format="R1")
    other.load_state_dict(saved)
    for param in twin.parameters():
        assert other.state[param]["packed"].dtype == torch.uint8
    _train(twin, other, range(2))
    for index, state in before["state"].items():
        assert torch.equal(saved["state"][index]["packed"], state["packed"])
        assert torch.equal(saved["state"][index]["step"], state["step"])


def test_hooks_of_loading_see_plain_state() -> None:
    model = _model()
    optimizer = CompressedAdamW(model.parameters(), format="R1")
    _train(model, optimizer, range(2))
    seen = []

    def before(_, state_dict):
        seen.append(state_dict["state"][0]["packed"].dtype)

    def after(optimizer):
        seen.append(next(iter(optimizer.state.values()))["packed"].dtype)

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [torch.uint8] * 4


@pytest.mark.parametrize(("saved", "own"), [("R1", "R0"), ("dynamic", "fp32"), ("R1", "lossless")])
def test_another_format_is_refused_with_the_way_out(saved: str, own: str) -> None:
    model = _model()
    optimizer = CompressedAdamW(model.parameters(), format=saved)
    _train(model, optimizer, range(1))
    other = CompressedAdamW(model.parameters(), format=own)
    with pytest.raises(ConfigError, match=f"{saved}.*{own}.*megatrain export IN OUT --optimizer"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


def test_plain_state_is_refused_with_the_way_out() -> None:
    model = _model()
    plain = torch.optim.AdamW(model.parameters())
    _train(model, plain, range(1))
    state_dict = plain.state_dict()
    with pytest.raises(ConfigError, match=r"no packed state.*convert_state_dict"):
        CompressedAdamW(model.parameters()).load_state_dict(state_dict)
    for group in state_dict["param_groups"]:
        group["format"] = "dynamic"
    with pytest.raises(ConfigError, match=r"exp_avg, exp_avg_sq, step.*convert_state_dict"):
        CompressedAdamW(model.parameters()).load_state_dict(state_dict)


@pytest.mark.parametrize("key", ["format", "shape", "stride"])
def test_state_that_does_not_say_what_it_is_is_refused_with_the_way_out(key: str) -> None:
    model = _model()
    optimizer = CompressedAdamW(model.parameters())
    _train(model, optimizer, range(1))
    state_dict = optimizer.state_dict()
    del state_dict["state"][0][key]
    with pytest.raises(ConfigError, match=r"keeps format, packed, shape.*megatrain export IN OUT"):
        optimizer.load_state_dict(state_dict)


def test_a_choice_of_another_version_is_refused_with_the_way_out() -> None:
    model = _model()
    optimizer = CompressedAdamW(model.parameters())
    _train(model, optimizer, range(1))
    state_dict = optimizer.state_dict()
    state_dict["state"][0]["format"] = "R2"
    with pytest.raises(ConfigError, match=r"'R2'.*'dynamic' keeps it in 'm8v8'.*megatrain export"):
        optimizer.load_state_dict(state_dict)


def test_state_of_another_model_is_refused() -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = CompressedAdamW(model.parameters())
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    other = CompressedAdamW(torch.nn.Linear(65, 64).parameters())
    with pytest.raises(ConfigError, match="another model"):
        other.load_state_dict(optimizer.state_dict())
    state_dict = optimizer.state_dict()
    state_dict["state"][0]["packed"] = state_dict["state"][0]["packed"].float()
    with pytest.raises(ConfigError, match=r"torch.float32 \(8384,\)"):
        optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("format", ["dynamic", "lossless"])
def test_copies_go_on_alike(clone, format: str) -> None:
    model = _model()
    optimizer = CompressedAdamW(model.parameters(), format=format)
    _train(model, optimizer, range(3))
    twin, other = clone((model, optimizer))
    _train(model, optimizer, range(3, 6))
    _train(twin, other, range(3, 6))
    assert torch.equal(_weights(model), _weights(twin))


def test_schedulers_and_tensor_rates_work_as_with_torch() -> None:
    results = []
    for kind, extra in (
        (CompressedAdamW, {"format": "fp32"}),
        (torch.optim.AdamW, {"fused": True}),
    ):
        model = _model()
        optimizer = kind(model.parameters(), lr=torch.tensor(1e-2), **extra)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9)
        for step in range(8):
            _train(model, optimizer, range(step, step + 1))
            scheduler.step()
        results.append(_weights(model))
    assert torch.equal(*results)


def test_groups_may_be_added_and_have_their_own_settings() -> None:
    model = _model()
    optimizer = CompressedAdamW(model[0].parameters(), lr=1e-3)
    optimizer.add_param_group({"params": list(model[1].parameters()), "format": "R0", "lr": 1e-2})
    optimizer.add_param_group({"params": list(model[3].parameters()), "maximize": True})
    _train(model, optimizer, range(2))
    formats = [optimizer.state[param]["format"] for param in model.parameters()]
    assert formats == ["m8v8", "R0", "R0", "fp32", "fp32"]
    with pytest.raises(ConfigError, match="R9"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "format": "R9"})


@pytest.mark.parametrize("format", EVERY_FORMAT)
def test_maximize_mirrors_minimize(format: str) -> None:
    grads = [torch.randn(64, 70) for _ in range(4)]
    results = []
    for sign, maximize in ((1, False), (-1, True)):
        param = torch.nn.Parameter(torch.ones(64, 70))
        optimizer = CompressedAdamW([param], lr=0.1, format=format, maximize=maximize)
        for grad in grads:
            param.grad = sign * grad
            optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results)


def test_a_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = CompressedAdamW([param])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 5
    assert (param < 1).all()


@pytest.mark.parametrize("format", ["fp32", "m8v8", "C5", "R1", "lossless"])
def test_memory_order_does_not_matter_to_values(format: str) -> None:
    grads = [torch.randn(64, 96) for _ in range(3)]
    results = []
    base = torch.randn(64, 96)
    gaps = torch.zeros(64, 200)
    for kind in ("rows", "columns", "gaps"):
        data = {
            "rows": base.clone(),
            "columns": base.t().contiguous().t(),
            "gaps": gaps[:, :96].copy_(base),
        }[kind]
        param = torch.nn.Parameter(data)
        assert param.stride() == data.stride()
        optimizer = CompressedAdamW([param], format=format)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
        results.append(param.detach().clone())
    assert torch.equal(results[0], results[2])
    assert not gaps[:, 96:].any()
    if format in ("m8v8", "C5", "R1"):  # other neighbours in a block, so other scales
        assert torch.allclose(results[0], results[1], atol=1e-2)
    else:
        assert torch.equal(results[0], results[1])


def test_odd_shapes_are_stepped() -> None:
    shapes = [(), (1,), (0,), (3, 0), (1, 5), (7, 1, 3)]
    for format in EVERY_FORMAT:
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = CompressedAdamW(params, format=format)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        assert all((param < 1).all() for param in params)


@pytest.mark.parametrize(
    ("param", "grad", "words"),
    [
        (torch.ones(3, dtype=torch.bfloat16), None, "bfloat16.*autocast"),
        (torch.ones(3, dtype=torch.float64), None, "float64"),
        (torch.ones(3, 2), torch.ones(3, 2).to_sparse(), "sparse_coo.*sparse=False"),
        (torch.ones(3, device="meta"), None, "on meta.*CPU"),
    ],
    ids=["bf16", "float64", "sparse", "meta"],
)
def test_what_it_cannot_update_is_refused_by_name(param, grad, words: str) -> None:
    param = torch.nn.Parameter(param)
    param.grad = torch.ones_like(param) if grad is None else grad
    with pytest.raises(ConfigError, match=words):
        CompressedAdamW([param]).step()


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"format": "R9"},
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        CompressedAdamW([torch.nn.Parameter(torch.ones(1))], **settings)


@pytest.mark.parametrize("format", list(FORMATS.values()), ids=by_name)
def test_a_checkpoint_is_as_small_as_the_state(format) -> None:
    param = torch.nn.Parameter(torch.ones(256, 256))
    optimizer = CompressedAdamW([param], format=format.name)
    param.grad = torch.randn(256, 256)
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    nbytes = format.state_bytes(Place(1 << 16, 256))
    assert nbytes < buffer.tell() < nbytes + 4096


class _Module(lightning.LightningModule):
    def __init__(self, format: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.format = torch.nn.Linear(64, 64), format

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.layer(batch) - batch.roll(1, 1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return CompressedAdamW(self.parameters(), lr=1e-2, format=self.format)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(data, batch_size=4)


@pytest.mark.parametrize("format", ["m8v8", "R1", "lossless"])
def test_a_plain_trainer_saves_and_resumes_it(format: str, tmp_path: Path) -> None:
    def trainer(max_epochs: int) -> lightning.Trainer:
        return lightning.Trainer(
            accelerator="cpu",
            max_epochs=max_epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    whole, part, resumed = (_Module(format) for _ in range(3))
    trainer(4).fit(whole)
    first = trainer(2)
    first.fit(part)
    first.save_checkpoint(tmp_path / "x.ckpt")
    trainer(4).fit(resumed, ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert torch.equal(_weights(resumed), _weights(whole))
    assert not torch.equal(_weights(part), _weights(whole))
