"""Make cases for `tests.oracle.corpora` from other seeds: `python make_corpora.py FOLDER SEED [COUNT] [--slice FROM]`.

It asks Megatron-Core itself, so run it with a Python that has `megatron-core` and `torch`; it imports nothing of ours.
It makes `ranks.json.gz` and `layers.json.gz`. With `--slice FROM` it copies COUNT cases of each kind of the files in
the folder FROM instead, which is how the files in `tests/data/deploy` were made.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

Case = dict[str, Any]

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-cp-pp-ep-dp", "pp-tp-cp-ep-dp", "ep-tp-cp-dp-pp", "dp-cp-tp-ep-pp")
DENSE = ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "tp-dp", "tp-pp", "tp-dp-cp", "tp-cp-dp-pp")
#: The most characters of a case in a slice.
LARGEST = 60_000
EXPERT = ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp", "ep-dp")


def ranks_case(draw: random.Random) -> Case:
    """The groups that `initialize_model_parallel` makes, for sizes that divide."""
    from megatron.core import parallel_state

    tp, cp, pp, dp = (draw.choice((1, 1, 2, 3, 4)) for _ in range(4))
    world = tp * cp * pp * dp
    inner = world // pp
    ep = draw.choice([size for size in range(1, inner + 1) if inner % size == 0])
    etp = draw.choice([None, *(size for size in range(1, inner // ep + 1) if inner // ep % size == 0)])
    if inner % (ep * (etp or tp)):
        etp = 1
    edp = inner // (ep * (etp or tp))
    instances = draw.choice([1, 1, 1, *(size for size in (2, 3, 4) if dp * cp % size == 0 and edp % size == 0)])
    order = draw.choice(ORDERS)
    config: Case = {"world": world, "tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "etp": etp, "edp": edp}
    config |= {"order": order, "instances": instances}
    made: dict[str, list[list[int]]] = {}

    def record(ranks: list[int], *_: Any, group_desc: str, **__: Any) -> None:
        made.setdefault(group_desc, []).append(list(ranks))

    def hierarchical(rank: int, ranks: list[int], sizes: list[int], *_: Any, **__: Any) -> Any:
        # Megatron makes them where the rank is; here all of them are wanted.
        each = sizes[0]
        for first in range(0, len(ranks), each):
            made.setdefault("INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", []).append(list(ranks[first : first + each]))
        for first in range(each):
            made.setdefault("INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", []).append(list(ranks[first::each]))
        return [None, None], [None, None]

    with (
        mock.patch.multiple(parallel_state, create_group=record, create_hierarchical_groups=hierarchical),
        mock.patch.object(parallel_state, "_set_global_memory_buffer"),
        mock.patch("torch.distributed.is_initialized", return_value=True),
        mock.patch("torch.distributed.get_world_size", return_value=world),
        mock.patch("torch.distributed.get_rank", return_value=0),
    ):
        parallel_state.destroy_model_parallel()
        try:
            parallel_state.initialize_model_parallel(
                tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
                num_distributed_optimizer_instances=instances, order=order, create_gloo_process_groups=False,
            )  # fmt: skip
        except (AssertionError, RuntimeError) as error:
            return {"config": config, "refused": str(error)}
        finally:
            for name, value in vars(parallel_state).items():
                if name.startswith("_") and name.isupper() and isinstance(value, list):
                    setattr(parallel_state, name, None)
            parallel_state.destroy_model_parallel()
    generator = parallel_state.RankGenerator
    dense = generator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = generator(tp=etp or tp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
    coords: Case = {}
    tokens: Case = {
        "dense": (dense, {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}),
        "expert": (expert, {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp"}),
    }
    for what, (made_by, axes) in tokens.items():
        coords[what] = {}
        for axis, token in axes.items():
            places = [0] * world
            for group in made_by.get_ranks(token):
                for place, rank in enumerate(group):
                    places[rank] = place
            coords[what][axis] = places
    return {
        "config": config,
        "coords": coords,
        "dense_groups": {token: dense.get_ranks(token) for token in DENSE},
        "expert_groups": {token: expert.get_ranks(token) for token in EXPERT},
        "initialize_groups": made,
    }


def layers_case(draw: random.Random) -> Case:
    """The layers that each chunk of each stage builds."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    pp, vpp = draw.choice((1, 2, 3, 4, 6)), draw.choice((None, None, 2, 3))
    vpp = None if pp == 1 else vpp
    kind = draw.choice(("even", "account", "uneven", "layout", "random"))
    chunks = pp * (vpp or 1)
    config: Case = {"num_layers": chunks * draw.randint(1, 4), "pp": pp, "vpp": vpp}
    config |= {
        "embedding_counts": False,
        "loss_counts": False,
        "first": None,
        "last": None,
        "layout": None,
        "mtp": None,
    }
    if kind == "account":
        config |= {"embedding_counts": draw.random() < 0.7, "loss_counts": draw.random() < 0.5}
        config["num_layers"] -= config["embedding_counts"] + config["loss_counts"]
    elif kind == "uneven":
        config["first"] = (vpp or 1) * draw.randint(1, 3)
        config["last"] = draw.choice((None, (vpp or 1) * draw.randint(1, 3)))
        middle = pp - 1 - (config["last"] is not None)
        config["num_layers"] = config["first"] + (config["last"] or 0) + middle * (vpp or 1) * draw.randint(1, 3)
    elif kind == "layout":
        rows = [draw.choice(("t", "tt", "t*3", "(tt)*2", "t,t", "")) for _ in range(chunks)]
        rows[0], rows[-1] = f"E{rows[0]}", f"{rows[-1]}L"
        config["layout"] = "|".join(rows)
        count = sum({"t": 1, "tt": 2, "t*3": 3, "(tt)*2": 4, "t,t": 2, "": 0}[row.strip("EL")] for row in rows)
        config["num_layers"] = count + draw.choice((0, 0, 0, 1))
    elif kind == "random":
        config["num_layers"] = draw.randint(1, 40)
    counts: Case = {"embedding_counts": "account_for_embedding_in_pipeline_split"}
    counts["loss_counts"] = "account_for_loss_in_pipeline_split"
    given = {
        "num_layers": config["num_layers"],
        "hidden_size": 8,
        "num_attention_heads": 1,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "num_layers_in_first_pipeline_stage": config["first"],
        "num_layers_in_last_pipeline_stage": config["last"],
        "pipeline_model_parallel_layout": config["layout"],
        "pipeline_dtype": __import__("torch").float32,
        **{name: config[key] for key, name in counts.items()},
    }
    try:
        made = TransformerConfig(**given)
        found_vpp = made.virtual_pipeline_model_parallel_size
        stages: list[list[Case]] = []
        for stage in range(pp):
            row: list[Case] = []
            with (
                mock.patch.object(parallel_state, "get_pipeline_model_parallel_rank", return_value=stage),
                mock.patch.object(
                    parallel_state, "get_virtual_pipeline_model_parallel_world_size", return_value=found_vpp
                ),
            ):
                for chunk in range(found_vpp or 1):
                    number = None if found_vpp is None else chunk
                    count = get_num_layers_to_build(made, vp_stage=number, pp_rank=stage)
                    start = get_transformer_layer_offset(made, vp_stage=number, pp_rank=stage)
                    row.append({"layers": list(range(start, start + count)), "mtp": [], "mtp_embedding": False})
                    row[-1]["embedding"] = stage == chunk == 0
                    row[-1]["loss"] = stage == pp - 1 and chunk == (found_vpp or 1) - 1
            stages.append(row)
    except (AssertionError, ValueError, ZeroDivisionError) as error:
        return {"kind": kind, "config": config, "refused": f"{type(error).__name__}: {error}"}
    held = [layer for chunk in range(len(stages[0])) for row in stages for layer in row[chunk]["layers"]]
    whole = held == list(range(config["num_layers"]))
    return {"kind": kind, "config": config, "stages": stages, "vpp": found_vpp, "whole": whole, "mtp_stages": []}


def some(cases: list[Case], count: int) -> list[Case]:
    """Some cases of each kind, from small to larger ones; none that are very large."""
    loads: Case = {}
    by_kind: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        if case.get("strategy", "").startswith("eplb_d"):
            # Two balancers have the same load, which is written with the first only.
            sizes = str([case[key] for key in ("num_experts", "redundant", "ep", "groups", "nodes", "layers")])
            case = {"load": loads.get(sizes), **case}
            loads[sizes] = case["load"]
            if case["who"] == "vllm" and any(len(set(row)) < len(row) for row in case["load"]):
                continue  # How numpy orders equal loads depends on the processor.
        if len(json.dumps(case)) < LARGEST:
            kind = (
                *(case.get(key) for key in ("kind", "who", "strategy", "how", "framework", "stage")),
                "refused" in case,
            )
            by_kind.setdefault(kind, []).append(case)
    kept = []
    for of_kind in by_kind.values():
        of_kind.sort(key=lambda case: len(json.dumps(case)))
        kept += [of_kind[number * len(of_kind) // count] for number in range(min(count, len(of_kind)))]
    return kept


def written(file: Path, document: Case) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=200)
    parser.add_argument("--slice", type=Path, help="copy some cases of the files in this folder instead")
    given = parser.parse_args()
    if given.slice is not None:
        for file in sorted(given.slice.glob("*.json.gz")):
            document = json.loads(gzip.decompress(file.read_bytes()))
            note = f"{given.count} of each kind, of {len(document['cases'])} cases"
            written(
                given.folder / file.name, {**document, "slice": note, "cases": some(document["cases"], given.count)}
            )
        return
    for name, make in (("ranks", ranks_case), ("layers", layers_case)):
        draw = random.Random(given.seed)
        cases = [make(draw) for _ in range(given.count)]
        source = f"megatron-core {version('megatron-core')}"
        written(given.folder / f"{name}.json.gz", {"source": source, "seed": given.seed, "cases": cases})


if __name__ == "__main__":
    main()
