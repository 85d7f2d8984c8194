"""The parser of the command: options in groups, examples, and what was meant by a word that it does not know."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

__all__ = ["EXAMPLES", "GROUPS", "PAGES", "Parser", "columns"]

#: The options of each group, by the names under which they are kept. Those in none are "other options".
GROUPS: dict[str, frozenset[str]] = {
    "how tensors are cut": frozenset(
        {"mesh", "rules", "preset", "source_mesh", "source_rules", "config", "uneven", "rank", "layout", "unreduced"}
        | {"tp", "pp", "dp", "ep", "etp", "layers"}
        | {"shapes", "policy", "out", "results"}
    ),
    "which tensors, under which names": frozenset({"only", "drop", "which", "rename", "parameter_names"}),
    "how the model is trained and served": frozenset(
        {"optimizer", "sharding", "over", "group", "weights", "gradients", "masters", "frozen", "lora", "lora_dtype"}
        | {"units", "set", "cache"}
    ),
    "formats and values": frozenset({"to", "dtype", "overflow", "replicas", "padded"}),
    "running": frozenset(
        {"memory", "jobs", "task_bytes", "no_sync", "resume", "save", "workers", "part", "check", "port", "no_browser"}
    ),
    "output": frozenset({"json", "quiet", "progress", "strict", "html", "all", "devices", "ranks"}),
}
#: The commands for words by which other programs call them.
CALLED: dict[str, str] = {
    **dict.fromkeys(("merge", "split", "convert", "consolidate", "shard", "copy", "unshard"), "reshard"),
    **dict.fromkeys(("info", "list", "ls", "open", "cat"), "inspect"),
    **dict.fromkeys(("compare", "cmp"), "diff"),
    **dict.fromkeys(("check", "checksum", "digest"), "verify"),
    **dict.fromkeys(("memory", "size", "estimate"), "state"),
    **dict.fromkeys(("draw", "print"), "show"),
}
#: A command with fewer options shows them in one list.
_FEWEST = 8

#: Two commands for each that takes arguments.
EXAMPLES: dict[str, tuple[str, str]] = {
    "report": ("report HF --rules hf/llama --mesh tp=4", "report HF --for 'vllm(tp=2, pp=2)' --html report.html"),
    "show": ("show 8,6 --mesh data=2,model=4 --layout data,-", "show 7 --mesh x=2 --layout x --uneven ceil"),
    "translate": (
        "translate --mesh data=2,model=4 --layout data,model",
        "translate --mesh x=2 --layout x,- --to jax,torch",
    ),
    "einsum": (
        "einsum 'bd,df->bf' dp,- -,tp --shapes 32,64 64,128 --mesh dp=2,tp=4",
        "einsum 'bf,fd->bd' dp,tp tp,- --shapes 32,64 64,16 --mesh dp=2,tp=4 --json",
    ),
    "propagate": (
        "propagate step.json dp,- -,tp --mesh dp=2,tp=4",
        "propagate step.json dp,- '?' --mesh dp=8 --policy least --html step.html",
    ),
    "explore": ("explore", "explore --no-browser --port 8000"),
    "reshard": ("reshard HF cut --rules hf/llama --mesh tp=4", "reshard cut merged.safetensors"),
    "extract": (
        "extract HF rank1.safetensors --rules vllm/llama --mesh tp=4 --rank 1",
        "extract HF rank0.safetensors --rules hf/llama --mesh tp=2 --rank 0",
    ),
    "plan": ("plan HF cut --rules hf/llama --mesh tp=4", "plan HF cut --rules hf/llama --mesh tp=4 --save cut.swplan"),
    "run": ("run cut.swplan --part 3/16", "run cut.swplan --memory 1GiB"),
    "commit": ("commit cut.swplan", "commit cut.swplan --check"),
    "verify": ("verify cut", "verify cut --json"),
    "diff": ("diff HF cut", "diff HF vllm --rules vllm/llama"),
    "learn": ("learn HF theirs", "learn HF theirs --config HF/config.json"),
    "inspect": ("inspect HF", "inspect checkpoint.pt --json"),
    "fits": ("fits HF --tp 2,4,8", "fits config.json"),
    "state": (
        "state config.json --tp 8 --optimizer adamw --sharding zero1 --dp 64",
        "state config.json --tp 8 --memory 80GiB",
    ),
    "rules": ("rules", "rules vllm/llama"),
    "completion": ("completion bash", "completion zsh"),
}
DOCS = "https://github.com/shardwise/shardwise/blob/main/docs/"
#: The page about each command, below `DOCS`.
PAGES: dict[str, str] = {
    "report": "guides/report.md",
    "show": "pictures.md",
    "translate": "dialects.md",
    "einsum": "einsum.md",
    "propagate": "einsum.md#whole-computations",
    "explore": "pictures.md#on-a-page-that-answers",
    "reshard": "guides/reshard.md",
    "extract": "guides/load-a-rank.md",
    "plan": "clusters.md",
    "run": "clusters.md",
    "commit": "clusters.md",
    "verify": "writing-checkpoints.md#damage",
    "diff": "guides/conversions.md",
    "learn": "guides/conversions.md",
    "inspect": "checkpoints.md",
    "fits": "quantized.md#which-sizes-fit",
    "state": "guides/will-it-fit.md",
    "rules": "families.md",
    "completion": "install.md",
}


class _Help(argparse.HelpFormatter):
    """Help as wide as the terminal. Each argument that is added makes one of these."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=columns() - 2)


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError, and shows its options in groups."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})
        #: All commands of the program: an error names those that have an option.
        self.commands: Mapping[str, Parser] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does; a command refuses what it does not know, and says so of itself."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with the problem in one line, without the usage."""
        raise ValueError(f"{message}{self._meant(message)} (see {self.prog} --help)")

    def format_help(self) -> str:
        """Return the help: options in groups, then examples and the page."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, actions in self._sections():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        text = formatter.format_help()
        command = self.prog.rpartition(" ")[2]
        if command not in EXAMPLES:
            return text
        examples = "".join(f"  shardwise {line}\n" for line in EXAMPLES[command])
        return f"{text}\nexamples:\n{examples}\nsee also: {DOCS}{PAGES[command]}\n"

    def _sections(self) -> Iterator[tuple[str, list[argparse.Action]]]:
        """Yield the arguments in groups: positional ones, then options by purpose."""
        options = [action for action in self._actions if action.option_strings]
        if positional := [action for action in self._actions if not action.option_strings]:
            yield "arguments" if self._subparsers is None else "commands", positional
        if len(options) < _FEWEST:
            yield "options", options
            return
        for title, names in GROUPS.items():
            if found := [action for action in options if action.dest in names]:
                yield title, found
        known = frozenset().union(*GROUPS.values())
        yield "other options", [action for action in options if action.dest not in known]

    def _meant(self, message: str) -> str:
        """Return the suggestion for an unknown command, option or choice, if a known one is similar; else nothing."""
        wrong = re.match(r"(?:argument \S+: invalid choice: '|unrecognized arguments: )([^\s']+)", message)
        if wrong is None:
            return ""
        if others := [name for name, one in self.commands.items() if wrong[1] in one._option_string_actions]:
            said = f"; {wrong[1]} is an option of shardwise {', '.join(others)}"
            size = wrong[1].lstrip("-")
            if size in ("tp", "pp"):
                return f"{said}; elsewhere a size is part of --mesh {size}=2, or of --for 'vllm({size}=2)'"
            return said
        known = [*self._option_string_actions, *(() if self._subparsers is None else self.commands)]
        if chosen := self._option_string_actions.get(message.removeprefix("argument ").partition(":")[0]):
            known = [*map(str, chosen.choices or ())]
        if wrong[1] in CALLED and CALLED[wrong[1]] in known:
            return f"; did you mean {CALLED[wrong[1]]}?"
        from difflib import get_close_matches  # Slow to import.

        near = get_close_matches(wrong[1], known, 1, 0.7)
        return f"; did you mean {near[0]}?" if near else ""


def columns() -> int:
    """Return the columns of the terminal, as `shutil.get_terminal_size` does, whose module imports all compressions."""
    found = 0
    with suppress(KeyError, ValueError):
        found = int(os.environ["COLUMNS"])
    if found <= 0:
        with suppress(AttributeError, ValueError, OSError):  # There is no standard output, or it is no terminal.
            found = os.get_terminal_size(sys.__stdout__.fileno()).columns  # type: ignore[union-attr]
    return found if found > 0 else 80
