"""The arguments of the command line."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .._core import __version__
from ..rules.shipped import rules_file

__all__ = ["make_parser", "parse_arguments"]

#: The shells for which `completion` writes a script.
SHELLS = ("bash", "zsh", "fish")

_UNEVEN = ("even", "ceil", "chunk", "balanced", "floor")

_MESH_HELP = "axes and sizes of the mesh, major first, as in data=2,model=4"
_LAYOUT_HELP = "for each dim the mesh axis that cuts it, - for none, data+model for several (major first), as in data,-"
_RULES_HELP = "the rules file, or the name of one that comes with the package (shardwise rules lists them)"
_UNEVEN_HELP = (
    "how a dim that does not divide is cut: even refuses (the default), ceil as XLA, chunk as PyTorch, "
    "balanced as numpy.array_split, floor as llama.cpp"
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, without the usage."""
        raise ValueError(f"{message} (see {self.prog} --help)")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments of the command line; ValueError if they are wrong, SystemExit for `--help`."""
    parser = make_parser()
    options = parser.parse_args(_joined(arguments))
    if [] in vars(options).values():  # What argparse makes of `--mesh=--` before Python 3.13.
        parser.error("-- is not a value")
    return options


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = _Parser(
        prog="shardwise",
        description="Which part of each tensor each device of a mesh holds.",
        epilog="Run shardwise COMMAND --help for more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_report(commands)
    _add_show(commands)
    _add_translate(commands)
    _add_einsum(commands)
    _add_reshard(commands)
    _add_extract(commands)
    _add_plan(commands)
    _add_run(commands)
    _add_commit(commands)
    _add_verify(commands)
    _add_diff(commands)
    _add_learn(commands)
    _add_inspect(commands)
    _add_fits(commands)
    _add_state(commands)
    _add_rules(commands)
    _add_completion(commands)
    return parser


def _add_report(commands: "argparse._SubParsersAction[_Parser]") -> None:
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
    report.add_argument("--mesh", metavar="AXES", help=f"{_MESH_HELP}; may be left out if the rules name a mesh")
    report.add_argument("--rules", metavar="TOML", type=_rules_file, required=True, help=_RULES_HELP)
    _add_config(report)
    report.add_argument("--uneven", metavar="RULE", choices=_UNEVEN, default="even", help=_UNEVEN_HELP)
    _add_drop(report, "leave out")
    report.add_argument("--all", action="store_true", help="a row for each tensor, even where layers are alike")
    report.add_argument("--devices", action="store_true", help="also list the bytes of each device")
    report.add_argument("--ranks", action="store_true", help="also list each rank with its bytes and its file")
    report.add_argument("--html", metavar="FILE", type=Path, help="also write a page to look at in a browser")
    _add_json(report)
    report.add_argument(
        "--strict",
        action="store_true",
        help="exit with status 1 on any warning, not only on tensors that cannot be placed",
    )


def _add_show(commands: "argparse._SubParsersAction[_Parser]") -> None:
    show = commands.add_parser(
        "show",
        help="draw one tensor's shards",
        description="Draw the shards of one tensor, and the devices that hold them.",
    )
    show.add_argument("shape", metavar="SHAPE", help='the shape, as in 8,6 or 8x6; "" for a scalar')
    show.add_argument("--mesh", metavar="AXES", required=True, help=_MESH_HELP)
    show.add_argument(
        "--layout",
        metavar="LAYOUT",
        required=True,
        help=_LAYOUT_HELP,
    )
    show.add_argument("--uneven", metavar="RULE", choices=_UNEVEN, default="even", help=_UNEVEN_HELP)
    show.add_argument("--dtype", metavar="DTYPE", help="also show bytes; float32, bfloat16, F8_E4M3, ...")
    _add_json(show)


def _add_translate(commands: "argparse._SubParsersAction[_Parser]") -> None:
    translate = commands.add_parser(
        "translate",
        help="write one layout in the dialects of JAX, PyTorch, TensorFlow, Keras, XLA, Shardy and Megatron",
        description="Write a layout in the dialects of other frameworks, or say why they cannot express it.",
    )
    translate.add_argument("--mesh", metavar="AXES", required=True, help=_MESH_HELP)
    translate.add_argument("--layout", metavar="LAYOUT", required=True, help=f"{_LAYOUT_HELP}; () for a scalar")
    translate.add_argument("--unreduced", metavar="AXES", help="mesh axes over which the values are partial sums")
    translate.add_argument(
        "--to", metavar="DIALECTS", help="jax,torch,tf,keras,hlo,shardy,megatron; the default is all"
    )
    _add_json(translate)


def _add_einsum(commands: "argparse._SubParsersAction[_Parser]") -> None:
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
        help="the layout of each operand, as in dp,-,- -,tp; ? for one that the policy is to give",
    )
    einsum.add_argument("--shapes", metavar="SHAPE", nargs="+", required=True, help="the shape of each operand")
    einsum.add_argument("--mesh", metavar="AXES", required=True, help=_MESH_HELP)
    einsum.add_argument("--dtype", metavar="DTYPE", default="float32", help="of all tensors; the default is float32")
    einsum.add_argument(
        "--policy",
        metavar="POLICY",
        choices=("explicit", "shardy", "least"),
        default="shardy",
        help="what decides where layouts disagree: nothing, Shardy's rules (the default), or the fewest bytes",
    )
    einsum.add_argument("--out", metavar="LAYOUT", help="the layout that the result is to have")
    einsum.add_argument("--unreduced", metavar="AXES", help="with --out: axes over which the result stays addends")
    _add_json(einsum)


def _add_reshard(commands: "argparse._SubParsersAction[_Parser]") -> None:
    reshard = commands.add_parser(
        "reshard",
        help="reshard a checkpoint: split it, merge it, change its layout or its format",
        description=(
            "Copy a checkpoint of any format to a new one that is cut as the rules say, within a memory limit; without "
            "rules its tensors are merged. The new one gets its name only when it is complete and on the disk."
        ),
    )
    _add_contents(reshard)
    reshard.add_argument("--resume", action="store_true", help="continue an interrupted run of the same command")
    _add_work(reshard)


def _add_extract(commands: "argparse._SubParsersAction[_Parser]") -> None:
    extract = commands.add_parser(
        "extract",
        help="write what one rank holds, as a file of its own",
        description=(
            "Write one safetensors file with all that one device of the mesh holds of a checkpoint, in the shapes that "
            "it holds: the file that reshard --to ranks makes for this rank, to the byte."
        ),
    )
    _add_contents(extract, is_rank=True)
    extract.add_argument("--resume", action="store_true", help="continue an interrupted run of the same command")
    _add_work(extract)


def _add_plan(commands: "argparse._SubParsersAction[_Parser]") -> None:
    plan = commands.add_parser(
        "plan",
        help="show what reshard would take, or save it as a plan whose parts any machines can run",
        description=(
            "Show the files, bytes, memory and time that reshard with the same arguments would take, and write "
            "nothing. With --save, write the plan to a file instead: shardwise run does a part of it on any machine, "
            "shardwise commit finishes it."
        ),
    )
    _add_contents(plan)
    plan.add_argument("--save", metavar="PLAN", type=Path, help="write the plan (.swplan) to this file")
    plan.add_argument("--workers", metavar="N", type=int, help="also show what each of N workers reads and writes")
    plan.add_argument("--memory", metavar="BYTES", default="256MiB", help="for buffers; 256MiB if left out")
    plan.add_argument("--jobs", metavar="N", type=int, help="threads; one per core if left out")
    _add_json(plan)


def _add_contents(command: _Parser, *, is_rank: bool = False) -> None:
    """Add what says what is written, and how."""
    command.add_argument("source", metavar="SRC", type=str, help="the checkpoint; it is only read")
    command.add_argument("target", metavar="DST", type=str, help="the new file or folder, which must not exist")
    command.add_argument("--mesh", metavar="AXES", help=f"{_MESH_HELP}; may be left out if the rules name a mesh")
    command.add_argument(
        "--rules", metavar="TOML", type=_rules_file, help=f"{_RULES_HELP}; without rules tensors are merged"
    )
    command.add_argument(
        "--source-rules",
        metavar="TOML",
        type=_rules_file,
        help="the rules file, or one of the package's, that SRC was rewritten by; its rewrites are undone first",
    )
    _add_config(command)
    command.add_argument("--uneven", metavar="RULE", choices=_UNEVEN, default="even", help=_UNEVEN_HELP)
    if is_rank:
        command.add_argument(
            "--rank", metavar="N", type=int, required=True, help="the rank, counted from 0 in the order of the mesh"
        )
        command.set_defaults(to="ranks")
    else:
        command.set_defaults(rank=None)
        command.add_argument(
            "--to",
            metavar="FORMAT",
            type=_form,
            choices=("safetensors", "hf", "sharded", "ranks", "vllm", "dcp"),
            help="safetensors, a file; hf, a folder in Hugging Face's format; sharded, a folder with each shard once; "
            "ranks, one with a file for each device, of all that it holds; vllm, the same for the sharded loaders of "
            "vLLM and SGLang; dcp, PyTorch's distributed checkpoint",
        )
    command.add_argument("--dtype", metavar="DTYPE", help="convert floating-point tensors; bfloat16, float32, ...")
    command.add_argument(
        "--overflow",
        choices=("refuse", "saturate", "round"),
        default="refuse",
        help="what becomes of values beyond the range of --dtype: refuse them (the default), take the largest, "
        "or round them to an infinity or NaN",
    )
    command.add_argument(
        "--rename",
        metavar="PATTERN=REPLACEMENT",
        action="append",
        help="replace what a regular expression finds in names, before all rewrites; may be given several times",
    )
    command.add_argument("--only", metavar="REGEX", help="only the tensors whose (new) names it matches")
    _add_drop(command, "leave out")
    command.add_argument(
        "--replicas",
        choices=("check", "first"),
        default="check",
        help="compare what is stored more than once (the default), or take the first",
    )
    _add_padded(command)
    command.add_argument(
        "--strict",
        action="store_true",
        help="write nothing and exit with status 1 on any warning: about the rules, and about what does not arrive",
    )
    command.add_argument("--task-bytes", metavar="BYTES", help="the most that a task writes; 64MiB if left out")
    command.add_argument("--no-sync", action="store_true", help="do not wait until the data is on the disk")


def _add_run(commands: "argparse._SubParsersAction[_Parser]") -> None:
    run = commands.add_parser(
        "run",
        help="run a part of a saved plan, on any machine",
        description=(
            "Run tasks of a plan that plan --save wrote, and leave receipts for them beside the new checkpoint. "
            "Parts may run anywhere, in any order, at once or twice; tasks that have a receipt are not run again."
        ),
    )
    run.add_argument("plan", metavar="PLAN", type=Path, help="the plan")
    run.add_argument("--part", metavar="I/N", help="which part of how many, counted from 1: 3/16; all if left out")
    run.add_argument("--no-sync", action="store_true", help="do not wait until the data is on the disk")
    _add_work(run)


def _add_commit(commands: "argparse._SubParsersAction[_Parser]") -> None:
    commit = commands.add_parser(
        "commit",
        help="finish the checkpoint of a saved plan after all its parts have run",
        description=(
            "Check that there is a valid receipt for every task of a plan, write the headers and the manifest, and "
            "give the checkpoint its name; in an object store, write the manifest. If a receipt is missing or wrong, "
            "nothing is changed."
        ),
    )
    commit.add_argument("plan", metavar="PLAN", type=Path, help="the plan")
    commit.add_argument("--check", action="store_true", help="read all of it back and compare it with the receipts")
    commit.add_argument("--no-sync", action="store_true", help="do not wait until the data is on the disk")
    commit.add_argument("--memory", metavar="BYTES", default="256MiB", help="for buffers; 256MiB if left out")
    commit.add_argument("--json", action="store_true", help="JSON, for programs")


def _add_verify(commands: "argparse._SubParsersAction[_Parser]") -> None:
    verify = commands.add_parser(
        "verify",
        help="check that a checkpoint is complete and holds what was written",
        description="Read all of a checkpoint and compare it with the digests that were written beside it, and with "
        "the CRC-32 of PyTorch's zip containers. Exit with status 3 if it is damaged: a line for each damaged tensor, "
        "with its file.",
    )
    verify.add_argument("source", metavar="CHECKPOINT", type=str, help="a checkpoint of any format")
    _add_strict(verify, "files beside it are not read")
    _add_work(verify)


def _add_diff(commands: "argparse._SubParsersAction[_Parser]") -> None:
    diff = commands.add_parser(
        "diff",
        help="compare two checkpoints, however each is cut",
        description="Compare two checkpoints of any formats without merging either; exit with status 1 if they differ.",
    )
    diff.add_argument("first", metavar="A", type=str, help="a checkpoint of any format")
    diff.add_argument("second", metavar="B", type=str, help="another")
    diff.add_argument(
        "--rules",
        metavar="TOML",
        type=_rules_file,
        help=f"compare B with what these rules make of A; {_RULES_HELP}",
    )
    diff.add_argument(
        "--source-rules",
        metavar="TOML",
        type=_rules_file,
        help="the rules file, or one of the package's, that A was rewritten by; its rewrites are undone first",
    )
    _add_drop(diff, "do not compare")
    _add_strict(diff, "something is not compared")
    _add_config(diff)
    _add_work(diff)


def _add_learn(commands: "argparse._SubParsersAction[_Parser]") -> None:
    learn = commands.add_parser(
        "learn",
        help="work out the rewrites that lead from one checkpoint to another of the same model",
        description=(
            "Match the tensors of two checkpoints of one model by their rows and columns, and print the rules file "
            "with the rewrites that lead from A to B: learn A B > rules.toml. Each is carried out and compared before "
            "it is printed. Tensors of B that no rewrite makes are named on the standard error, and the status is 1."
        ),
    )
    learn.add_argument("first", metavar="A", type=str, help="a checkpoint of any format")
    learn.add_argument("second", metavar="B", type=str, help="the same model as another engine names and stores it")
    learn.add_argument(
        "--config",
        metavar="JSON",
        type=Path,
        help="the model's config.json, for names in place of sizes; the one beside A if left out",
    )
    learn.add_argument("--memory", metavar="BYTES", default="256MiB", help="for buffers; 256MiB if left out")
    learn.add_argument("--jobs", metavar="N", type=int, help="threads; one per core if left out")
    _add_json(learn)


def _add_inspect(commands: "argparse._SubParsersAction[_Parser]") -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show a checkpoint's format, tensors, dtypes and pieces",
        description="Describe a checkpoint of any format. Only headers and indexes are read.",
    )
    inspect.add_argument("source", metavar="CHECKPOINT", type=str, help="a checkpoint of any format")
    _add_padded(inspect)
    _add_strict(inspect, "files beside it are not read")
    _add_json(inspect)


def _add_fits(commands: "argparse._SubParsersAction[_Parser]") -> None:
    fits = commands.add_parser(
        "fits",
        help="show for which sizes of tensor parallelism a model fits",
        description=(
            "Say for each size of tensor and expert parallelism whether a model fits, also a quantized one: fits, fits "
            "with shared tiles, fits with padding, or does not, because of which tensor and which blocks; and what "
            "engines refuse beside. Only headers are read; of known families config.json alone will do. Tensors whose "
            "names are not known make a size unknown, and the exit status 4: rules say how they are cut."
        ),
    )
    fits.add_argument("model", metavar="MODEL", type=str, help="a checkpoint of any format, or a model's config.json")
    fits.add_argument("--tp", metavar="SIZES", default="1,2,4,8,16", help="sizes of tensor parallelism: 1,2,4,8,16")
    fits.add_argument(
        "--ep", metavar="SIZES", default="1", help="sizes of expert parallelism: 1; features are cut over tp / ep"
    )
    fits.add_argument("--rules", metavar="TOML", type=_rules_file, help=f"{_RULES_HELP}; names say what is cut without")
    _add_config(fits)
    _add_json(fits)


def _add_state(commands: "argparse._SubParsersAction[_Parser]") -> None:
    state = commands.add_parser(
        "state",
        help="show what each rank needs for weights, gradients, optimizer and caches, and whether it fits",
        description=(
            "Say for each rank, to the byte, what it holds and what its framework allocates of weights, gradients, "
            "master copies, states of the optimizer, and caches of keys and values. Names of weights say how they are "
            "cut over --tp, --pp, --dp and --ep, as fits takes them; or rules do, over --mesh. With --memory the exit "
            "status is 1 if a rank does not fit, and what would is shown. Tensors whose names are not known make it 4."
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
    state.add_argument("--mesh", metavar="AXES", help=f"{_MESH_HELP}; may be left out if the rules name a mesh")
    state.add_argument(
        "--rules", metavar="TOML", type=_rules_file, help=f"{_RULES_HELP}; names say what is cut without"
    )
    _add_config(state)
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
        "none for what the rules cut",
    )
    state.add_argument(
        "--over", metavar="AXES", help="the axes over which it shards; those of data parallelism if left out"
    )
    state.add_argument(
        "--group", metavar="N", type=int, help="the ranks that share a state, if these are not all of them"
    )
    for name, what in (
        ("weights", "floating-point weights, instead of their own"),
        ("gradients", "gradients; that of the weights if left out"),
        ("masters", "master copies, or none; if left out as the framework does"),
    ):
        state.add_argument(f"--{name}", metavar="DTYPE", help=f"the dtype of {what}")
    state.add_argument("--frozen", metavar="REGEX", help="found in the names of what is not trained")
    state.add_argument(
        "--lora", metavar="RANK=REGEX", help="train adapters of the weights whose names it is found in only"
    )
    state.add_argument("--lora-dtype", metavar="DTYPE", default="float32", help="of the adapters; float32 if left out")
    state.add_argument(
        "--units", metavar="REGEX", help="what is flattened together, by the part of names that it matches"
    )
    state.add_argument(
        "--set", metavar="NAME=VALUE", action="append", help="a setting of the framework: use_orig_params=true, ..."
    )
    state.add_argument(
        "--cache", metavar="SIZES", help="caches of keys and values: batch=8,context=8192, and dtype=..., block=..."
    )
    state.add_argument("--memory", metavar="BYTES", help="of a device, as in 80GiB: the status is 1 if it does not fit")
    state.add_argument("--all", action="store_true", help="a row for each tensor of the fullest rank")
    state.add_argument("--devices", action="store_true", help="also list the bytes of each device")
    state.add_argument("--html", metavar="FILE", type=Path, help="also write a page to look at in a browser")
    _add_json(state)


def _add_rules(commands: "argparse._SubParsersAction[_Parser]") -> None:
    rules = commands.add_parser(
        "rules",
        help="list the rules files that come with the package, or make one from a model of transformers",
        description=(
            "List the rules files that come with the package, print one to edit (rules gpt2 > mine.toml), or make one "
            "from the tensor-parallel plan that transformers has for a model: rules --from-tp-plan HF > mine.toml. "
            "Transformers and PyTorch must be installed."
        ),
    )
    rules.add_argument("name", metavar="NAME", nargs="?", help="the name of one in the list")
    rules.add_argument(
        "--from-tp-plan",
        metavar="HF",
        type=Path,
        help="print rules that cut as transformers does: a Hugging Face folder, whose tensors' rules are kept; its "
        "config.json; or a plan, model.tp_plan, as JSON",
    )
    rules.add_argument("--axis", metavar="AXIS", default="tp", help="the mesh axis that cuts; tp if left out")
    _add_json(rules)


def _add_completion(commands: "argparse._SubParsersAction[_Parser]") -> None:
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


def _form(text: str) -> str:
    if text in ("orbax", "keras", "megatron", "torch_dist"):
        from ..store.write.request.planner import only_read

        raise argparse.ArgumentTypeError(only_read(text))
    return text


def _rules_file(text: str) -> Path:
    """Give the path of a rules file, or that of one of the package's own, whose name it is."""
    try:
        return Path(rules_file(text))
    except FileNotFoundError as error:
        raise argparse.ArgumentTypeError(str(error.strerror)) from None


def _add_config(command: _Parser) -> None:
    command.add_argument(
        "--config",
        metavar="JSON",
        type=Path,
        help="the model's config.json, for the numbers that rules name and how weights are quantized; the one beside "
        "the checkpoint if left out",
    )


def _add_drop(command: _Parser, what: str) -> None:
    command.add_argument(
        "--drop",
        metavar="REGEX",
        help=f"{what} the tensors and values whose names before all rules it matches; what rules drop is warned of, "
        "unless it is left out so",
    )


def _add_padded(command: _Parser) -> None:
    command.add_argument(
        "--padded",
        action="store_true",
        help="of files of ranks of FSDP, read the beginning of tensors that are as long on each rank as on the first",
    )


def _add_strict(command: _Parser, when: str) -> None:
    command.add_argument("--strict", action="store_true", help=f"exit with status 1 if {when}")


def _add_json(command: _Parser) -> None:
    command.add_argument("--json", action="store_true", help="JSON, for programs")


def _add_work(command: _Parser) -> None:
    command.add_argument("--memory", metavar="BYTES", default="256MiB", help="for buffers; 256MiB if left out")
    command.add_argument("--jobs", metavar="N", type=int, help="threads; one per core if left out")
    command.add_argument("--quiet", action="store_true", help="show no progress on the standard error")
    command.add_argument("--progress", action="store_true", help="show progress even where that is not a terminal")
    _add_json(command)


def _joined(arguments: Sequence[str]) -> list[str]:
    """Join `--layout` and `--out` with what follows: argparse takes such as `-,model` for an option.

    One that stands alone, as those of `einsum` do, begins with a space instead.
    """
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in ("--layout", "--out"):
            joined[-1] += f"={argument}"
        else:
            joined.append(f" {argument}" if joined[:1] == ["einsum"] and argument.startswith("-,") else argument)
    return joined
