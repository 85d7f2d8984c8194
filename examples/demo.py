"""A checkpoint, a mesh, a file of rules: who holds what; then the checkpoint is resharded, merged, and compared.

    python examples/demo.py                        # writes a small GPT-2, which stays in target/demo
    python examples/demo.py model.safetensors      # or uses your checkpoint: a file, or a Hugging Face folder

Nothing here needs a device: the mesh of 4 is arithmetic.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import shardwise
from shardwise import store
from shardwise.cli import main as run

AXES = "data=1,model=4"
#: The checkpoint that stays, to try other commands on.
KEPT = Path(__file__).parents[1] / "target" / "demo" / "model.safetensors"
MESH = shardwise.DeviceMesh((1, 4), ("data", "model"))


def gpt2_tensors(
    layers: int = 6, width: int = 128, context: int = 256, vocabulary: int = 50257
) -> dict[str, np.ndarray]:
    """Give the tensors of a small GPT-2 under their real names, filled with random numbers, the same every time."""
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, width), "wpe.weight": (context, width)}
    for layer in range(layers):
        block = {
            "ln_1.weight": (width,),
            "ln_1.bias": (width,),
            "attn.bias": (1, 1, context, context),
            "attn.c_attn.weight": (width, 3 * width),
            "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width),
            "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,),
            "ln_2.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width),
            "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width),
            "mlp.c_proj.bias": (width,),
        }
        shapes |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def choose_rules(checkpoint: store.StoredCheckpoint) -> str:
    """Give the name of the rules that match the most names, of those in the package for this mesh."""
    files = shardwise.example_rules()

    def unmatched(rules: str) -> int:
        layout_map = shardwise.LayoutMap.from_toml(files[rules], MESH)
        return sum(not layout_map.matching_rules(name) for name in checkpoint)

    return min(("bert", "gpt2"), key=unmatched)


def choose_tensor(checkpoint: store.StoredCheckpoint, layout_map: shardwise.LayoutMap) -> str | None:
    """Give the name of the largest tensor that the rules cut, in a numbered layer if there are any."""
    report = layout_map.report({name: tensor.shape for name, tensor in checkpoint.items() if tensor.bits >= 8})
    # A device holds several pieces of a packed tensor, which no single view shows.
    whole = {name for name in checkpoint if (layout := layout_map[name]) is not None and not layout.is_packed}
    cut = [tensor.name for tensor in report.placed if not tensor.is_replicated and tensor.name in whole]
    in_layers = [name for name in cut if any(part.isdecimal() for part in name.split("."))]
    return max(in_layers or cut, key=lambda name: checkpoint[name].nbytes, default=None)


def say(command: str, *arguments: str) -> None:
    """Show a command as one would type it, and run it."""
    print(f"\n$ shardwise {command} {' '.join(arguments)}\n")
    if status := run([command, *arguments]):
        sys.exit(status)


def check(holds: bool, otherwise: str) -> None:
    """End the demo if something that it is about to say is not true."""
    if not holds:
        sys.exit(f"demo: {otherwise}")


def prove(checkpoint: store.StoredCheckpoint, name: str, layout: shardwise.TensorLayout) -> None:
    """Cut a tensor into shards, and check that they are views of the file that make up the whole of it."""
    tensor = checkpoint[name]
    array = tensor.array()
    start = time.perf_counter()
    sharded = shardwise.distribute_tensor(array, layout)
    elapsed = time.perf_counter() - start
    check(all(np.shares_memory(shard.data, array) for shard in sharded.shards), "a shard was copied")
    whole = np.zeros(array.shape, array.dtype)
    for shard in sharded.shards:
        whole[shard.index] = shard.data
    with tensor.pieces[0].path.open("rb") as file:
        file.seek(tensor.pieces[0].extent().offset)
        check(whole.tobytes() == file.read(tensor.nbytes), "the shards do not make up the tensor")
    print(f"\nGiving each of the {len(sharded.shards)} devices its shard took {1e6 * elapsed:.0f} microseconds.")
    print("The shards are views of the memory-mapped file: no element was copied or read.")
    print(f"Put back together, they are the tensor's {tensor.nbytes:,} bytes in the file, bit for bit.")


def reshard(path: Path, rules: str) -> None:
    """Cut the checkpoint for 4 devices, the result for 8, merge that again, and compare it with the first."""
    print("\nNow the checkpoint itself: cut for 4 devices, then for 8, merged, verified, and compared.")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        four, eight, merged = (str(Path(folder, name)) for name in ("for-4", "for-8", "merged.safetensors"))
        start = time.perf_counter()
        for source, target, devices in ((str(path), four, 4), (four, eight, 8)):
            options = ["--mesh", f"data=1,model={devices}", "--rules", rules, "--uneven", "balanced"]
            say("reshard", source, target, *options, "--memory", "64MiB")
        say("reshard", eight, merged)
        say("verify", eight)
        say("diff", str(path), merged)
        elapsed = time.perf_counter() - start
    print(f"\nThat took {elapsed:.1f} s. The diff compares every byte of every tensor: nothing was lost on the way.")


def demo(path: Path) -> None:
    """Report on a checkpoint, show one of its tensors, check what was said, and reshard the checkpoint."""
    with shardwise.open_checkpoint(path) as checkpoint:
        rules = choose_rules(checkpoint)
        layout_map = shardwise.LayoutMap.from_toml(shardwise.example_rules()[rules], MESH)
        print(f"What would each device of a mesh of 4 hold, by the rules of {rules}?")
        say("report", str(path), "--mesh", AXES, "--rules", rules)
        name = choose_tensor(checkpoint, layout_map)
        if name is None:
            print("\nThe rules cut no tensor of this checkpoint on this mesh, so there are no shards to show.")
            return
        layout = layout_map[name] or shardwise.TensorLayout((), MESH)
        shape = ",".join(map(str, checkpoint[name].shape))
        spec = ",".join("+".join([axes] if isinstance(axes, str) else axes or "-") for axes in layout.axes)
        print(f"\nOne tensor of it, {name}:")
        say("show", shape, "--mesh", AXES, "--layout", spec)
        prove(checkpoint, name, layout)
    reshard(path, rules)


def main(arguments: list[str]) -> None:
    """Run the demo on the given checkpoint, or on one made for it."""
    if arguments and arguments[0]:
        try:
            demo(Path(arguments[0]))
        except (shardwise.ShardwiseError, OSError, ImportError) as error:
            sys.exit(f"demo: {error}")
        return
    path = KEPT
    if path.exists():
        print(f"A small GPT-2 with random weights is there from the last time: {path}")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        shardwise.save_checkpoint(path, gpt2_tensors())
        print(f"Wrote a small GPT-2 with random weights, {path.stat().st_size / 2**20:.0f} MiB: {path}")
    demo(path)
    print(f"\n{path} stays there, to try the examples of the pages on.")


if __name__ == "__main__":
    main(sys.argv[1:])
