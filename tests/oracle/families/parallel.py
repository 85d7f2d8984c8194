"""transformers' own tensor parallelism, in several processes on a CPU: what each rank holds of models that it loads.

`torchrun --nproc-per-node 2 -m tests.oracle.families.parallel [FAMILY...]`, and with 4 processes, in an environment
with torch and transformers. The names are those of parameters in memory, where experts are stacked.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from .models import FAMILIES, digest, numbered, read, write  # noqa: E402

#: Families whose plan cuts something.
PLANNED = (
    "llama llama-tied mistral qwen2 qwen3 qwen3-moe mixtral gemma2 gemma3 phi3 glm4-moe deepseek-v3 gpt-neox "
    "llama4 qwen3-next nemotron-h"
)


def main() -> None:
    """Load each model on all ranks, and gather what they hold."""
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    for family in sys.argv[1:] or PLANNED.split():
        for size in range(len(FAMILIES[family][2])):
            said = read(f"{family}-{size}")
            folder = Path(tempfile.gettempdir()) / f"parallel-{family}-{size}"
            if rank == 0:
                folder.mkdir(exist_ok=True)
                tensors = {name: torch.from_numpy(array).float() for name, array in numbered(said["tensors"]).items()}
                save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
                (folder / "config.json").write_text(json.dumps(said["config"]))
            dist.barrier()
            kind = getattr(transformers, said["class"])
            try:
                model = kind.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
                held: Any = {}
                said["plan"] = dict(model.tp_plan)
                kept = set(model.state_dict())
                buffers = [(name, value) for name, value in model.named_buffers() if name in kept]
                for name, value in [*model.named_parameters(), *buffers]:
                    local = value.to_local() if hasattr(value, "to_local") else value
                    array = local.detach().float().numpy().astype("i4")
                    held[name] = [list(array.shape), digest(array)]
            except Exception as error:  # Whatever it refuses with.
                held = {"refused": f"{type(error).__name__}: {error}"[:200]}
            every: list[Any] = [None] * count
            dist.all_gather_object(every, held)
            if rank == 0:
                own = said["engines"].setdefault("hf", {"of": "", "ranks": {}})
                own["of"] = f"transformers {transformers.__version__}: from_pretrained(tp_plan='auto')"
                refused = next((one for one in every if "refused" in one), None)
                own["ranks"][str(count)] = every if refused is None else refused
                write(f"{family}-{size}", said)
                print(family, size, count, refused or len(held), flush=True)


if __name__ == "__main__":
    main()
