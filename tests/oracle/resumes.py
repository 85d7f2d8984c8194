"""A tiny run of AdamW in PyTorch, FSDP2 or DeepSpeed, on CPUs with gloo: begun and saved, or resumed for one more step.

Run with a number of processes, and a JSON list of what they do: `["begin" or "resume", FRAMEWORK, FOLDER, ANSWER]`,
where FRAMEWORK is one of `FRAMEWORKS`. The answer is an archive of numpy's with the parameters after the step that
follows what was saved: of the run itself, which went on, or of the one that resumed.

The model multiplies its parameters with given numbers, so that these are the gradients, on all ranks the same. Two
groups have different hyperparameters; one weight is tied to another, one is frozen, one has one element.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from .worker import run_ranks

__all__ = ["FRAMEWORKS", "main"]

STEPS = 2
SHAPES = {"embed.weight": (7, 4), "up.weight": (5, 4), "up.bias": (5,), "scale": (1,), "frozen.weight": (3, 4)}


class Model(nn.Module):  # type: ignore[misc]
    """Parameters of these names, the last tied to the first; its output is their product with the gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in SHAPES.items():
            outer, _, inner = name.rpartition(".")
            if outer and not hasattr(self, outer):
                self.add_module(outer, nn.Module())
            value = (torch.randint(-64, 64, shape, generator=generator) / 64).to(dtype)
            owner = getattr(self, outer) if outer else self
            owner.register_parameter(inner, nn.Parameter(value, requires_grad=outer != "frozen"))
        self.head = nn.Module()
        self.head.weight = self.embed.weight

    def forward(self, step: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32)
        for name in SHAPES:
            outer, _, inner = name.rpartition(".")
            parameter = getattr(getattr(self, outer) if outer else self, inner)
            if parameter.requires_grad:
                total = total + (parameter.float() * gradient(name, int(step))).sum()
        return total


def gradient(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sorted(SHAPES).index(name))
    return torch.randint(-32, 32, SHAPES[name], generator=generator) / 16


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, others = ([each for each in trained if (each.ndim > 1) is is_matrix] for is_matrix in (True, False))
    return [
        {"params": matrices, "lr": 0.01, "weight_decay": 0.1},
        {"params": others, "lr": 0.005, "weight_decay": 0.0},
    ]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), betas=(0.9, 0.95), foreach=False)


class Torch:
    """A run of one process: a file of `torch.save`."""

    dtype = torch.float32

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = self.wrapped(Model(self.dtype))
        self.optimizer = adam(self.model)

    def wrapped(self, model: nn.Module) -> nn.Module:
        return model

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor(number)).backward()
        self.optimizer.step()

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": STEPS}
        torch.save(state, self.folder / "run.pt")

    def load(self) -> None:
        (path,) = self.folder.glob("*.pt")
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, getattr(parameter, "full_tensor", parameter.detach)()


class Bfloat16(Torch):
    """The same in bfloat16, moments too."""

    dtype = torch.bfloat16


class Fsdp2(Torch):
    """FSDP2 with PyTorch's distributed checkpoint."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",)))
        return model

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), checkpoint_id=self.folder / "run")

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        # What was DeepSpeed's has the weights by their own names, as torchtitan has them.
        model, optimizer = self.state().values()
        state = {**model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=self.folder)
        model = {name: state[name] for name in model}
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=state["optimizer"])


class Torchtitan(Fsdp2):
    """The same, as torchtitan 0.3 has it: groups by the name of each parameter, and a schedule."""

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {**model, **{f"optimizer.{name}": value for name, value in optimizer.items()}}

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        state = self.state()
        dcp.load(state, checkpoint_id=self.folder)
        optimizer = {name.removeprefix("optimizer."): value for name, value in state.items() if "optimizer." in name}
        set_model_state_dict(self.model, {name: value for name, value in state.items() if "optimizer." not in name})
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=options)


class Verl(Fsdp2):
    """FSDP2 with a file for each rank, as `FSDPCheckpointManager` of verl 0.9.1 loads and saves them."""

    @property
    def end(self) -> str:
        return f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"

    def save(self) -> None:
        torch.save(self.model.state_dict(), self.folder / f"model_{self.end}")
        torch.save(self.optimizer.state_dict(), self.folder / f"optim_{self.end}")

    def load(self) -> None:
        self.model.load_state_dict(torch.load(self.folder / f"model_{self.end}", weights_only=False))
        self.optimizer.load_state_dict(torch.load(self.folder / f"optim_{self.end}", weights_only=False))


class Zero:
    """DeepSpeed, with PyTorch's AdamW; what is resumed is a universal checkpoint."""

    stage, is_bf16 = 2, False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *, universal: bool) -> None:
        import logging

        import deepspeed
        from deepspeed.comm import torch as communication
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        communication.build_shm_op = lambda: None  # It takes minutes to compile, and is only faster.
        zero = {"stage": self.stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000, "overlap_comm": False}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 4
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": self.is_bf16},
            "steps_per_print": 10**9,
            "gradient_clipping": 0.0,
            "checkpoint": {"load_universal": universal},
        }
        self.model = Model(torch.float32)
        optimizer = adam(self.model)
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=optimizer,
            model_parameters=groups(self.model),
            config=config,
            dist_init_required=False,
        )

    def step(self, number: int) -> None:
        if not hasattr(self, "engine"):
            self.start(universal=False)
        self.engine.backward(self.engine(torch.tensor(number)))
        self.engine.step()

    def save(self) -> None:
        self.engine.save_checkpoint(str(self.folder / "run"), client_state={"consumed": 12})

    def load(self) -> None:
        self.start(universal=True)
        path, _ = self.engine.load_checkpoint(str(self.folder))
        assert path is not None
        assert self.engine.global_steps == STEPS, self.engine.global_steps
        if self.stage == 3:
            self.apart()

    def apart(self) -> None:
        """With stage 3 DeepSpeed 0.19.8 gives one tensor `step` to all groups, which each of them counts up."""
        for state in self.engine.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                found = safe_get_full_fp32_param(parameter)
                yield name, found.reshape(SHAPES[name]).clone()
            else:
                with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                    yield name, parameter.detach().float().clone()


class Zero1(Zero):
    stage = 1


class Zero3(Zero):
    stage = 3


class Zero1Bfloat16(Zero1):
    is_bf16 = True


class Zero3Bfloat16(Zero3):
    is_bf16 = True


FRAMEWORKS: dict[str, Any] = {
    "torch": Torch,
    "bfloat16": Bfloat16,
    "dcp": Fsdp2,
    "torchtitan": Torchtitan,
    "fsdp2": Verl,
    "zero1": Zero1,
    "zero2": Zero,
    "zero3": Zero3,
    "zero1-bf16": Zero1Bfloat16,
    "zero3-bf16": Zero3Bfloat16,
}


def done(what: str, framework: str, folder: str, answer: str) -> None:
    run = FRAMEWORKS[framework](Path(folder))
    if what == "begin":
        for number in range(STEPS):
            run.step(number)
        run.save()
    else:
        run.load()
    run.step(STEPS)
    found = {name: tensor.detach().float().numpy() for name, tensor in run.parameters()}
    if dist.get_rank() == 0:
        np.savez(answer, **found)
    dist.barrier()


def rank_of(rank: int, world: int, jobs: list[list[str]]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{world}")
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{jobs[0][3]}.store")
    for job in jobs:
        done(*job)
    dist.destroy_process_group()


def main(world: int, jobs: list[list[str]]) -> None:
    if world == 1:
        rank_of(0, 1, jobs)
        return
    run_ranks(rank_of, [(rank, world, jobs) for rank in range(world)])


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29591")
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
