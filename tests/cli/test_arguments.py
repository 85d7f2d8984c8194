"""Every argument says what it is for, and what cannot be its value is refused in one line."""

import argparse
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cli.arguments import make_parser, parse_arguments
from shardwise.cli.parser import DOCS as ADDRESS
from shardwise.cli.parser import EXAMPLES, GROUPS, PAGES, Parser, columns

DOCS = Path(__file__).parents[2] / "docs"


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str | None, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for name, command in action.choices.items():
                yield name, helps.get(name), command


def test_every_command_and_every_argument_says_what_it_is_for() -> None:
    parser = make_parser()
    assert "usage: shardwise [-h] [--version] COMMAND ..." in parser.format_help()
    assert parser.epilog == "Run shardwise COMMAND --help for more about a command."
    found = list(commands(parser))
    assert len(found) == 19
    for name, summary, command in found:
        assert summary, name
        assert command.description, name
        for action in command._actions:
            assert action.help, (name, action.dest)
            takes_a_value = action.nargs != 0 and not action.choices
            assert bool(action.metavar) or not takes_a_value, (name, action.dest)


RESHARD = ["reshard", "a", "b"]
PLAN = ["plan", *RESHARD[1:]]
TRANSLATE = ["translate", "--mesh", "x=2", "--layout", "x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (TRANSLATE[:3], "--layout"),
        (["einsum", "i->i", "x", "--mesh", "x=2"], "--shapes"),
        ([TRANSLATE[0], *TRANSLATE[3:]], "--mesh"),
        (["report", "a.safetensors", "--mesh", "x=2"], "--rules"),
        (["report", "a", "--rules", "gpt2", "--uneven", "odd"], "invalid choice: 'odd'"),
        ([*RESHARD, "--uneven", "odd"], "invalid choice: 'odd'"),
        ([*RESHARD, "--replicas", "last"], "invalid choice: 'last'"),
        ([*RESHARD, "--to", "numpy"], "invalid choice: 'numpy'"),
        ([*RESHARD, "--jobs", "two"], "--jobs: invalid int value: 'two'"),
        ([*PLAN, "--workers", "1.5"], "--workers: invalid int value: '1.5'"),
        ([*RESHARD, "--mesh", "x=2"], "--rules must say how the tensors are cut"),
        ([*RESHARD, "--rename", "no equals sign"], "--rename 'no equals sign': write PATTERN=REPLACEMENT"),
        (["run", "p", "--part", "1"], "--part '1': write PART/PARTS"),
        (["run", "p", "--part", "1/2/3"], "--part '1/2/3': write PART/PARTS"),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
    ],
)
def test_values_that_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_every_command_has_examples_that_it_takes_and_a_page() -> None:
    names = {name for name, _, _ in commands(make_parser())}
    assert EXAMPLES.keys() == PAGES.keys() == names
    for name, examples in EXAMPLES.items():
        assert len(examples) == 2
        for example in examples:
            assert parse_arguments(shlex.split(example)).command == name
        page, _, anchor = PAGES[name].partition("#")
        headings = re.findall(r"^#+ (.+)", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in ("", *(heading.lower().replace(" ", "-") for heading in headings))


def test_help_shows_options_in_groups_with_examples_and_the_page() -> None:
    (reshard,) = (command for name, _, command in commands(make_parser()) if name == "reshard")
    said = reshard.format_help()
    groups = [f"{title}:" for title, names in GROUPS.items() if names & {action.dest for action in reshard._actions}]
    assert len(groups) > 3
    titles = ["arguments:", *groups, "other options:", "examples:", f"see also: {ADDRESS}guides/reshard.md"]
    places = [said.index(f"\n{title}") for title in titles]
    assert places == sorted(places)
    assert all(f"\n  {option}" in said for option in ("--mesh", "--to", "--memory", "--json", "--strict"))
    # Each option is in one group.
    assert said.count("\n  --mesh") == said.count("\n  --resume") == 1


def test_each_option_of_a_group_is_one_of_some_command() -> None:
    found = {action.dest for _, _, command in commands(make_parser()) for action in command._actions}
    assert set().union(*GROUPS.values()) - found == set()


def test_only_the_help_is_an_other_option() -> None:
    for name, _, command in commands(make_parser()):
        titles = [title for title, _ in command._sections()]  # type: ignore[attr-defined]
        if "other options" in titles:
            found = dict(command._sections())["other options"]  # type: ignore[attr-defined]
            assert [action.dest for action in found] == ["help"], name


def test_the_help_names_each_choice_of_an_option() -> None:
    for name, _, command in commands(make_parser()):
        for action in command._actions:
            shown = f"{action.help} {'' if action.metavar else action.choices}"
            missing = [choice for choice in action.choices or () if not re.search(rf"\b{choice}\b", shown)]
            assert missing == [], (name, action.dest)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["reshrad", "a", "b"], "reshard"),
        (["reshard", "a", "b", "--ruels", "x"], "--rules"),
        (["reshard", "a", "b", "--to", "sharde"], "sharded"),
        (["show", "8", "--mesh", "x=2", "--layout", "x", "--uneven", "ceill"], "ceil"),
        (["difff"], "diff"),
    ],
)
def test_a_mistyped_word_leads_to_the_right_one(words: list[str], meant: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"did you mean {meant}?")):
        parse_arguments(words)


def test_only_an_option_that_the_command_has_is_meant() -> None:
    """`einsum` has --shapes; `translate` does not."""
    with pytest.raises(ValueError, match=re.escape("--shape 10 (see shardwise translate --help)")) as raised:
        parse_arguments(["translate", "--mesh", "x=2", "--layout", "x", "--shape", "10"])
    assert "did you mean" not in str(raised.value)


def test_an_option_of_other_commands_names_them() -> None:
    """It is written as it should be, so nothing like it is meant."""
    with pytest.raises(ValueError, match="; --resume is an option of shardwise reshard, extract ") as raised:
        parse_arguments(["report", "x", "--resume"])
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize("given", [None, "", "0", "-3", "forty", "40", "1000"])
def test_help_is_as_wide_as_the_terminal(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if given is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", given)
    assert columns() == shutil.get_terminal_size().columns
    theirs = argparse.ArgumentParser(prog="shardwise", description="word " * 100)
    ours = Parser(prog="shardwise", description="word " * 100)
    assert ours.format_help().splitlines()[2:8] == theirs.format_help().splitlines()[2:8]
