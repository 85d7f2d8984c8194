"""Options that several commands take, and their help."""

import argparse
from pathlib import Path

from ..rules.shipped import rules_file
from .parser import Parser

__all__ = [
    "LAYOUT_HELP",
    "MESH_HELP",
    "RULES_HELP",
    "add_bare_ranks",
    "add_config",
    "add_drop",
    "add_for",
    "add_json",
    "add_means",
    "add_memory",
    "add_mesh",
    "add_no_sync",
    "add_padded",
    "add_parameter_names",
    "add_source_mesh",
    "add_source_rules",
    "add_strict",
    "add_uneven",
    "add_which",
    "add_work",
    "read_names",
    "rules_path",
]

MESH_HELP = "axes and sizes of the mesh, major first, as in data=2,model=4"
LAYOUT_HELP = "for each dim the mesh axis that cuts it, - for none, data+model for several (major first), as in data,-"
RULES_HELP = "the rules file, or the name of one that comes with the package (shardwise rules lists them)"


def rules_path(text: str) -> Path:
    """Return the path of a rules file, or that of one of the package's own, whose name it is."""
    try:
        return Path(rules_file(text))
    except FileNotFoundError as error:
        raise argparse.ArgumentTypeError(str(error.strerror)) from None


def add_config(command: Parser) -> None:
    """Add `--config`."""
    command.add_argument(
        "--config",
        metavar="JSON",
        type=Path,
        help="the model's config.json, which has the numbers that rules name, and says how weights are quantized; the "
        "one next to the checkpoint if left out",
    )


def add_drop(command: Parser, what: str) -> None:
    """Add `--drop`, which is to say what it does: "leave out", "do not compare"."""
    command.add_argument(
        "--drop",
        metavar="REGEX",
        help=f"{what} the tensors and values whose names in the source match REGEX; a warning names what else the "
        "rules drop",
    )


def add_which(command: Parser, what: str) -> None:
    """Add `--weights-only` and `--state-only`, which are to say what they do: "write", "compare"."""
    either = command.add_mutually_exclusive_group()
    for option, which, these in (
        ("--weights-only", "weights", "the weights"),
        ("--state-only", "state", "the training state: moments, master copies, steps, groups"),
    ):
        text = f"{what} only {these}"
        either.add_argument(option, dest="which", action="store_const", const=which, default="all", help=text)


def add_padded(command: Parser) -> None:
    """Add `--padded`."""
    command.add_argument(
        "--padded",
        action="store_true",
        help="FSDP's files of ranks may pad the parts of a tensor to one length on all ranks: read them without this "
        "padding",
    )


def add_parameter_names(command: Parser) -> None:
    """Add `--parameter-names`."""
    command.add_argument(
        "--parameter-names",
        metavar="FILE",
        type=Path,
        help="where the checkpoint has only numbers for the parameters of PyTorch's optimizer: a file with their "
        "names, one on each line, in the order of the numbers",
    )


def read_names(file: Path | None) -> list[str] | None:
    """Return the names in a file of names; `None` without one."""
    return None if file is None else [line for line in file.read_text(encoding="utf-8").splitlines() if line]


def add_strict(command: Parser, when: str) -> None:
    """Add `--strict`, which is to say when it changes the status."""
    command.add_argument("--strict", action="store_true", help=f"exit with status 1 if {when}")


def add_json(command: Parser) -> None:
    """Add `--json`."""
    command.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_work(command: Parser) -> None:
    """Add the options of work: its memory and threads, its progress, its output."""
    add_means(command)
    command.add_argument("--quiet", action="store_true", help="show no progress on the standard error")
    command.add_argument("--progress", action="store_true", help="show progress even where that is not a terminal")
    add_json(command)


def add_means(command: Parser) -> None:
    """Add the options `--memory` and `--jobs`, by which files are read and written."""
    add_memory(command)
    command.add_argument("--jobs", metavar="N", type=int, help="the number of threads; one per core if left out")


def add_memory(command: Parser) -> None:
    """Add `--memory`."""
    help_text = "the most memory for buffers; 256MiB if left out"
    command.add_argument("--memory", metavar="BYTES", default="256MiB", help=help_text)


def add_mesh(command: Parser) -> None:
    """Add `--mesh`, which rules may have."""
    command.add_argument("--mesh", metavar="AXES", help=f"{MESH_HELP}; may be left out if the rules name a mesh")


def add_for(command: Parser) -> None:
    """Add `--for`, in place of a mesh and of rules."""
    command.add_argument(
        "--for",
        metavar="PRESET",
        dest="preset",
        help="a trainer or an engine, in place of --mesh and --rules: vllm(tp=2, pp=2), sglang(tp=8, ep=8), "
        "megatron(tp=2, pp=2, ep=4), fsdp2(64), transformers(tp=2), maxtext(tp=4); the rules are the package's for "
        "the model's family, or those of --rules",
    )


def add_no_sync(command: Parser) -> None:
    """Add `--no-sync`."""
    command.add_argument("--no-sync", action="store_true", help="do not wait until the data is on the disk")


def add_source_mesh(command: Parser, source: str) -> None:
    """Add `--source-mesh`, for bare files of ranks."""
    command.add_argument(
        "--source-mesh",
        metavar="AXES",
        help=f"{source} is a folder of bare files, one for each rank of this mesh, cut as --source-rules says: Meta's "
        "consolidated.00.pth, an engine's sharded state",
    )


def add_source_rules(command: Parser, source: str) -> None:
    """Add `--source-rules`, the rules of one checkpoint."""
    command.add_argument(
        "--source-rules",
        metavar="TOML",
        type=rules_path,
        help=f"the rules file by which {source} was rewritten, or the name of one that comes with the package; its "
        "rewrites are undone first",
    )


def add_bare_ranks(command: Parser, source: str) -> None:
    """Add `--source-mesh` and `--source-rules`, for bare files of ranks that are read as they are."""
    add_source_mesh(command, source)
    command.add_argument(
        "--source-rules",
        metavar="TOML",
        type=rules_path,
        help="with --source-mesh, the rules file by which the files are cut, or the name of one that comes with the "
        "package",
    )


def add_uneven(command: Parser) -> None:
    """Add `--uneven`."""
    command.add_argument(
        "--uneven",
        metavar="RULE",
        choices=("even", "ceil", "chunk", "balanced", "floor"),
        default="even",
        help="how a dim that does not divide is cut: even refuses (the default), ceil as XLA, chunk as PyTorch, "
        "balanced as numpy.array_split, floor as llama.cpp",
    )
