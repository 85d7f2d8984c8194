"""Weights from a trainer to an engine over plain TCP sockets: a model for any other transport, with all that may fail.

    python examples/sockets.py            # starts six processes on this machine

What a process does is its program: messages to and from its peers, in an order in which nobody waits in a circle, even
if each send waits for its receive. Beside the program there are two votes. Before anything is sent, all processes
compare digests, so that two with other plans never begin. At the end all say that they have everything, and only then
does the engine take the new weights over from its spare memory: they are whole, or untouched. Whoever fails closes its
connections, which is an error on every other process at once; one that is silent is an error after `SECONDS`.
"""

import multiprocessing
import socket
import struct
import sys
import zlib
from collections.abc import Mapping

import numpy as np

import shardwise as sw
from shardwise.deploy import Deployment, fsdp2
from shardwise.reshard import ModelProgram

SECONDS = 20.0
HEADER = struct.Struct("<qqI")  # the tag of a message, its bytes, and their checksum
Arrays = Mapping[str, np.ndarray]


class Connections:
    """One connection to each other process, by its label."""

    def __init__(
        self, own: int, labels: list[str], addresses: list[tuple[str, int]], listening: socket.socket,
        seconds: float = SECONDS,
    ) -> None:  # fmt: skip
        self.to: dict[str, socket.socket] = {}
        self.own = labels[own]
        try:
            for rank in range(own):
                other = socket.create_connection(addresses[rank], seconds)
                other.sendall(struct.pack("<q", own))
                self.to[labels[rank]] = other
            listening.settimeout(seconds)
            for _ in range(own + 1, len(labels)):
                other, _ = listening.accept()
                other.settimeout(seconds)
                (rank,) = struct.unpack("<q", read(other, 8))
                self.to[labels[rank]] = other
        except BaseException:
            self.close()
            raise
        for other in self.to.values():
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, peer: str, tag: int, data: np.ndarray) -> None:
        """Send a message: its header, then its bytes."""
        self.to[peer].sendall(HEADER.pack(tag, data.nbytes, zlib.crc32(data)))
        self.to[peer].sendall(memoryview(data).cast("B"))

    def receive(self, peer: str, tag: int, data: np.ndarray) -> None:
        """Receive a message into memory that it must fill."""
        got, size, checksum = HEADER.unpack(read(self.to[peer], HEADER.size))
        if (got, size) != (tag, data.nbytes):
            raise ConnectionError(f"{peer} sent {size} bytes as message {got}; {data.nbytes} as {tag} were expected")
        fill(self.to[peer], memoryview(data).cast("B"))
        if zlib.crc32(data) != checksum:
            raise ConnectionError(f"{peer} sent other bytes as message {tag} than it said")

    def vote(self, what: bytes, expected: Mapping[str, bytes]) -> None:
        """Tell all others the same thing, and hear from all; the answers must be those that are expected."""
        for other in self.to.values():
            other.sendall(what)
        for peer, other in self.to.items():
            if (heard := read(other, len(expected[peer]))) != expected[peer]:
                raise ConnectionError(f"{peer} does not agree: {heard.hex()}")

    def close(self) -> None:
        """End all connections; whoever waits for this process then fails at once."""
        for other in self.to.values():
            other.close()


def read(other: socket.socket, size: int) -> bytes:
    """Read exactly so many bytes."""
    data = bytearray(size)
    fill(other, memoryview(data))
    return bytes(data)


def fill(other: socket.socket, memory: memoryview) -> None:
    """Fill memory with what arrives."""
    while memory:
        count = other.recv_into(memory)
        if not count:
            raise ConnectionError(f"the connection ended with {len(memory)} bytes missing")
        memory = memory[count:]


def move(program: ModelProgram, all_of: Connections, before: Arrays, weights: Arrays) -> None:
    """Carry out one process's program; `weights` change as a whole, and only if all processes have everything."""
    spare = {name: array.copy() for name, array in weights.items()}  # Padding stays as it is.
    try:
        digests = {peer: program.digest(peer) for peer in all_of.to}
        for peer, other in all_of.to.items():
            other.sendall(digests[peer])
        theirs = {peer: read(other, 32) for peer, other in all_of.to.items()}
        agreed = theirs == digests
        all_of.vote(b"y" if agreed else b"n", dict.fromkeys(all_of.to, b"y"))
        if not agreed:
            raise ConnectionError("a peer has another plan")
        program.run(before, spare, all_of.send, all_of.receive)
        all_of.vote(b"done", dict.fromkeys(all_of.to, b"done"))
    except BaseException:
        all_of.close()
        raise
    for name, array in weights.items():
        array[...] = spare[name]


# What follows is an example of its use: a tiny model, a trainer of four processes and an engine of two.

TENSORS = {f"layers.{i}.{x}": ((24, 16), "float32") for i in range(8) for x in ("up", "down")}


def plan() -> sw.reshard.ModelPlan:
    """Make the plan, as every process does on its own."""
    mesh = sw.DeviceMesh((2,), ("tp",))
    engine = Deployment(["engine:0", "engine:1"], mesh, {"up": ("tp", None), "down": (None, "tp")})
    return sw.plan_model(fsdp2(4, world=[f"trainer:{i}" for i in range(4)]), engine, TENSORS)


def work(own: int, addresses: list[tuple[str, int]], listening: socket.socket) -> None:
    """Be one of the processes, and check what it has at the end."""
    made = plan()
    labels = made.devices
    whole = {name: np.arange(384, dtype="float32").reshape(24, 16) + 1000 * i for i, name in enumerate(TENSORS)}

    def held(side: int) -> dict[str, np.ndarray]:
        ends = {name: (one.src, one.dst)[side] for name, one in made.items()}
        return {
            name: np.ascontiguousarray(whole[name][end.pieces(labels[own])[0].box])
            for name, end in ends.items()
            if labels[own] in end.holders
        }

    expected = held(1)
    weights = {name: np.zeros_like(array) for name, array in expected.items()}
    connections = Connections(own, labels, addresses, listening)
    move(made.program(labels[own], memory=1 << 20), connections, held(0), weights)
    connections.close()
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)


def main() -> int:
    """Start the processes, and say whether all of them ended well."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in plan().devices]
    addresses = [one.getsockname() for one in listening]
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=work, args=(own, addresses, one)) for own, one in enumerate(listening)]
    for one in started:
        one.start()
    for one in listening:
        one.close()
    for one in started:
        one.join()
    if any(one.exitcode for one in started):
        return 1
    print(f"{len(started)} processes: the engine has its weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
