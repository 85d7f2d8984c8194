"""Rules files that come with the package, for common models."""

from pathlib import Path

__all__ = ["example_rules"]

_FOLDER = Path(__file__).parent / "examples"


def example_rules() -> dict[str, Path]:
    """Give the rules files that come with the package, by name, in alphabetical order.

    `bert` and `gpt2` are for checkpoints as Hugging Face stores them, over the mesh axis "model"; `vllm/` and
    `megatron/` with `gpt2`, `llama`, `mixtral` and `qwen` for the fused weights of these engines, over "tp";
    `torch_dist/` with `gpt2` and `llama` for Megatron's distributed checkpoints. Those of `vllm/` and `torch_dist/` for
    `gpt2` and `llama` also have rewrites from Hugging Face's names. Each file says in its first lines what it is
    for. `shardwise report --rules NAME` takes the names, and `shardwise rules NAME` prints a file.

    >>> import shardwise as sw
    >>> list(sw.example_rules())[:3]
    ['bert', 'gpt2', 'megatron/gpt2']
    >>> rules = sw.LayoutMap.from_toml(sw.example_rules()["vllm/llama"], sw.DeviceMesh((8,), ("tp",)))
    >>> rules["model.layers.0.mlp.down_proj.weight"].axes
    (None, 'tp')
    """
    return {path.relative_to(_FOLDER).with_suffix("").as_posix(): path for path in sorted(_FOLDER.rglob("*.toml"))}
