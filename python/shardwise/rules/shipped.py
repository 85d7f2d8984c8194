"""Rules files that come with the package, for common models."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from .._fork import importing
from .._text import shown

__all__ = ["called", "example_rules", "no_rules", "rules_file", "rules_named"]

_FOLDER = Path(__file__).parent / "examples"


def example_rules() -> dict[str, Path]:
    """Return the rules files that come with the package, by name, in alphabetical order.

    `hf/llama` is for Llama's tensors as Hugging Face names them, `vllm/llama` for those of vLLM, `megatron/llama` for
    those of Megatron-Core, `torch_dist/llama` for its distributed checkpoints, and `maxtext/llama` for MaxText, over
    the mesh axis "tp". All but the first also have rewrites from Hugging Face's names and back. They are for every size
    of the model, whose numbers they take from its `config.json`. The page `docs/families.md` lists the families. Every
    argument that takes the path of a rules file takes such a name too: `LayoutMap.from_toml("hf/llama")`,
    `--rules hf/llama`. `shardwise rules NAME` prints a file.

    >>> import shardwise as sw
    >>> [name for name in sw.example_rules() if name.endswith("/llama")]
    ['hf/llama', 'maxtext/llama', 'megatron/llama', 'torch_dist/llama', 'vllm/llama']
    >>> config = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
    >>> rules = sw.LayoutMap.from_toml("vllm/llama", sw.DeviceMesh((8,), ("tp",)), config=config)
    >>> rules["model.layers.0.mlp.down_proj.weight"].axes
    (None, 'tp')
    """
    found = {path.relative_to(_FOLDER).with_suffix("").as_posix(): path for path in _FOLDER.rglob("*.toml")}
    return dict(sorted(found.items()))


def rules_named(name: str, beside: object) -> Path:
    """Return the rules file of the package that has a name, or else the file at this path from the folder of another.

    >>> rules_named("megatron/llama", None).name, rules_named("own.toml", "rules/other.toml").as_posix()
    ('llama.toml', 'rules/own.toml')
    """
    known = example_rules()
    folder = Path(beside).parent if isinstance(beside, (str, os.PathLike)) else Path()
    return known[name] if name in known else folder / name


def rules_file(file: Any) -> Any:
    """Return the path of a rules file of the package, if this is its name and no file is called so; else what is given.

    Raises:
        FileNotFoundError: if it is a name, and neither the package nor the folder has such a file.

    >>> rules_file("hf/llama").name
    'llama.toml'
    """
    if not isinstance(file, str) or not _is_missing(file):
        return file
    known = example_rules()
    if file not in known:
        raise FileNotFoundError(errno.ENOENT, f"no such file, and {no_rules(file)}", file)
    return known[file]


def _is_missing(path: str) -> bool:
    """Return whether no file is at a path; False for an impossible path, which `open` refuses by itself."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def called(path: object) -> str:
    """Return the text by which messages call a rules file: one of the package by its name, any other by its path.

    >>> called(example_rules()["vllm/llama"]), called("own.toml")
    ('vllm/llama', 'own.toml')
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else str(path)
    if isinstance(text, str) and text.startswith(os.fspath(_FOLDER)):
        return Path(text).relative_to(_FOLDER).with_suffix("").as_posix()
    return str(text)


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
