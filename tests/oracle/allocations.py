"""Allocations of training states as PyTorch, DeepSpeed and Megatron-Core made them in real processes.

Files `alloc_torch`, `alloc_deepspeed` and `alloc_megatron` of a folder: a case has `params`, the names, shapes and
dtypes of the whole model, and for each rank `sums`: by kind the bytes of its tensors and of their storages. Those of
Megatron have the local parameters of each rank instead, and how large its data-parallel groups are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import shardwise as sw
from shardwise.deploy import Deployment, DeploymentRule, fsdp2
from shardwise.state import TrainingState, training_state

Case = dict[str, Any]

#: What the frameworks' kinds are called here.
KINDS = {
    "weights": ("param",),
    "gradients": ("grad", "grad32"),
    "masters": ("master",),
    "optimizer": ("optimizer",),
    "whole": ("param_whole_after_step",),
}


def everywhere(size: int, name: str = "dp") -> Deployment:
    """All tensors whole on so many devices."""
    return Deployment(size, sw.DeviceMesh((size,), (name,)), {}, default=DeploymentRule((), "mesh"), replicated=[name])


def tensors_of(case: Case, dtype: str | None = None) -> dict[str, Any]:
    return {one["name"]: (tuple(one["shape"]), dtype or one["dtype"]) for one in case["params"]}


def differs(
    state: TrainingState, at: int, rank: Case, counted: dict[str, str] | None = None, skipped: tuple[str, ...] = ()
) -> str | None:
    """The first kind of which a rank allocated something else."""
    for kind, names in KINDS.items():
        if kind in skipped:
            continue
        sums = rank["sums"]
        wanted = sum(sums.get(name, {}).get((counted or {}).get(name, "allocated"), 0) for name in names)
        found = int(state.allocated[kind][at]) if kind in state.kinds else 0
        if found != wanted:
            return f"{kind} of rank {at}: {found} bytes, the framework {wanted}"
    return None


def all_differ(
    state: TrainingState, case: Case, counted: dict[str, str] | None = None, skipped: tuple[str, ...] = ()
) -> str | None:
    found = (differs(state, at, rank, counted, skipped) for at, rank in enumerate(case["ranks"]))
    return next((why for why in found if why is not None), None)


def torch_differs(case: Case) -> str | None:
    tensors, framework = tensors_of(case), case["framework"]
    if framework == "ddp_zero_redundancy":
        return all_differ(training_state(tensors, everywhere(case["world"]), "adamw", "zero-redundancy"), case)
    if framework == "fsdp1":
        return all_differ(fsdp1_state(case, tensors), case)
    return fsdp2_differs(case, tensors)


def fsdp1_state(case: Case, tensors: dict[str, Any]) -> TrainingState:
    world, settings = case["world"], {"use_orig_params": case["orig"]}
    if case["mp"]:
        settings["param_dtype"] = case["mp"]
    group = 1 if case["strategy"] == "NO_SHARD" else world // case["replicas"]
    units = None if case["wrap"] else r"^"
    return training_state(
        tensors, everywhere(world), "adamw", "fsdp1", group=group, units=units, settings=settings
    )  # fmt: skip


def fsdp2_differs(case: Case, tensors: dict[str, Any]) -> str | None:
    mesh, tp = dict(case["mesh"]), case["tp"]
    mesh.pop("tp", None)
    sizes = list(mesh.values())
    replicate, shard = (1, *sizes) if len(sizes) == 1 else sizes
    rules = {}
    for one in case["ranks"][0]["tensors"]:
        if one["kind"] == "param" and "tp" in one["mesh"]:
            cut = one["placements"][-1]
            axes: list[str | None] = [None] * len(one["global_shape"])
            if cut.startswith("S("):
                axes[int(cut[2:-1])] = "tp"
            rules[f"^{one['name'].replace('.', chr(92) + '.')}$"] = tuple(axes)
    state = training_state(tensors, fsdp2(shard, replicate, tp=tp, tp_rules=rules), "adamw", "fsdp2")
    # Gradients that were set by hand, where a dim is uneven over tp, have no padding.
    skipped = ("gradients",) if "grads_by_hand" in case["ranks"][0] else ()
    return all_differ(state, case, skipped=skipped) or held_differs(state, case)


def held_differs(state: TrainingState, case: Case) -> str | None:
    """The first tensor of FSDP2 of which a rank holds something else."""
    for at, rank in enumerate(case["ranks"]):
        wanted = {(one["kind"], one["name"]): one["bytes"] for one in rank["tensors"] if one["bytes"]}
        kinds = {"weights": "param", "gradients": "grad", "optimizer": "optimizer"}
        found = {}
        for kept in state.of(state.device_mesh.device(at)):
            name = kept.tensor if kept.kind != "optimizer" else f"{kept.tensor}.{kept.name}"
            if kept.held:
                found[kinds[kept.kind], name] = kept.held
        if found != wanted:
            odd = sorted(set(found.items()) ^ set(wanted.items()))[0]
            return f"rank {at}: {odd[0]} is {found.get(odd[0])} bytes, the framework's {wanted.get(odd[0])}"
    return None


def deepspeed_differs(case: Case) -> str | None:
    stage, dtype = case["stage"], case["dtype"]
    tensors, world = tensors_of(case, dtype), everywhere(case["world"])
    sums = "float32" if case["grad_accum"] == "fp32" else None
    if stage == 0:  # Without ZeRO; of bfloat16 its FP16_UnfusedOptimizer keeps a master of each parameter.
        if sums is not None and dtype == "bfloat16":
            raise sw.LayoutError(
                "DeepSpeed without ZeRO, which is not known here by a name, sums no gradients otherwise"
            )
        return all_differ(training_state(tensors, world, "adamw", "ddp", masters=sums_of(dtype)), case)
    settings: Case = {"param_groups": case["groups"]}
    if stage == 3:
        settings |= {"stage3_param_persistence_threshold": case["persist"], "sub_group_size": case["sub_group"]}
    else:
        settings["round_robin_gradients"] = case["round_robin"]
    state = training_state(tensors, world, "adamw", f"zero{stage}", gradients=sums, settings=settings)
    # What its gradients are parts of are buffers of communication, of sizes of their own.
    return all_differ(state, case, {"grad": "bytes"})


def sums_of(dtype: str) -> str | None:
    return "float32" if dtype == "bfloat16" else None


def megatron_differs(case: Case) -> str | None:
    sharding = "megatron" if case["distributed_optimizer"] else "megatron-ddp"
    for number, rank in enumerate(case["ranks"]):
        found = dict.fromkeys(KINDS, 0)
        for is_expert in (False, True):
            own = [one for one in rank["params"] if one["expert"] is is_expert]
            if not own:
                continue
            buffer = next(one for one in rank["buffers"] if (one["kind"] != "dense") is is_expert)
            settings: Case = {}
            units = None
            if case["distributed_optimizer"]:
                settings["pad_buckets_for_high_nccl_busbw"] = case["pad"]
                if case["bucket"] is not None and rank["coords"]["pp"] == 0:
                    settings["bucket_size"] = case["bucket"]
                is_tied = case["model"]["tied"] and case["pp"] > 1
                settings["shared_embedding"] = "word_embeddings|output_layer" if is_tied else "^$"
                units = r"^chunk\d+"
            state = training_state(
                {one["name"]: (tuple(one["shape"]), one["dtype"]) for one in own},
                everywhere(buffer["dp_size"]),
                "adamw",
                sharding,
                gradients="float32" if case["grad_fp32"] else None,
                units=units,
                settings=settings,
            )
            for kind, sizes in state.allocated.items():
                found[kind] += int(sizes[buffer["dp_rank"]])
        for kind, (name, *_) in KINDS.items():
            wanted = rank["sums"].get(name, {}).get("allocated", 0)
            if found[kind] != wanted:
                return f"{kind} of rank {number}: {found[kind]} bytes, the framework {wanted}"
    return None


def optimizers_differ(case: Case) -> str | None:
    sharding, _, orig = case["framework"].partition("-")
    settings = {"use_orig_params": bool(orig)} if sharding == "fsdp1" else None
    tensors = tensors_of(case)
    if case["optimizer"] == "muon" and any(len(shape) != 2 for shape, _ in tensors.values()):
        raise sw.LayoutError("PyTorch's Muon takes matrices only; here AdamW has the rest, as is usual")
    state = training_state(tensors, everywhere(case["world"]), case["optimizer"], sharding, settings=settings)
    if "aten.add_" in case["ranks"][0].get("refused", ""):
        raise sw.LayoutError("DTensor lacks an operation of Muon's step for some shapes, whatever is allocated")
    return all_differ(state, case)


#: What is known of each file, by its name.
DIFFER = {"alloc_torch": torch_differs, "alloc_deepspeed": deepspeed_differs, "alloc_megatron": megatron_differs}
DIFFER["alloc_optimizers"] = optimizers_differ


def compare(name: str, compared: Any, cases: list[Case]) -> Iterator[tuple[str, str]]:
    """The outcome of each case of a file."""
    for number, case in enumerate(cases):
        refused = "refused" in case or "refused" in case["ranks"][0]
        yield f"{number} {case['framework']}", compared(refused, partial(DIFFER[name], case))
