"""New weights from a trainer to an engine, read from the trainer's memory: over NIXL if it is installed.

    python examples/nixl_transfer.py            # starts three processes on this machine
    python examples/nixl_transfer.py shared     # without NIXL: over memory that the processes share

The trainer does nothing but tell where its weights are. Each process of the engine compares plans, versions and memory,
and reads its own slices, without a byte more, into the views of its fused parameters. Then a step changes the weights
in place: the rows stay, and only versions are compared again. At last the trainer's weights move to other memory, and
the engine refuses to read until it has new addresses.
"""

import contextlib
import importlib.util
import json
import multiprocessing
import sys
from multiprocessing.shared_memory import SharedMemory

import numpy as np

import shardwise as sw
from shardwise.deploy import Deployment, FusedParameter
from shardwise.execute.transports import AddressRows, MemoryManifest, address_rows, check_manifests

SHAPES = {"q": (64, 32), "k": (16, 32), "v": (16, 32), "o": (32, 64)}
TENSORS = {name: (shape, "float32") for name, shape in SHAPES.items()}


def engine() -> Deployment:
    """Two devices with half of the heads each; queries, keys and values are one parameter."""
    mesh = sw.DeviceMesh((2,), ("tp",), ["engine:0", "engine:1"])
    rules = {"[qkv]": ("tp", None), "o": (None, "tp")}
    return Deployment(["engine:0", "engine:1"], mesh, rules, parameters=[FusedParameter("qkv", ("q", "k", "v"))])


def plan() -> sw.reshard.ModelPlan:
    """Make the plan, as every process does on its own."""
    whole = sw.TensorLayout((None, None), sw.DeviceMesh((1,), ("one",), ["trainer"]))
    return sw.plan_model(dict.fromkeys(SHAPES, whole), engine(), TENSORS)


def weights(step: int) -> dict[str, np.ndarray]:
    """The weights of a step."""
    return {name: np.random.default_rng([step, at]).random(one, "f4") for at, (name, one) in enumerate(SHAPES.items())}


class Nixl:
    """An agent of NIXL, which knows those of its peers."""

    def __init__(self, label: str, blocks: list[np.ndarray]) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(label, nixl_agent_config(backends=["UCX"]))
        if blocks:
            self.agent.register_memory([(one.ctypes.data, one.nbytes, 0, "") for one in blocks], "DRAM")
        self.told = self.agent.get_agent_metadata()

    def meet(self, told: bytes, theirs: MemoryManifest) -> None:
        """Learn of a peer."""
        self.agent.add_remote_agent(told)

    def read(self, rows: AddressRows) -> None:
        """Read all rows as one transfer."""
        found = rows.nixl()
        here = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", found.local, found.local_memory)
        there = self.agent.prep_xfer_dlist(rows.other.holder, found.remote, found.remote_memory)
        transfer = self.agent.make_prepped_xfer("READ", here, found.indices, there, found.indices)
        state = self.agent.transfer(transfer)
        while state == "PROC":
            state = self.agent.check_xfer_state(transfer)
        if state != "DONE":
            raise ConnectionError(f"the transfer from {rows.other.holder} ended as {state}")


class Shared:
    """Memory that another process has mapped, found by its addresses."""

    def __init__(self, label: str, blocks: list[np.ndarray]) -> None:
        self.blocks, self.told = blocks, b""

    def meet(self, told: bytes, theirs: MemoryManifest) -> None:
        """Map the memory of a peer."""
        self.memory, self.begin = SharedMemory(told.decode()), theirs.blocks[0].address

    def read(self, rows: AddressRows) -> None:
        """Copy all runs."""
        for here, there, size in zip(*(column.tolist() for column in rows.runs()), strict=True):
            block = next(one for one in self.blocks if 0 <= here - one.ctypes.data < one.nbytes)
            target, at = block.reshape(-1).view(np.uint8), here - block.ctypes.data
            target[at : at + size] = np.frombuffer(self.memory.buf, np.uint8)[there - self.begin :][:size]


def trainer(kind: type, engines: list) -> None:
    """Hold the weights in one block, and tell the engine where they are."""
    part = plan().descriptors("trainer")
    size = sum(4 * shape[0] * shape[1] for shape in SHAPES.values())
    segments = [SharedMemory(create=True, size=size) for _ in range(2)]
    blocks = [np.frombuffer(one.buf, np.float32, size // 4) for one in segments]
    ends = np.cumsum([shape[0] * shape[1] for shape in SHAPES.values()])[:-1]
    held = [dict(zip(SHAPES, np.split(block, ends), strict=True)) for block in blocks]
    transport = kind("trainer", blocks)
    for step, where in ((1, 0), (2, 0), (3, 1)):  # The third step is in other memory.
        for name, values in weights(step).items():
            held[where][name][:] = values.ravel()
        mine = MemoryManifest.of(part, held[where], {}, version=f"step {step}", blocks=[blocks[where]])
        for pipe in engines:
            if step == 1:
                pipe.send((json.dumps(mine.to_dict()), transport.told or segments[0].name.encode()))
            pipe.send((mine.version, mine.digest))
        for pipe in engines:
            pipe.recv()  # It has read all, and so the weights may change.
    del held, blocks, transport, mine
    for one in segments:
        with contextlib.suppress(BufferError):  # The agent may still know the memory.
            one.close()
        one.unlink()


def engine_rank(label: str, kind: type, trainer: "multiprocessing.connection.Connection") -> None:
    """Be a process of the engine, and check what it has after each step."""
    part = plan().descriptors(label)
    parameters = engine().parameters_of(label, SHAPES)
    memory = {one.name: np.zeros(one.shape, np.float32) for one in parameters}
    views = {name: view for one in parameters for name, view in one.views(memory[one.name]).items()}
    blocks = list(memory.values())
    mine = MemoryManifest.of(part, {}, views, version="step 1", blocks=blocks)
    transport = kind(label, blocks)
    text, told = trainer.recv()
    theirs = MemoryManifest.from_dict(json.loads(text))
    transport.meet(told, theirs)
    rows = address_rows(part, mine, theirs)
    for step in (1, 2, 3):
        version, digest = trainer.recv()
        try:
            check_manifests(mine.of_version(version), theirs.of_version(version), digest)
        except sw.LayoutError:
            if step != 3:
                raise
            print(f"{label} does not read {version}: its rows are for other memory", flush=True)
        else:
            transport.read(rows)
            for name, whole in weights(step).items():
                assert np.array_equal(views[name], whole[engine().partition(name, whole.shape).box(label)])
            print(f"{label} has {version}: {rows.nbytes:,} bytes in {len(rows)} rows", flush=True)
        trainer.send("done")


def main(kind: type) -> int:
    """Start the processes, and say whether all of them ended well."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    started = [context.Process(target=trainer, args=(kind, [one for one, _ in pipes]))]
    started += [context.Process(target=engine_rank, args=(f"engine:{i}", kind, pipes[i][1])) for i in range(2)]
    for one in started:
        one.start()
    for one in started:
        one.join()
    return 1 if any(one.exitcode for one in started) else 0


if __name__ == "__main__":
    has_nixl = importlib.util.find_spec("nixl") is not None
    sys.exit(main(Nixl if has_nixl and sys.argv[1:] != ["shared"] else Shared))
