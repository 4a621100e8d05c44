"""Ranks of a process group share what the first one measures; models that are warmed up."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing

import gemmsmith.torch as gt
from gemmsmith import ArgumentError, Config, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.host import autotune as module
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.measured_configs import Entry, key_of

CONFIG = Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1, stages=4)


def entry() -> Entry:
    binding = bind(Request(Spec((64, 128), "bf16"), Spec((128, 256), "bf16")))
    return Entry(key_of(binding.problem, binding.spec), 64, CONFIG, 5.0, "NVIDIA H200")


def use_folder(folder: Path) -> None:
    measured_configs.folder = lambda device=0: folder  # type: ignore[assignment]
    measured_configs._about = lambda device: {}  # type: ignore[assignment]


def rank_of_two(rank: int, port: int, folder: str) -> None:
    """Each has a folder of its own, as on another machine; only the first may measure."""
    use_folder(Path(folder) / str(rank))
    store = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for group in (None, torch.distributed.new_group([0, 1])):
        with gt.autotune(group=group) as block:
            assert bool(module._block().max_configs) == (rank == 0)  # type: ignore[union-attr]
            if rank == 0:
                block.tuned.append(module.Tuned("a problem", entry(), 6.0, 0.1))
        measured_configs._SAVED.clear()
        assert bool(measured_configs.find(entry().key)) == (rank == 1)  # the first one's is not measured but played
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_agree(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(rank_of_two, (port, str(tmp_path)), nprocs=2)


def test_without_ranks_it_is_the_librarys() -> None:
    with gt.autotune(max_configs=3) as block:
        assert module._block() is block
        assert block.max_configs == 3
    with pytest.raises(ArgumentError, match="max_configs"), gt.autotune(max_configs=0):
        pass


class Model(torch.nn.Module):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=50)
        self.embed = torch.nn.Embedding(50, 8)
        self.seen: list[tuple[int, bool]] = []

    def forward(self, input_ids: torch.Tensor) -> Any:
        active = module._block()
        assert active is not None
        self.seen.append((input_ids.numel(), torch.is_grad_enabled()))
        return SimpleNamespace(logits=self.embed(input_ids))


class OfNames(torch.nn.Module):
    """Returns a dict."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> dict[str, Any]:
        return {"past": None, "logits": self.model(input_ids).logits}


def test_a_model_is_warmed_up() -> None:
    model = Model().eval()
    assert gt.warmup(model, [1, 16]).tuned == []
    model.train()
    gt.warmup(model, (3,), inputs=lambda count: (torch.arange(count),))
    assert model.seen == [(1, False), (16, False), (3, True)]
    assert model.embed.weight.grad is None
    gt.warmup(OfNames(model), (3,), inputs=lambda count: (torch.arange(count),))
    assert model.seen[3:] == [(3, True)]
    for tokens in ([0], ["1"]):
        with pytest.raises(ArgumentError, match="tokens"):
            gt.warmup(model, tokens)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="inputs: got None for a model without config.vocab_size"):
        gt.warmup(torch.nn.Linear(2, 2), [1])
