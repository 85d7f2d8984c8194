"""`shardwise rules`: the rules files that come with the package, and those made from a plan of transformers."""

import argparse
import importlib.metadata
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._text import shown
from ..errors import LayoutError
from ..rules.layout_map import LayoutMap
from ..rules.layout_rule import LayoutRule
from ..rules.numbers import read_config
from ..rules.shipped import example_rules, no_rules
from ..rules.toml import read_compared
from ..show.lines import printable
from ..show.names import lines_alike
from ..show.table import table_lines
from .terminal import Screen, say

__all__ = ["run_rules"]


def run_rules(screen: Screen, options: argparse.Namespace) -> int:
    """List the rules files, print one or make one, and give the exit status."""
    if options.record is not None:
        if options.name is not None or options.from_tp_plan is not None:
            raise ValueError(f"--record and {options.name or '--from-tp-plan'} exclude each other")
        return _recorded(options.record, options.axis, options.json)
    if options.from_tp_plan is not None:
        if options.name is not None:
            raise ValueError(f"{options.name} and --from-tp-plan exclude each other")
        text = _planned(options.from_tp_plan, options.axis)
        print(json.dumps({"text": text}) if options.json else text, end="\n" if options.json else "")
        return 0
    known = example_rules()
    if options.name is not None:
        if options.name not in known:
            raise ValueError(no_rules(options.name))
        path = known[options.name]
        text = path.read_text(encoding="utf-8")
        if options.json:
            print(json.dumps({"name": options.name, "path": str(path), "text": text}, indent=2))
        else:
            print(text, end="")
        return 0
    about = {name: _about(path) for name, path in known.items()}
    compared = {name: read_compared(path) for name, path in known.items()}
    if options.json:
        rows = (
            {"name": name, "path": str(known[name]), "about": about[name], "compared": compared[name]} for name in known
        )
        print(json.dumps(list(rows), indent=2))
        return 0
    cells = [[(name, "bold"), (about[name], ""), (", ".join(compared[name]), "")] for name in known]
    for line in table_lines(("name", "of", "compared with"), cells, screen.size and screen.size.columns):
        screen.write(*line)
    return 0


def _about(path: Path) -> str:
    """Return what a file says about itself, up to how it is cut: the model, and who stores it so."""
    with path.open(encoding="utf-8") as file:
        lines = [line.removeprefix("#").strip() for line in itertools.islice(file, 3)]
    return " ".join(lines).partition(", tensor-parallel")[0]


#: The engines that are recorded, each with the package that loads.
_RECORDED = {"transformers": "transformers", "vllm": "vllm", "sglang": "sglang", "megatron": "megatron-bridge"}
#: The most names that a comment lists.
_LISTED = 4
_MOST_SHOWN = 20


def _planned(source: Path, axis: str) -> str:
    """Return the rules file for a tensor-parallel plan of transformers: of a folder, a config.json or a plan."""
    said = read_config(source)
    if "model_type" not in said:
        from ..rules.tp_plan import rules_of_plan

        return _written(rules_of_plan(said, axis), axis, str(source), ["What is not named is on every rank."])
    try:
        from ..interop import transformers
    except ImportError as error:
        raise ValueError(
            f"the plan of a model is in transformers, which cannot be imported with PyTorch ({error}): install both, "
            "or save `model.tp_plan` as JSON where both are installed, and give that file"
        ) from None
    held = _tensors_of(source, said) if source.is_dir() and any(source.glob("*.safetensors*")) else None
    rules, unread, unused = transformers.tp_rules_of(said, axis, held)
    notes = ["What is not named is on every rank."]
    if unread:
        notes.append(f"Transformers does not load {_some(unread)}.")
    if unused:
        notes.append(f"The plan names {_some(unused)}, which this model does not have.")
    return _written(rules, axis, f"the plan for {said['model_type']} of transformers {transformers.version}", notes)


def _recorded(given: Sequence[str], axis: str, as_json: bool) -> int:
    """Print the rules that are learned from small models of a family, and give the status: 1 if some have none."""
    engine, source = given
    if engine not in _RECORDED:
        raise ValueError(
            f"--record {engine}: the adapters are for {', '.join(_RECORDED)}; shardwise.record takes any loader"
        )
    from .. import interop
    from ..store import learn_rules

    said = read_config(Path(source))
    axes = axis.split(",")
    if len(axes) > 2:
        raise ValueError(f"--axis {axis}: recorded rules have one axis, or the axis of stages and another, as in pp,tp")
    try:
        # Looked for before: what is wrong with a configuration does not count where the engine is not there.
        version = importlib.metadata.version(_RECORDED[engine])
        made = getattr(interop, engine).record_models(said, stages=(1, 2, 3) if len(axes) > 1 else ())
    except ImportError as error:
        raise ValueError(
            f"--record loads with {_RECORDED[engine]} itself and PyTorch: install them in one environment, or record "
            f"in one that has them ({error})"
        ) from None
    learned = learn_rules(made, axes if len(axes) > 1 else axis, stages=axes[0] if len(axes) > 1 else None)
    text = (
        f"# Tensor-parallel over the mesh axis {json.dumps(axes[-1])} as {_RECORDED[engine]} {version} loads "
        f"{printable(str(said.get('model_type')))}: recorded on 1, 2 and 4 ranks.\n\n{learned.text}"
    )
    tensors, why = _tensors(said)
    text += "" if tensors is None else f"\n{tensors}\n"
    if as_json:
        print(json.dumps({"text": text, "unexplained": dict(learned.unexplained), "unused": learned.unused}))
    else:
        print(text, end="")
        say("warning", lines_alike(((name, " is loaded into no parameter") for name in learned.unused), _MOST_SHOWN))
        if tensors is None:
            say(
                "warning",
                [f"the file does not state the tensors, which `fits` and `report` of a config.json need: {why}"],
            )
        reasons = ((name, f": {why}") for name, why in learned.unexplained.items())
        say("error", lines_alike(reasons, _MOST_SHOWN))
    return 1 if learned.unexplained else 0


def _tensors(said: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the part of a rules file that states the tensors of a type; or `None`, and why there is none."""
    from ..store.learn.type_tensors import tensors_text

    try:
        from ..interop import transformers

        return tensors_text(transformers.type_tensors_of(said)), ""
    except (ImportError, LayoutError) as error:
        return None, str(error)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(shown, names[:_LISTED])) + more


def _tensors_of(source: Path, said: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors, quantized weights by the names that rules have for them."""
    from ..quantized.outline import components_in
    from ..quantized.unstated import check_known
    from ..store import open_checkpoint
    from ..store.rewritten.components import reader_of

    with open_checkpoint(source) as checkpoint:
        outline = {name: (shape, dtype) for name, dtype, shape in checkpoint.described()}
        found = components_in(outline, said, reader_of(checkpoint))
    check_known(found)
    return {name: outline[name][0] for name in found.plain} | {name: one.shape for name, one in found.tensors.items()}


def _written(rules: Mapping[str, LayoutRule], axis: str, origin: str, notes: Sequence[str]) -> str:
    layout_map = LayoutMap(default="replicated")
    layout_map.update(rules)
    text = io.StringIO()
    text.write(f"# Tensor-parallel over the mesh axis {json.dumps(axis)} as transformers cuts it: {origin}.\n")
    text.writelines(f"# {printable(note)}\n" for note in notes)
    text.write("\n")
    layout_map.to_toml(text)
    return text.getvalue()
