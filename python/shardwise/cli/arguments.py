"""The arguments of the command line."""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from .._core import __version__
from .layout_arguments import (
    add_completion,
    add_einsum,
    add_explore,
    add_fits,
    add_propagate,
    add_report,
    add_rules,
    add_show,
    add_state,
    add_translate,
)
from .options import (
    RULES_HELP,
    add_bare_ranks,
    add_config,
    add_drop,
    add_for,
    add_json,
    add_means,
    add_memory,
    add_mesh,
    add_no_sync,
    add_padded,
    add_parameter_names,
    add_source_mesh,
    add_source_rules,
    add_strict,
    add_uneven,
    add_which,
    add_work,
    rules_path,
)
from .parser import Parser

__all__ = ["make_parser", "parse_arguments"]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments of the command line; ValueError if they are wrong, SystemExit for `--help`."""
    if arguments and arguments[0] in _COMMANDS:
        # The parser of one command is made in a tenth of the time of all; errors need all, to say what is meant.
        with contextlib.suppress(ValueError):
            return _parsed(make_parser(arguments[0]), arguments)
    return _parsed(make_parser(), arguments)


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    options = parser.parse_args(_joined(arguments))
    if [] in vars(options).values():  # What argparse makes of `--mesh=--` before Python 3.13.
        parser.error("-- is not a value")
    return options


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands, or of one only."""
    parser = Parser(
        prog="shardwise",
        description="Which part of each tensor each device of a mesh holds.",
        epilog="Run shardwise COMMAND --help for more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, add in _COMMANDS.items():
        if command in (None, name):
            add(commands)
    for one in (parser, *commands.choices.values()):
        one.commands = commands.choices
    return parser


def _add_reshard(commands: "argparse._SubParsersAction[Parser]") -> None:
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
    add_work(reshard)


def _add_extract(commands: "argparse._SubParsersAction[Parser]") -> None:
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
    add_work(extract)


def _add_plan(commands: "argparse._SubParsersAction[Parser]") -> None:
    plan = commands.add_parser(
        "plan",
        help="show the files, memory and time that reshard would take, or save a plan whose parts any machine can run",
        description=(
            "Show the files, bytes, memory and time that reshard with the same arguments would take, and write "
            "nothing. With --save, write the plan to a file instead: shardwise run does a part of it on any machine, "
            "shardwise commit finishes it."
        ),
    )
    _add_contents(plan)
    plan.add_argument("--save", metavar="PLAN", type=Path, help="write the plan (.swplan) to this file")
    plan.add_argument("--workers", metavar="N", type=int, help="also show what each of N workers reads and writes")
    add_means(plan)
    add_json(plan)


def _add_contents(command: Parser, *, is_rank: bool = False) -> None:
    """Add the options that choose the contents of a new checkpoint."""
    command.add_argument("source", metavar="SRC", type=str, help="the checkpoint; it is only read")
    kind = "file" if is_rank else "file or folder"
    command.add_argument("target", metavar="DST", type=str, help=f"the new {kind}, which must not exist")
    add_mesh(command)
    command.add_argument(
        "--rules", metavar="TOML", type=rules_path, help=f"{RULES_HELP}; without rules tensors are merged"
    )
    add_for(command)
    add_source_rules(command, "SRC")
    add_source_mesh(command, "SRC")
    add_config(command)
    add_uneven(command)
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
            choices=("safetensors", "hf", "sharded", "ranks", "vllm", "dcp", "megatron", "torch", "fsdp2", "universal"),
            help="safetensors, a file; hf, a folder in Hugging Face's format; sharded, a folder with each shard "
            "once; ranks, a folder with a file for each device, which has all that the device holds; vllm, the same "
            "for the sharded loaders of vLLM and SGLang; dcp, PyTorch's distributed checkpoint; megatron, the "
            "same in the form that Megatron-Core loads; torch, a file of torch.save, with optimizers in the "
            "form that load_state_dict takes; fsdp2, a folder with a model_world_size_W_rank_R.pt and an optim_… "
            "of DTensors for each device; universal, DeepSpeed's universal checkpoint, a folder for each "
            "parameter",
        )
    command.add_argument("--dtype", metavar="DTYPE", help="convert floating-point tensors; bfloat16, float32, ...")
    command.add_argument(
        "--overflow",
        choices=("refuse", "saturate", "round"),
        default="refuse",
        help="what to do with values beyond the range of --dtype: refuse them (the default), take the largest, "
        "or round them to an infinity or NaN",
    )
    command.add_argument(
        "--rename",
        metavar="PATTERN=REPLACEMENT",
        action="append",
        help="replace what a regular expression finds in names, before all rewrites; may be given several times",
    )
    command.add_argument("--only", metavar="REGEX", help="only the tensors whose new names match REGEX")
    add_drop(command, "leave out")
    add_which(command, "write")
    command.add_argument(
        "--replicas",
        choices=("check", "first"),
        default="check",
        help="compare tensors that are stored more than once (the default), or take the first",
    )
    add_padded(command)
    add_parameter_names(command)
    command.add_argument(
        "--strict",
        action="store_true",
        help="write nothing and exit with status 1 on any warning: about the rules, or about what is not written",
    )
    command.add_argument("--task-bytes", metavar="BYTES", help="the most that a task writes; 64MiB if left out")
    add_no_sync(command)


def _add_run(commands: "argparse._SubParsersAction[Parser]") -> None:
    run = commands.add_parser(
        "run",
        help="run a part of a saved plan, on any machine",
        description=(
            "Run tasks of a plan that plan --save wrote, and leave receipts for them next to the new checkpoint. "
            "Parts may run anywhere, in any order, at once or twice; tasks that have a receipt are not run again."
        ),
    )
    run.add_argument("plan", metavar="PLAN", type=Path, help="the plan")
    run.add_argument("--part", metavar="I/N", help="part I of N, counted from 1, such as 3/16; all parts if left out")
    add_no_sync(run)
    add_work(run)


def _add_commit(commands: "argparse._SubParsersAction[Parser]") -> None:
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
    commit.add_argument(
        "--check", action="store_true", help="read the whole checkpoint back and compare it with the receipts"
    )
    add_no_sync(commit)
    add_memory(commit)
    add_json(commit)


def _add_verify(commands: "argparse._SubParsersAction[Parser]") -> None:
    verify = commands.add_parser(
        "verify",
        help="check that a checkpoint is complete and holds what was written",
        description="Read all of a checkpoint and compare it with the digests that were written next to it, and with "
        "the CRC-32 of PyTorch's zip containers. If the checkpoint is damaged, print a line for each damaged tensor, "
        "with its file, and exit with status 3.",
    )
    verify.add_argument("source", metavar="CHECKPOINT", type=str, help="a checkpoint of any format")
    add_bare_ranks(verify, "CHECKPOINT")
    add_which(verify, "verify")
    add_config(verify)
    add_strict(verify, "files next to the checkpoint are not read, or states have no weights")
    add_work(verify)


def _add_diff(commands: "argparse._SubParsersAction[Parser]") -> None:
    diff = commands.add_parser(
        "diff",
        help="compare two checkpoints, however each is cut",
        description="Compare two checkpoints of any formats without merging either; exit with status 1 if they differ.",
    )
    diff.add_argument("first", metavar="A", type=str, help="a checkpoint of any format")
    diff.add_argument("second", metavar="B", type=str, help="another checkpoint")
    diff.add_argument(
        "--rules",
        metavar="TOML",
        type=rules_path,
        help=f"rewrite A by these rules, and compare that with B; {RULES_HELP}",
    )
    add_source_rules(diff, "A")
    add_source_mesh(diff, "A")
    add_drop(diff, "do not compare")
    add_which(diff, "compare")
    add_strict(diff, "something is not compared")
    add_config(diff)
    add_work(diff)


def _add_learn(commands: "argparse._SubParsersAction[Parser]") -> None:
    learn = commands.add_parser(
        "learn",
        help="work out the rewrites that lead from one checkpoint to another of the same model",
        description=(
            "Match the tensors of two checkpoints of one model by their rows and columns, and print the rules file "
            "with the rewrites that lead from A to B: learn A B > rules.toml. Each rewrite is carried out and compared "
            "before it is printed. Tensors of B that no rewrite makes are named on the standard error; the status is 1."
        ),
    )
    learn.add_argument("first", metavar="A", type=str, help="a checkpoint of any format")
    learn.add_argument("second", metavar="B", type=str, help="the same model as another engine names and stores it")
    learn.add_argument(
        "--config",
        metavar="JSON",
        type=Path,
        help="the model's config.json: the rules then have its keys in place of sizes; the one next to A if left out",
    )
    add_means(learn)
    add_json(learn)


def _add_inspect(commands: "argparse._SubParsersAction[Parser]") -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show a checkpoint's format, tensors, dtypes and pieces",
        description="Describe a checkpoint of any format. Only headers and indexes are read.",
    )
    inspect.add_argument("source", metavar="CHECKPOINT", type=str, help="a checkpoint of any format")
    add_bare_ranks(inspect, "CHECKPOINT")
    add_config(inspect)
    add_padded(inspect)
    add_parameter_names(inspect)
    add_strict(inspect, "files next to the checkpoint are not read, or parameters of an optimizer keep their numbers")
    add_json(inspect)


def _form(text: str) -> str:
    if text in ("orbax", "keras"):
        from ..store.write.request.planner import only_read

        raise argparse.ArgumentTypeError(only_read(text))
    return "megatron" if text == "torch_dist" else text  # As Megatron's own options call it.


def _joined(arguments: Sequence[str]) -> list[str]:
    """Join `--layout` and `--out` with what follows: argparse takes such as `-,model` for an option.

    One that stands alone, as those of `einsum` and `propagate` do, begins with a space instead.
    """
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in ("--layout", "--out"):
            joined[-1] += f"={argument}"
        else:
            joined.append(
                f" {argument}" if joined[:1] in (["einsum"], ["propagate"]) and argument.startswith("-,") else argument
            )
    return joined


#: The functions that add each command, in the order of `--help`.
_COMMANDS: dict[str, Callable[["argparse._SubParsersAction[Parser]"], None]] = {
    "report": add_report,
    "show": add_show,
    "translate": add_translate,
    "einsum": add_einsum,
    "propagate": add_propagate,
    "explore": add_explore,
    "reshard": _add_reshard,
    "extract": _add_extract,
    "plan": _add_plan,
    "run": _add_run,
    "commit": _add_commit,
    "verify": _add_verify,
    "diff": _add_diff,
    "learn": _add_learn,
    "inspect": _add_inspect,
    "fits": add_fits,
    "state": add_state,
    "rules": add_rules,
    "completion": add_completion,
}
