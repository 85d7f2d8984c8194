"""Rules files that come with the package, for common models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .._fork import importing
from .._text import shown
from .numbers import Config, read_config
from .wrapped import model_types

__all__ = ["example_rules", "no_rules", "other_model", "rules_named"]

_FOLDER = Path(__file__).parent / "examples"


def example_rules() -> dict[str, Path]:
    """Give the rules files that come with the package, by name, in alphabetical order.

    `hf/llama` is for Llama's tensors as Hugging Face names them, `vllm/llama` for those of vLLM, `megatron/llama` for
    those of Megatron-Core, `torch_dist/llama` for its distributed checkpoints, and `maxtext/llama` for MaxText, over
    the mesh axis "tp". All but the first also have rewrites from Hugging Face's names and back. They are for every size
    of the model, whose numbers they take from its `config.json`. The page `docs/families.md` lists the families.
    `shardwise report --rules NAME` takes the names, and `shardwise rules NAME` prints a file.

    >>> import shardwise as sw
    >>> [name for name in sw.example_rules() if name.endswith("/llama")]
    ['hf/llama', 'maxtext/llama', 'megatron/llama', 'torch_dist/llama', 'vllm/llama']
    >>> config = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
    >>> rules = sw.LayoutMap.from_toml(sw.example_rules()["vllm/llama"], sw.DeviceMesh((8,), ("tp",)), config=config)
    >>> rules["model.layers.0.mlp.down_proj.weight"].axes
    (None, 'tp')
    """
    found = {path.relative_to(_FOLDER).with_suffix("").as_posix(): path for path in _FOLDER.rglob("*.toml")}
    return dict(sorted(found.items()))


def rules_named(name: str, beside: object) -> Path:
    """The rules file of the package that has a name, or else the file at this path from the folder of another.

    >>> rules_named("megatron/llama", None).name, rules_named("own.toml", "rules/other.toml").as_posix()
    ('llama.toml', 'rules/own.toml')
    """
    known = example_rules()
    folder = Path(beside).parent if isinstance(beside, (str, os.PathLike)) else Path()
    return known[name] if name in known else folder / name


def no_rules(name: str) -> str:
    """Say that the package has no rules of a name, and which were probably meant.

    >>> no_rules("vllm/lama").partition(" or ")[0]
    "the package has no rules 'vllm/lama'; did you mean vllm/llama"
    """
    with importing:
        from difflib import get_close_matches  # Slow to import.

    known, family = example_rules(), Path(name).name.removesuffix(".toml")
    near = [each for each in known if each.rpartition("/")[2] == family]
    near = near or get_close_matches(name.removesuffix(".toml"), known, 3)
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    return f"the package has no rules {shown(name)}{meant} `shardwise rules` lists them"


def other_model(models: Sequence[str], config: Config | None, source: str) -> str | None:
    """Say that rules for models of these types are used for one of another type; `None` if nothing says so.

    >>> other_model(["qwen3"], {"model_type": "llama"}, "'vllm/qwen3.toml'").partition("; ")[0]
    "'vllm/qwen3.toml' is for models of the type qwen3, and this one is of the type llama"
    """
    if not models or config is None:
        return None
    types = model_types(read_config(config))
    if not types or not {*types}.isdisjoint(models):
        return None
    with importing:
        from .toml import read_models

    engine = Path(source.strip("'")).parent.name
    known = (name for name in example_rules() if name.rpartition("/")[0] == engine and not name.endswith("-mtp"))
    meant = [name for name in known if not {*types}.isdisjoint(read_models(example_rules()[name]))]
    advice = f"{' or '.join(meant)} is for it" if meant else "see that each rule is right for it"
    own, other = " or ".join(models), " with ".join(types)
    return f"{source} is for models of the type {own}, and this one is of the type {other}; {advice}"
