"""`megatrain export IN... OUT`: what is read back is what was trained, or an error says why not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from mt_lightning import MegaTrainStrategy
from mt_lightning.cli import main
from mt_lightning.huggingface import CausalLMModule
from mt_lightning.tiers.lock import DirectoryLock

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def llama(**settings: Any) -> PreTrainedModel:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, **SMALL, **heads, **settings))


def gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=257, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1
    )
    config.eos_token_id = 2
    return GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"llama": llama, "gpt2": gpt2}


class Own(LightningModule):
    """A module of one's own: the model under another name, a tensor that is no part of it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.lm = model
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += 1
        return self.lm(**batch, labels=batch["input_ids"]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Plain(LightningModule):
    """No model of transformers: tied, transposed, of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.layers[1].weight = torch.nn.Parameter(torch.randn(8, 8).t())
        self.narrow = torch.nn.Parameter(torch.randn(5).bfloat16(), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.count += 1
        for layer in self.layers:
            batch = layer(batch)
        return batch.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fit(module: LightningModule, strategy: Any, data: Any) -> Trainer:
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    # Lightning warns of a step without data, and of data without a step.
    trainer.fit(module, data, data if isinstance(module, CausalLMModule) else None)
    return trainer


def tokens() -> DataLoader:
    ids = torch.randint(257, (12, 12), generator=torch.Generator().manual_seed(0))
    return DataLoader([{"input_ids": row} for row in ids], batch_size=2)  # pyright: ignore


State = dict[str, torch.Tensor]


def train(module: LightningModule, folder: Path, data: Any, num_dirs: int = 1) -> State:
    """Fit in `run0`, ...; leave `a.ckpt` beside, nothing locked; return the state dict."""
    dirs = [str(folder / f"run{i}") for i in range(num_dirs)]
    trainer = fit(module, MegaTrainStrategy(offload_dir=dirs, max_ram_gb=1), data)
    trainer.save_checkpoint(folder / "a.ckpt")
    state = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.strategy._close()  # pyright: ignore: as the end of the process does
    return state


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, State]]:
    """A trained run of each kind of module; read by the tests and never changed."""
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(name)
        state = train(CausalLMModule(make()), folder, tokens(), num_dirs=2)
        found[name] = (folder, {k.removeprefix("model."): v for k, v in state.items()})
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("own")
    state = train(Own(llama()), folder, tokens())
    found["own"] = (folder, {k.removeprefix("lm."): v for k, v in state.items() if k != "seen"})
    folder = tmp_path_factory.mktemp("plain")
    found["plain"] = (folder, train(Plain(), folder, DataLoader(torch.randn(12, 8))))  # pyright: ignore
    return found


def dirs_of(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.glob("run?"))


def assert_same(now: State, then: State) -> None:
    assert now.keys() == then.keys()
    for name, value in then.items():
        assert torch.equal(now[name], value), name
        assert now[name].dtype == value.dtype, name


def export(*words: Any) -> int:
    return main(["export", *map(str, words)])


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("source", ["run", "checkpoint"])
def test_from_pretrained_reads_what_was_trained(
    name: str, source: str, runs: Any, workplace: Path
) -> None:
    folder, state = runs[name]
    sources = dirs_of(folder) if source == "run" else [folder / "a.ckpt"]
    assert export(*sources, workplace / "out") == 0
    assert {file.name for file in (workplace / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert_same(AutoModelForCausalLM.from_pretrained(workplace / "out").state_dict(), state)


def test_shards_and_their_index_agree(runs: Any, workplace: Path) -> None:
    folder, state = runs["gpt2"]
    assert export(*dirs_of(folder), "out", "--max-shard-size", "20KB") == 0
    index = json.loads((workplace / "out" / "model.safetensors.index.json").read_text())
    held: dict[str, str] = {}
    for file in sorted((workplace / "out").glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names = list(tensors.keys())
            held.update(dict.fromkeys(names, file.name))
            sizes = [tensors.get_tensor(name).nbytes for name in names]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    assert index["weight_map"] == held
    kept = {name: value for name, value in state.items() if name != "lm_head.weight"}
    assert index["metadata"] == {
        "total_size": sum(value.nbytes for value in kept.values()),
        "total_parameters": sum(value.numel() for value in kept.values()),
    }
    assert len(set(held.values())) > 3
    assert_same(AutoModelForCausalLM.from_pretrained("out").state_dict(), state)


def test_a_module_of_ones_own_is_exported_too(
    runs: Any, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, state = runs["own"]
    llama().save_pretrained(workplace / "base")
    assert export(*dirs_of(folder), "run") == 0
    assert "left out, no part of the model: seen" in capsys.readouterr().out
    assert export(folder / "a.ckpt", "out") == 2
    assert "--model NAME_OR_DIR" in " ".join(capsys.readouterr().err.split())
    assert export(folder / "a.ckpt", "ckpt", "--model", "base") == 0
    assert export(folder / "a.ckpt", "pre", "--model", "base", "--prefix", "lm") == 0
    for out in ("run", "ckpt", "pre"):
        assert_same(AutoModelForCausalLM.from_pretrained(out).state_dict(), state)


def test_a_compiled_model_keeps_its_names(runs: Any, workplace: Path) -> None:
    state = runs["llama"][1]
    llama().save_pretrained(workplace / "base")
    torch.save({"state_dict": {f"net._orig_mod.{k}": v for k, v in state.items()}}, "c.ckpt")
    assert export("c.ckpt", "out", "--model", "base") == 0
    assert_same(AutoModelForCausalLM.from_pretrained("out").state_dict(), state)


def test_a_tokenizer_goes_along(
    runs: Any, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = runs["llama"]
    assert export(folder / "a.ckpt", "out", "--tokenizer", "bytes") == 0
    words = AutoTokenizer.from_pretrained("out")("ab").input_ids
    assert export(folder / "a.ckpt", "again", "--model", "out") == 0
    assert "tokenizer: out" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained("again")("ab").input_ids == words
    assert export(folder / "a.ckpt", "none", "--tokenizer", "nowhere") == 2
    assert not (workplace / "none").exists()


@pytest.mark.parametrize("source", ["run", "checkpoint"])
def test_any_module_is_exported_as_a_state_dict(source: str, runs: Any, workplace: Path) -> None:
    folder, state = runs["plain"]
    sources = dirs_of(folder) if source == "run" else [folder / "a.ckpt"]
    assert export(*sources, "w.safetensors") == 0
    with safe_open("w.safetensors", "pt") as tensors:
        assert tensors.metadata()["layers.2.weight"] == "layers.0.weight"
    alone = {name: value for name, value in state.items() if name != "layers.2.weight"}
    assert_same(load_file("w.safetensors"), alone)
    again = Plain()
    load_model(again, "w.safetensors")
    assert_same(again.state_dict(), state)


def test_a_read_only_copy_without_its_lock_is_read(runs: Any, workplace: Path) -> None:
    folder, state = runs["own"]
    copy = workplace / "copy"
    shutil.copytree(folder / "run0", copy)
    (copy / "lock").unlink()
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    copy.chmod(0o500)
    (copy / "pages").chmod(0o500)
    assert export(copy, "out") == 0
    assert_same(AutoModelForCausalLM.from_pretrained("out").state_dict(), state)
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
    copy.chmod(0o700)
    (copy / "pages").chmod(0o700)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damage(kind: str, run: Path) -> None:
    records = [run / "commit.0", run / "commit.1"]
    page = next(file for file in sorted((run / "pages").iterdir()) if ".weight." in file.name)
    pages = [page, page.with_name(page.name[:-1] + "01"[page.name[-1] == "0"])]
    layout = next(run.glob("layout-*.json"))
    for file in pages:
        if kind == "truncated page":
            file.write_bytes(file.read_bytes()[:-4096])
        elif kind == "flipped bit":
            _flip(file, 4096 + 100)
        elif kind == "garbage header":
            _flip(file, 20)
        elif kind == "missing page":
            file.unlink()
        elif kind == "no header":
            file.write_bytes(b"short")
    for record in records:
        if kind == "no record":
            record.unlink()
        elif kind == "garbage record":
            record.write_bytes(b"garbage" * 1000)
    if kind == "garbage layout":
        layout.write_text("{")
    elif kind == "missing layout":
        layout.unlink()


DAMAGES = {
    "truncated page": "bytes of payload",
    "flipped bit": "checksum",
    "garbage header": "not the page file it should be",
    "missing page": "none of the directories has it",
    "no header": "shorter than its header",
    "no record": "no readable commit",
    "garbage record": "no readable commit",
    "garbage layout": "description of the pages is damaged",
    "missing layout": "it is not there",
}


@pytest.mark.parametrize("kind", list(DAMAGES))
@pytest.mark.parametrize("out", ["out", "w.safetensors"])
def test_damage_is_named_and_nothing_is_written(
    kind: str, out: str, runs: Any, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs["own"][0] / "run0", workplace / "run")
    damage(kind, workplace / "run")
    assert export("run", out) == 2
    assert DAMAGES[kind] in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in workplace.iterdir()] == ["run"]


def test_a_run_in_use_is_refused(
    runs: Any, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs["own"][0] / "run0", workplace / "run")
    lock = DirectoryLock(workplace / "run")
    lock.acquire()
    assert export("run", "out") == 2
    assert "in use" in capsys.readouterr().err
    lock.release()
    assert export("run", "out") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "out"], "does not exist"),
        (["empty", "out"], "no committed run"),
        (["a.ckpt", "full"], "exists"),
        (["a.ckpt", "full/file"], "exists"),
        (["a.ckpt", "full/file/out"], "cannot write"),
        (["a.ckpt", "a.ckpt", "out"], "one checkpoint file"),
        (["a.ckpt", "empty", "out"], "one checkpoint file"),
        (["full/file", "out"], "cannot be loaded"),
        (["weights.pt", "out"], "no state_dict"),
        (["a.ckpt", "out", "--model", "nowhere"], "no config of a model"),
        (["a.ckpt", "out", "--model", "other"], "has shape"),
        (["a.ckpt", "out", "--model", "deeper"], "are not under"),
        (["a.ckpt", "out", "--model", "gpt2"], "are not"),
        (["a.ckpt", "out", "--model", "same", "--prefix", "net"], "are not under 'net.'"),
        (["a.ckpt", "out", "--max-shard-size", "big"], "max_shard_size"),
        (["a.ckpt", "w.safetensors", "--model", "same"], "OUT that is a directory"),
        (["a.ckpt", "b.ckpt", "--optimizer", "R1", "--model", "same"], "--optimizer"),
        (["a.ckpt", "a.ckpt", "b.ckpt", "--optimizer", "R1"], "--optimizer"),
    ],
)
def test_bad_arguments_say_what_to_give(
    words: list[str],
    message: str,
    runs: Any,
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(runs["llama"][0] / "a.ckpt", "a.ckpt")
    (workplace / "empty").mkdir()
    (workplace / "full").mkdir()
    (workplace / "full" / "file").write_text("precious")
    torch.save({"weight": torch.zeros(2)}, "weights.pt")
    llama().config.save_pretrained("same")
    llama(tie_word_embeddings=True).config.save_pretrained("tied")
    LlamaConfig(vocab_size=300, **SMALL, num_attention_heads=2).save_pretrained("other")
    LlamaConfig(
        vocab_size=257, **{**SMALL, "num_hidden_layers": 3}, num_attention_heads=2
    ).save_pretrained("deeper")
    gpt2().config.save_pretrained("gpt2")
    before = sorted(workplace.rglob("*"))
    assert export(*words) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(workplace.rglob("*")) == before
    assert (workplace / "full" / "file").read_text() == "precious"


def test_what_a_config_ties_must_be_equal(
    runs: Any, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = runs["llama"][1]
    llama(tie_word_embeddings=True).config.save_pretrained("tied")
    torch.save({"state_dict": state}, "untied.ckpt")
    assert export("untied.ckpt", "out", "--model", "tied") == 2
    assert "hold different values" in " ".join(capsys.readouterr().err.split())
    equal = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    torch.save({"state_dict": equal}, "equal.ckpt")
    assert export("equal.ckpt", "out", "--model", "tied") == 0
    assert_same(AutoModelForCausalLM.from_pretrained("out").state_dict(), equal)
