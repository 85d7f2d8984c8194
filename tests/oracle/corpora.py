"""Compare with what frameworks themselves say about deployments: `python -m tests.oracle.corpora FOLDER`.

A folder has files `NAME.json.gz`, each `{"source", "seed", "cases": [...]}`, made by the frameworks' own code. A case
that the framework refuses has `"refused"` in place of answers. For each file that is known here, this asks the public
API the same, as a user would, and prints how many cases are equal, how many both refuse, and which differ.

Files of ops have what compilers say about them (see `tests.oracle.computations`).

A folder may have quantized checkpoints instead, each a folder with `expected.json` (see `tests.oracle.quantized`), and
`cases.json`, of sizes that did not fit (see `tests.oracle.quantized_cases`).

Or whole training states, in folders `FORM/CASE` (see `tests.oracle.training_states`); a `FORM` or `FORM/CASE` as a name
takes these only.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import shardwise as sw
from shardwise import deploy
from shardwise.deploy import ExpertMap, megatron

from . import allocations, computations, quantized, quantized_cases, training_states

#: How many differences are shown for each file.
SHOWN = 5

Case = dict[str, Any]


@dataclass
class Comparison:
    """What came of the cases of a file."""

    cases: int = 0
    equal: int = 0
    refused: int = 0
    different: list[str] = field(default_factory=list)

    def add(self, name: str, outcome: str) -> None:
        """Count a case: `"equal"`, `"refused"` as the framework refuses it, or how it differs."""
        self.cases += 1
        if outcome in ("equal", "refused"):
            setattr(self, outcome, getattr(self, outcome) + 1)
        else:
            self.different.append(f"{name}: {outcome}")


def compared(refused: bool, ask: Callable[[], str | None]) -> str:
    """The outcome of one case: `ask` gives what differs, or raises if we refuse."""
    try:
        difference = ask()
    except sw.ShardwiseError as error:
        return "refused" if refused else f"we refuse: {error}"
    except Exception as error:  # A case that is not understood is not equal, and the others still count.
        return f"fails with {type(error).__name__}: {error}"
    return "the framework refuses, we do not" if refused else difference or "equal"


def compare_ranks(cases: list[Case]) -> Iterator[tuple[str, str]]:
    """Rank orders: coordinates and groups of Megatron-Core's ranks."""
    for case in cases:
        config = case["config"]
        yield brief(config), compared("refused" in case, partial(ranks_differ, case))


def ranks_differ(case: Case) -> str | None:
    ranks = ranks_of(case["config"], case["config"]["instances"])
    if "refused" in case:
        return None
    for name, mesh in (("dense", ranks.dense), ("expert", ranks.expert)):
        coordinates = mesh.coordinates()
        for axis, expected in case["coords"][name].items():
            if coordinates[:, mesh.axis_names.index(axis)].tolist() != expected:
                return f"coordinates of {name} along {axis}"
    for name, groups in (("dense", case["dense_groups"]), ("expert", case["expert_groups"])):
        for token, expected in groups.items():
            if ranks.groups(token, expert=name == "expert") != tuples(expected):
                return f"{name} groups of {token}"
    made = ranks.process_groups()
    for name in made.keys() | case["initialize_groups"].keys():
        if made.get(name) != tuples(case["initialize_groups"].get(name, ())):
            return f"group {name}"
    return None


def ranks_of(config: Case, instances: int = 1) -> megatron.Ranks:
    names = ("tp", "pp", "cp", "ep", "etp", "order")
    return megatron.Ranks(config["world"], **{name: config[name] for name in names}, instances=instances)


def compare_layers(cases: list[Case]) -> Iterator[tuple[str, str]]:
    """Pipeline stages of Megatron-Core: which layers each chunk of each stage has."""
    for case in cases:
        yield brief(case["config"]), compared("refused" in case, partial(layers_differ, case))


def layers_differ(case: Case) -> str | None:
    config = dict(case["config"])
    stages = megatron.pipeline(config.pop("num_layers"), **config)
    if "refused" in case:
        return None
    if stages.is_whole != case["whole"]:
        return f"is_whole is {stages.is_whole}"
    for number, (mine, theirs) in enumerate(zip(stages.chunks, case["stages"], strict=True)):
        for chunk, expected in zip(mine, theirs, strict=True):
            found = {
                "layers": list(chunk.layers),
                "embedding": chunk.embedding,
                "loss": chunk.loss,
                "mtp": list(chunk.mtp),
                "mtp_embedding": bool(chunk.mtp) and not chunk.embedding,
                "items": chunk.text,
            }
            if any(found[key] != value for key, value in expected.items()):
                return f"stage {number} has {found}, expected {expected}"
    mtp = [number for number, stage in enumerate(stages.chunks) if any(chunk.mtp for chunk in stage)]
    return None if mtp == case["mtp_stages"] else f"multi-token prediction is on the stages {mtp}"


def compare_experts(cases: list[Case]) -> Iterator[tuple[str, str]]:
    """Experts of ranks: Megatron-Core, vLLM, SGLang, balanced ones included."""
    loads: dict[str, Any] = {}
    for case in cases:
        # The cases of vLLM's balancer have the load of SGLang's case of the same sizes, which is before them.
        sizes = brief({key: case.get(key) for key in ("num_experts", "redundant", "ep", "groups", "nodes", "layers")})
        load = loads[sizes] = case.get("load", loads.get(sizes))
        # vLLM's round_robin fails on some ranks only.
        refused = "refused" in case or any(isinstance(row, dict) for row in case["local"])
        name = f"{case['who']} {case.get('strategy', '')} {sizes}"
        yield name, compared(refused, partial(experts_differ, case, load))


def experts_differ(case: Case, load: Any) -> str | None:
    count, ep, strategy = case["num_experts"], case["ep"], case.get("strategy")
    if case["who"] == "megatron":
        maps = [ExpertMap.even(count, ep)]
    elif strategy in ("linear", "round_robin"):
        maps = [getattr(ExpertMap, strategy)(count, ep)]
    elif strategy in ("eplb_initial", "trivial"):
        maps = [ExpertMap.redundant(count, case["redundant"], ep)]
    else:
        # SGLang's caller says whether groups stay on nodes, vLLM's balancer decides by the sizes.
        is_grouped = strategy != "eplb_deepseek"
        groups = {"groups": case["groups"], "nodes": case["nodes"]} if is_grouped else {}
        maps = list(deploy.balanced_experts(load, count + case["redundant"], ep, balancer=case["who"], **groups))
    if "refused" in case:
        return None
    several = "layers" in case
    expected = [tuples(rows) for rows in (case["local"] if several else [case["local"]])]
    if [each.slots for each in maps] != expected:
        return "other slots"
    physical = case.get("physical_to_logical")
    if physical is not None and [each.physical_to_logical for each in maps] != list(
        tuples(physical if several else [physical])
    ):
        return "another physical_to_logical"
    return None


def compare_engine(cases: list[Case]) -> Iterator[tuple[str, str]]:
    """The parameters of vLLM's ranks, and from which elements of which tensors they are loaded."""
    for case in cases:
        name = case.get("name", "") + brief(case["model"]) + brief(case["engine"])
        yield name, compared("refused" in case, partial(engine_differs, case))


def engine_differs(case: Case) -> str | None:
    model, engine = case["model"], case["engine"]
    config = config_of(model)
    deployment = deploy.vllm(
        config,
        tp=engine["tp"],
        dp=engine["dp"],
        expert_parallel=engine["ep_flag"],
        placement=engine["placement"],
        redundant=engine["redundant"],
    )
    attention, experts = deployment.meshes["attention"], deployment.meshes["experts"]
    tensors = case.get("hf") or hugging_face_shapes(config)
    if "refused" in case:
        for label in deployment.devices:
            deployment.parameters_of(label, tensors)
        return None
    for rank in case["ranks"]:
        label = attention.device(attention.device_index((rank["dp_rank"], 0, rank["tp_rank"])))
        if "moe" in rank:
            place = experts.coordinate(experts.index_of_label(label))[1]
            sizes = experts.shape[1], place
            whole = (1, 0)
            found = {"ep": sizes if engine["ep_flag"] else whole, "tp": whole if engine["ep_flag"] else sizes}
            expected = {axis: (rank["moe"][f"{axis}_size"], rank["moe"][f"{axis}_rank"]) for axis in ("ep", "tp")}
            if found != expected:
                return f"{label} is {found} of the experts, expected {expected}"
        mine = {one.name: one for one in deployment.parameters_of(label, tensors)}
        if sorted(mine) != sorted(name for name, *_ in rank["params"]):
            return f"{label} has the parameters {list(mine)}"
        for name, shape, pieces, *kept in rank["params"]:
            held = pieces_of(mine[name])
            if kept:  # Only the first and the last four pieces.
                held = [*held[:4], *held[-4:]]
            if (list(mine[name].shape), held) != (shape, pieces):
                return f"{label}: {name} is {mine[name].shape} of {held}, expected {shape} of {pieces}"
    return None


def pieces_of(parameter: deploy.LocalParameter) -> list[Any]:
    """The pieces of a parameter as the corpus writes them: tensor, start, stop, start and stop in the parameter."""
    found = []
    for piece in parameter.pieces:
        extents = [side.stop - side.start for side in piece.box]
        # A tensor that is stacked has one dim less than the parameter.
        inner = [1] * (len(parameter.shape) - len(extents)) + extents
        stop = [at + extent for at, extent in zip(piece.start, inner, strict=True)]
        box = [side.start for side in piece.box], [side.stop for side in piece.box]
        found.append([piece.tensor, *box, list(piece.start), stop])
    return found


def config_of(model: Case) -> Case:
    """A model of the corpus as the `config.json` of its family."""
    config = {
        "hidden_size": model["hidden"],
        "num_attention_heads": model["heads"],
        "num_hidden_layers": 1,
        "vocab_size": model["vocab"],
        "attention_bias": model.get("qkv_bias", False),
    }
    if model["kind"] == "deepseek":
        names = {"nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "v": "v_head_dim", "q_lora": "q_lora_rank"}
        config |= {name: model[key] for key, name in names.items()}
        config |= {"kv_lora_rank": model["kv_lora"], "n_routed_experts": model["experts"]}
        config |= {"moe_intermediate_size": model["moe_inter"], "n_shared_experts": model["shared"]}
        return config
    config |= {"num_key_value_heads": model["kv"], "head_dim": model["head_dim"]}
    if model["kind"] == "qwen3_moe":
        return config | {"num_experts": model["experts"], "moe_intermediate_size": model["moe_inter"]}
    return config | {"intermediate_size": model["inter"]}


def hugging_face_shapes(config: Case) -> dict[str, tuple[int, ...]]:
    """The weights of such a model with one layer, without its norms, which the corpus leaves out."""
    hidden, heads, vocab = config["hidden_size"], config["num_attention_heads"], config["vocab_size"]
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    if "kv_lora_rank" in config:
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        shapes[f"{attention}q_a_proj.weight"] = config["q_lora_rank"], hidden
        shapes[f"{attention}q_b_proj.weight"] = heads * (nope + rope), config["q_lora_rank"]
        shapes[f"{attention}kv_a_proj_with_mqa.weight"] = config["kv_lora_rank"] + rope, hidden
        shapes[f"{attention}kv_b_proj.weight"] = heads * (nope + value), config["kv_lora_rank"]
        shapes[f"{attention}o_proj.weight"] = hidden, heads * value
    else:
        sizes = {"q": heads, "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
        for name, count in sizes.items():
            shapes[f"{attention}{name}_proj.weight"] = count * config["head_dim"], hidden
            if config["attention_bias"]:
                shapes[f"{attention}{name}_proj.bias"] = (count * config["head_dim"],)
        shapes[f"{attention}o_proj.weight"] = hidden, heads * config["head_dim"]
    experts = config.get("num_experts") or config.get("n_routed_experts")
    parts: list[tuple[str, int]] = [(mlp, config["intermediate_size"])] if not experts else []
    if experts:
        shapes[f"{mlp}gate.weight"] = experts, hidden
        width = config["moe_intermediate_size"]
        shared = config.get("n_shared_experts", 0) * width
        parts = [(f"{mlp}shared_experts.", shared)] if shared else []
        parts += [(f"{mlp}experts.{expert}.", width) for expert in range(experts)]
    for prefix, width in parts:
        shapes |= {f"{prefix}{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}down_proj.weight"] = hidden, width
    shapes["lm_head.weight"] = vocab, hidden
    return shapes


def compare_deployments(cases: list[Case]) -> Iterator[tuple[str, str]]:
    """What each rank of Megatron-Core holds of a GPT model, chunk by chunk."""
    for case in cases:
        name = brief({key: value for key, value in case.items() if key not in ("ranks", "refused")})
        yield name, compared("refused" in case, partial(deployment_differs, case))


def deployment_differs(case: Case) -> str | None:
    model = case["model"]
    counts = {"embedding_counts": case["account"], "loss_counts": case["account"]}
    stages = megatron.pipeline(
        model["layers"],
        case["pp"],
        case["vpp"],
        first=case["first"],
        last=case["last"],
        layout=case["layout"],
        **counts,
    )
    ranks = ranks_of(case)
    deployment = megatron.gpt(ranks, stages, gated=model["gated"], tied=model["tied"])
    if "refused" in case:
        return None
    shapes = {one["key"]: tuple(one["global_shape"]) for rank in case["ranks"] for one in rank["tensors"]}
    prepended = {one["key"]: one["prepended"] for rank in case["ranks"] for one in rank["tensors"]}
    for number, rank in enumerate(case["ranks"]):
        label = deployment.world.device(number)
        places = {**coordinates(ranks.expert, label), **coordinates(ranks.dense, label)}
        expected_places = {axis: at for axis, at in rank["coords"].items() if axis in places}
        if {axis: places[axis] for axis in expected_places} != expected_places:
            return f"{label} is at {places}, expected {rank['coords']}"
        mine = []
        for key, partition in deployment.held_by(label, shapes).items():
            for piece in partition.pieces(label):
                sides = [(side.start, side.stop) for side in piece.box]
                # Megatron writes experts one by one.
                single = [range(*side) for side in sides[: prepended[key]]]
                rest = sides[prepended[key] :]
                for first in product(*single):
                    offset = [*first, *(start for start, _ in rest)]
                    chunk = chunk_of(stages, places["pp"], key)
                    mine.append(
                        (chunk, key, offset, [stop - start for start, stop in rest], is_first(partition, label))
                    )
        theirs = [
            (one["chunk"], one["key"], one["offset"], one["shape"], not any(one["replica"])) for one in rank["tensors"]
        ]
        if sorted(mine) != sorted(theirs):
            wrong = [one for one in mine if one not in theirs] or [one for one in theirs if one not in mine]
            return f"{label}: {wrong[:2]} is on one side only"
    return None


def coordinates(mesh: sw.DeviceMesh, label: str) -> dict[str, int]:
    return dict(zip(mesh.axis_names, mesh.coordinate(mesh.index_of_label(label)), strict=True))


def is_first(partition: sw.Partition, label: str) -> bool:
    return partition.replica_id(label) == 0


def chunk_of(stages: deploy.Stages, stage: int, key: str) -> int:
    """The chunk of a tensor on a stage: that of its layer, or of the embedding or the output."""
    if key.startswith("decoder.layers."):
        return stages.chunk[int(key.split(".")[2])]
    what = "embedding" if key.startswith("embedding.") else "loss"
    found = [number for number, chunk in enumerate(stages.chunks[stage]) if getattr(chunk, what)]
    # A tied embedding is where the output layer is.
    return found[0] if found else len(stages.chunks[stage]) - 1


def tuples(rows: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, rows))


def brief(values: Case) -> str:
    """The values that say something, in a line."""
    said = (f"{key}={brief(value) if isinstance(value, dict) else value}" for key, value in values.items() if value)
    return f"({', '.join(said)})"


def compare_quantized(folder: Path) -> Iterator[tuple[str, Comparison]]:
    """Quantized checkpoints: recognised, cut for one, two and four ranks, merged, dequantized; and sizes that fit."""
    checkpoints = Comparison()
    for path in quantized.folders(folder):
        checkpoints.add(path.name, compared(False, partial(quantized.checkpoint_differs, path)))
    if checkpoints.cases:
        yield "checkpoints", checkpoints
    if (folder / "cases.json").is_file():
        sizes = Comparison()
        for case in json.loads((folder / "cases.json").read_text(encoding="utf-8")):
            sizes.add(case["id"], compared(False, partial(quantized_cases.answer_differs, case)))
        yield "cases", sizes


#: What is known of each file.
KNOWN: dict[str, Callable[[list[Case]], Iterator[tuple[str, str]]]] = {
    "ranks": compare_ranks,
    "layers": compare_layers,
    "experts": compare_experts,
    "engine": compare_engine,
    "deployments": compare_deployments,
    **{name: partial(allocations.compare, name, compared) for name in allocations.DIFFER},
}


#: The same of files whose cases are never refused.
COMPUTATIONS = computations.KNOWN


def cases_of(file: Path) -> list[Case]:
    with gzip.open(file) as opened:
        document: dict[str, Any] = json.load(opened)
    cases: list[Case] = document["cases"]
    return cases


def compare(name: str, cases: list[Case]) -> Comparison:
    """Compare all cases of a file."""
    comparison = Comparison()
    if name in COMPUTATIONS:
        for case, ask in COMPUTATIONS[name](cases):
            comparison.add(case, compared(False, ask))
        return comparison
    for case, outcome in KNOWN[name](cases):
        comparison.add(case, outcome)
    return comparison


def main(arguments: Sequence[str] | None = None) -> int:
    known = [*KNOWN, *COMPUTATIONS]
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.corpora", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder with files NAME.json.gz")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(known)}; FORM/CASE")
    given = parser.parse_args(arguments)
    if states := training_states.folders(given.folder, given.names):
        return int(show_states(states))
    failed = False
    if not given.names:
        for name, found in compare_quantized(given.folder):
            failed |= shown(name, found)
    files = {name: given.folder / f"{name}.json.gz" for name in given.names or known}
    if not any(file.is_file() for file in files.values()):
        if (given.folder / "cases.json").is_file() or quantized.folders(given.folder):
            return int(failed)
        print(f"{given.folder} has none of {', '.join(f'{name}.json.gz' for name in files)}", file=sys.stderr)
        return 2
    for name, file in files.items():
        if name not in known or not file.is_file():
            if given.names:
                print(f"{name}: not there" if name in known else f"{name}: not known here")
            failed |= bool(given.names)
            continue
        cases = cases_of(file)
        failed |= shown(name, compare(name, cases))
        if name == "steps":
            for line in computations.fewest_of(cases):
                print(f"  {line}")
    if not given.names:
        for file in sorted(given.folder.glob("*.json.gz")):
            if (name := file.name.removesuffix(".json.gz")) not in known:
                print(f"{name}: not known here")
    return int(failed)


def show_states(cases: list[Path]) -> bool:
    """Print what came of training states, a line for each checkpoint; whether any is not equal."""
    failed = count = 0
    for case in cases:
        for name, states in training_states.compare_case(case):
            print(f"{case.parent.name}/{case.name} {name}: {states}"[:1000], flush=True)
            failed += not states.is_equal
            count += 1
    print(f"{count} checkpoints, {count - failed} equal")
    return bool(failed)


def shown(name: str, found: Comparison) -> bool:
    """Print what came of a file; whether anything differs."""
    print(
        f"{name}: {found.cases} cases, {found.equal} equal, {found.refused} refused as the framework refuses, "
        f"{len(found.different)} different"
    )
    for line in found.different[:SHOWN]:
        print(f"  {line[:1000]}")
    if len(found.different) > SHOWN:
        print(f"  and {len(found.different) - SHOWN} more")
    return bool(found.different)


if __name__ == "__main__":
    raise SystemExit(main())
