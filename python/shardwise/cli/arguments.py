"""The arguments of the command line."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["parse_arguments"]

_UNEVEN = ("even", "ceil", "chunk", "balanced", "floor")

_MESH_HELP = "axes and sizes of the mesh, major first, as in data=2,model=4"
_LAYOUT_HELP = "for each dim the mesh axis that cuts it, - for none, data+model for several, major first: data,-"
_UNEVEN_HELP = (
    "how a dim that does not divide is cut: even refuses (the default), ceil as XLA, chunk as PyTorch, "
    "balanced as numpy.array_split, floor as llama.cpp"
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, without the usage."""
        raise ValueError(f"{message} ({self.prog} --help says more)")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments of the command line; ValueError if they are wrong, SystemExit for `--help`."""
    parser = _Parser(
        prog="shardwise",
        description="Which part of each tensor each device of a mesh holds.",
        epilog="shardwise COMMAND --help says more about a command.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_show(commands)
    _add_translate(commands)
    options = parser.parse_args(_joined(arguments))
    if [] in vars(options).values():  # What argparse makes of `--mesh=--` before Python 3.13.
        parser.error("-- is not a value")
    return options


def _add_plan(commands: "argparse._SubParsersAction[_Parser]") -> None:
    plan = commands.add_parser(
        "plan",
        help="what each device would hold of a checkpoint",
        description=(
            "Read the header of a safetensors checkpoint, apply the rules of a layout map, and say what each device "
            "of the mesh would hold, and what looks wrong. No tensor is loaded."
        ),
    )
    plan.add_argument(
        "file", metavar="FILE", type=Path, help="a .safetensors file, a Hugging Face folder, or its index file"
    )
    plan.add_argument("--mesh", metavar="AXES", help=f"{_MESH_HELP}; may be left out if the rules name a mesh")
    plan.add_argument("--rules", metavar="TOML", type=Path, required=True, help="the file of rules")
    plan.add_argument("--uneven", metavar="RULE", choices=_UNEVEN, default="even", help=_UNEVEN_HELP)
    plan.add_argument("--all", action="store_true", help="a row for each tensor, also where layers are alike")
    plan.add_argument("--devices", action="store_true", help="the bytes of each device as well")
    plan.add_argument("--json", action="store_true", help="JSON, for programs")
    plan.add_argument("--strict", action="store_true", help="exit with status 1 if there are warnings")


def _add_show(commands: "argparse._SubParsersAction[_Parser]") -> None:
    show = commands.add_parser(
        "show",
        help="a picture of one tensor's shards",
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
    show.add_argument("--dtype", metavar="DTYPE", help="say bytes as well; float32, bfloat16, F8_E4M3, ...")


def _add_translate(commands: "argparse._SubParsersAction[_Parser]") -> None:
    translate = commands.add_parser(
        "translate",
        help="one layout in the dialects of JAX, PyTorch, TensorFlow, Keras, XLA, Shardy and Megatron",
        description="Write a layout in the dialects of other frameworks, or say why they cannot express it.",
    )
    translate.add_argument("--mesh", metavar="AXES", required=True, help=_MESH_HELP)
    translate.add_argument("--layout", metavar="LAYOUT", required=True, help=f"{_LAYOUT_HELP}; () for a scalar")
    translate.add_argument("--unreduced", metavar="AXES", help="mesh axes over which the values are partial sums")
    translate.add_argument(
        "--to", metavar="DIALECTS", help="jax,torch,tf,keras,hlo,shardy,megatron; the default is all"
    )


def _joined(arguments: Sequence[str]) -> list[str]:
    """Join `--layout` with what follows: argparse takes a layout such as `-,model` for an option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == "--layout":
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined
