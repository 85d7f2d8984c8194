"""The arguments of the commands about layouts, of which none writes a tensor."""

import argparse
from pathlib import Path

from .options import (
    LAYOUT_HELP,
    MESH_HELP,
    RULES_HELP,
    add_config,
    add_drop,
    add_for,
    add_json,
    add_mesh,
    add_source_mesh,
    add_source_rules,
    add_uneven,
    rules_path,
)
from .parser import Parser

__all__ = [
    "SHELLS",
    "add_completion",
    "add_einsum",
    "add_explore",
    "add_fits",
    "add_propagate",
    "add_report",
    "add_rules",
    "add_show",
    "add_state",
    "add_translate",
]

#: The shells for which `completion` writes a script.
SHELLS = ("bash", "zsh", "fish")


def add_report(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `report`."""
    report = commands.add_parser(
        "report",
        help="show what each device would hold of a checkpoint",
        description=(
            "Read the headers of a checkpoint, apply the rules of a layout map, and show what each device of the mesh "
            "would hold, and what looks wrong. No tensor is loaded."
        ),
    )
    report.add_argument(
        "source",
        metavar="CHECKPOINT",
        type=str,
        help="a checkpoint of any format; or a model's config.json alone, or a list of tensors in JSON or TOML: "
        '{"NAME": SHAPE, ...}',
    )
    add_mesh(report)
    report.add_argument("--rules", metavar="TOML", type=rules_path, help=RULES_HELP)
    add_for(report)
    add_source_rules(report, "CHECKPOINT")
    add_source_mesh(report, "CHECKPOINT")
    add_config(report)
    add_uneven(report)
    add_drop(report, "leave out")
    report.add_argument("--all", action="store_true", help="a row for each tensor, even where layers are alike")
    report.add_argument("--devices", action="store_true", help="also list the bytes of each device")
    report.add_argument("--ranks", action="store_true", help="also list each rank with its bytes and its file")
    report.add_argument("--html", metavar="FILE", type=Path, help="also write a page to look at in a browser")
    add_json(report)
    report.add_argument(
        "--strict",
        action="store_true",
        help="exit with status 1 on any warning, not only on tensors that cannot be placed",
    )


def add_show(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `show`."""
    show = commands.add_parser(
        "show",
        help="draw one tensor's shards",
        description="Draw the shards of one tensor, and the devices that hold them.",
    )
    show.add_argument("shape", metavar="SHAPE", help='the shape, as in 8,6 or 8x6; "" for a scalar')
    show.add_argument("--mesh", metavar="AXES", required=True, help=MESH_HELP)
    show.add_argument(
        "--layout",
        metavar="LAYOUT",
        required=True,
        help=f"{LAYOUT_HELP}; a packed dim as in (3 12@tp 64)",
    )
    add_uneven(show)
    show.add_argument("--dtype", metavar="DTYPE", help="also show bytes; float32, bfloat16, F8_E4M3, ...")
    add_json(show)


def add_translate(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `translate`."""
    translate = commands.add_parser(
        "translate",
        help="write one layout in the dialects of JAX, PyTorch, TensorFlow, Keras, XLA, Shardy and Megatron",
        description="Write a layout in the dialects of other frameworks, or say why they cannot express it.",
    )
    translate.add_argument("--mesh", metavar="AXES", required=True, help=MESH_HELP)
    translate.add_argument("--layout", metavar="LAYOUT", required=True, help=f"{LAYOUT_HELP}; () for a scalar")
    translate.add_argument("--unreduced", metavar="AXES", help="mesh axes over which the values are partial sums")
    translate.add_argument(
        "--to", metavar="DIALECTS", help="jax,torch,tf,keras,hlo,shardy,megatron,spmd; the default is all"
    )
    add_json(translate)


def add_einsum(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `einsum`."""
    einsum = commands.add_parser(
        "einsum",
        help="say what an einsum on cut tensors gives, and what it moves",
        description=(
            "Give the layout of an einsum's result, the collectives before and after it with the bytes that each "
            "device receives, the local shapes, the flops, and why."
        ),
    )
    einsum.add_argument("einsum", metavar="EINSUM", help="one or two operands and a result, as in 'bsd,df->bsf'")
    einsum.add_argument(
        "layouts",
        metavar="LAYOUT",
        nargs="+",
        help="the layout of each operand, as in dp,-,- -,tp; ? for one that the policy chooses",
    )
    einsum.add_argument("--shapes", metavar="SHAPE", nargs="+", required=True, help="the shape of each operand")
    einsum.add_argument("--mesh", metavar="AXES", required=True, help=MESH_HELP)
    einsum.add_argument(
        "--dtype", metavar="DTYPE", default="float32", help="the dtype of all tensors; the default is float32"
    )
    _add_policy(einsum)
    einsum.add_argument("--out", metavar="LAYOUT", help="the layout of the result")
    einsum.add_argument("--unreduced", metavar="AXES", help="with --out: axes over which the result stays partial sums")
    add_json(einsum)


def add_propagate(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `propagate`."""
    propagate = commands.add_parser(
        "propagate",
        help="say what a whole computation on cut tensors moves, and why",
        description=(
            "Read a computation as JSON (json.dumps of its to_json()), and list what must move, the most bytes "
            "first, with the lines of the source and why."
        ),
    )
    propagate.add_argument("computation", metavar="FILE", type=Path, help="the computation, in JSON")
    propagate.add_argument(
        "layouts",
        metavar="LAYOUT",
        nargs="+",
        help="the layout of each input in order, as in dp,-,- -,tp; ? for one that is free",
    )
    propagate.add_argument("--results", metavar="LAYOUT", nargs="+", help="the layout of each result")
    propagate.add_argument("--mesh", metavar="AXES", required=True, help=MESH_HELP)
    _add_policy(propagate)
    propagate.add_argument("--all", action="store_true", help="list all moves, not only the first ten")
    propagate.add_argument("--html", metavar="FILE", type=Path, help="also write a page to look at in a browser")
    add_json(propagate)


def add_explore(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `explore`."""
    explore = commands.add_parser(
        "explore",
        help="open a page on which you change a mesh, a layout and an operation, and see the results",
        description=(
            "Serve a page to this machine's browsers, and open it: shards, replicas, other dialects, changes of layout "
            "and what an operation moves, for the mesh and the layouts that you type. Ctrl-C ends it."
        ),
    )
    explore.add_argument("--port", metavar="PORT", type=int, default=0, help="the port; a free one if left out")
    explore.add_argument("--no-browser", action="store_true", help="only print the address")


def add_fits(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `fits`."""
    fits = commands.add_parser(
        "fits",
        help="show for which sizes of tensor parallelism a model fits",
        description=(
            "Say for each size of tensor and expert parallelism whether a model, also a quantized one, fits: as it is, "
            "with shared blocks, with padding, or not. If it does not, the answer names the tensor and its blocks, and "
            "what engines refuse. Only headers are read; for known families config.json is enough. The exit status "
            "is 1 if no size fits, and 4 if names of tensors are not known: then give rules that say how they are cut."
        ),
    )
    fits.add_argument("model", metavar="MODEL", type=str, help="a checkpoint of any format, or a model's config.json")
    fits.add_argument(
        "--tp", metavar="SIZES", default="1,2,4,8,16", help="sizes of tensor parallelism; 1,2,4,8,16 if left out"
    )
    fits.add_argument(
        "--ep",
        metavar="SIZES",
        default="1",
        help="sizes of expert parallelism; 1 if left out. The features of experts are cut over tp / ep ranks",
    )
    fits.add_argument(
        "--ratio", metavar="3,2,1", help="in place of sizes: the ratio of the devices' unequal shares, in whole units"
    )
    fits.add_argument(
        "--rules",
        metavar="TOML",
        type=rules_path,
        help=f"{RULES_HELP}; without rules the names of tensors say what is cut",
    )
    add_config(fits)
    add_json(fits)


def add_state(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `state`."""
    state = commands.add_parser(
        "state",
        help="show what each rank needs for weights, gradients, optimizer and caches, and whether it fits",
        description=(
            "Say for each rank, to the byte, what it holds and what its framework allocates of weights, gradients, "
            "master copies, states of the optimizer, and caches of keys and values. The names of weights say how they "
            "are cut over --tp, --pp, --dp and --ep, as in fits; or rules say it, over --mesh. With --memory the exit "
            "status is 1 if a rank does not fit, and the answer says what fits; the status is 4 if names are not known."
        ),
    )
    state.add_argument(
        "model",
        metavar="MODEL",
        type=str,
        help='a checkpoint of any format, a model\'s config.json, or a list of tensors: {"NAME": SHAPE, ...}',
    )
    for name, what in (
        ("tp", "tensor parallelism"),
        ("pp", "pipeline stages"),
        ("dp", "data parallelism"),
        ("ep", "expert parallelism, over the ranks of tp and dp"),
        ("etp", "tensor parallelism of experts"),
    ):
        state.add_argument(f"--{name}", metavar="N", type=int, default=1, help=f"{what}; 1 if left out")
    state.add_argument("--layers", metavar="COUNTS", help="the layers of each stage, as in 19,20,20,21")
    add_mesh(state)
    state.add_argument(
        "--rules",
        metavar="TOML",
        type=rules_path,
        help=f"{RULES_HELP}; without rules the names of tensors say what is cut",
    )
    add_config(state)
    state.add_argument(
        "--optimizer",
        metavar="NAME",
        help="adamw, adam8bit, sgd, sgd-momentum, lion, muon, adafactor; or dtypes by hand: exp_avg=float32,...; "
        "without one nothing is trained",
    )
    state.add_argument(
        "--sharding",
        metavar="HOW",
        help="ddp (the default), zero-redundancy, zero1, zero2, zero3, fsdp1, fsdp2, hsdp, megatron, megatron-ddp; "
        "none: the state is cut only as the rules cut the weights",
    )
    state.add_argument(
        "--over", metavar="AXES", help="the axes over which the state is sharded; those of data parallelism if left out"
    )
    state.add_argument(
        "--group", metavar="N", type=int, help="the number of ranks that share a state, if not all share it"
    )
    for name, what in (
        ("weights", "floating-point weights, instead of their own"),
        ("gradients", "gradients; that of the weights if left out"),
        ("masters", "master copies, or none; the framework's own if left out"),
    ):
        state.add_argument(f"--{name}", metavar="DTYPE", help=f"the dtype of {what}")
    state.add_argument("--frozen", metavar="REGEX", help="tensors whose names match REGEX are not trained")
    state.add_argument(
        "--lora", metavar="RANK=REGEX", help="train only adapters of this rank, for the weights whose names match REGEX"
    )
    state.add_argument(
        "--lora-dtype", metavar="DTYPE", default="float32", help="the dtype of the adapters; float32 if left out"
    )
    state.add_argument(
        "--units", metavar="REGEX", help="tensors are flattened together if REGEX finds the same text in their names"
    )
    state.add_argument(
        "--set", metavar="NAME=VALUE", action="append", help="a setting of the framework: use_orig_params=true, ..."
    )
    state.add_argument(
        "--cache", metavar="SIZES", help="caches of keys and values: batch=8,context=8192, and dtype=..., block=..."
    )
    state.add_argument(
        "--memory", metavar="BYTES", help="the memory of a device, as in 80GiB; the status is 1 if a rank needs more"
    )
    state.add_argument("--all", action="store_true", help="a row for each tensor of the fullest rank")
    state.add_argument("--devices", action="store_true", help="also list the bytes of each device")
    state.add_argument("--html", metavar="FILE", type=Path, help="also write a page to look at in a browser")
    add_json(state)


def add_rules(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `rules`."""
    rules = commands.add_parser(
        "rules",
        help="list the rules files that come with the package, or make one from a model of transformers",
        description=(
            "List the rules files that come with the package, print one to edit (rules gpt2 > mine.toml), or make one "
            "from the tensor-parallel plan that transformers has for a model: rules --from-tp-plan HF > mine.toml. "
            "Transformers and PyTorch must be installed."
        ),
    )
    rules.add_argument("name", metavar="NAME", nargs="?", help="the name of a rules file in the list")
    rules.add_argument(
        "--from-tp-plan",
        metavar="HF",
        type=Path,
        help="print rules that cut as transformers does. HF is a Hugging Face folder, whose tensors the rules are for; "
        "or a config.json; or a plan, model.tp_plan, as JSON",
    )
    rules.add_argument(
        "--record",
        metavar=("ENGINE", "CONFIG"),
        nargs=2,
        help="print rules learned from small models of the family of a config.json, each loaded on 1, 2 and 4 ranks by "
        "the engine itself: transformers, vllm, sglang or megatron, which Megatron-Bridge loads",
    )
    rules.add_argument(
        "--axis",
        metavar="AXIS",
        default="tp",
        help="the mesh axis that cuts; tp if left out. With --record also pp,tp: the rules then place stages, too",
    )
    add_json(rules)


def add_completion(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add `completion`."""
    completion = commands.add_parser(
        "completion",
        help="print the script for shell completion",
        description=(
            "Print the script that lets a shell complete commands, options and file names. For bash: "
            'eval "$(shardwise completion bash)" in ~/.bashrc; for zsh the same in ~/.zshrc, after compinit; for fish: '
            "shardwise completion fish > ~/.config/fish/completions/shardwise.fish"
        ),
    )
    completion.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def _add_policy(command: "Parser") -> None:
    """Add `--policy`."""
    command.add_argument(
        "--policy",
        metavar="POLICY",
        choices=("explicit", "shardy", "least"),
        default="shardy",
        help="what happens where layouts disagree: explicit refuses, shardy does as Shardy's passes do (the default), "
        "least moves the fewest bytes",
    )
