"""Device names in parts, after TensorFlow's `tf.DeviceSpec`."""

from __future__ import annotations

from typing import Any

from .._arguments import instance
from .._core import parse_device, print_device

__all__ = ["DeviceSpec"]

_PARTS = ("job", "replica", "task", "device_type", "device_index")


class DeviceSpec:
    """The parts of a device name, each of which may be left open; immutable.

    Args:
        job: A name of ASCII letters, digits and `_` that begins with a letter, such as `"worker"`.
        replica: A number, nearly always 0.
        task: A number: the process within the job.
        device_type: A name such as `"CPU"`; `"cpu"` and `"gpu"` count as `"CPU"` and `"GPU"`.
        device_index: A number among the devices of the type; `None` stands for any.

    Raises:
        MeshError: if a part cannot be in a device name, or an index has no type.

    >>> spec = DeviceSpec(job="worker", task=1, device_type="gpu", device_index=3)
    >>> spec.to_string()
    '/job:worker/task:1/device:GPU:3'
    >>> spec
    DeviceSpec(job='worker', task=1, device_type='GPU', device_index=3)
    """

    __slots__ = ("_parts", "_text")

    def __init__(
        self,
        job: str | None = None,
        replica: int | None = None,
        task: int | None = None,
        device_type: str | None = None,
        device_index: int | None = None,
    ) -> None:
        self._text = print_device(job, replica, task, device_type, device_index)
        self._parts = parse_device(self._text)

    @classmethod
    def from_string(cls, spec: str | None) -> DeviceSpec:
        """Read a device name: `/job:…/replica:…/task:…/device:TYPE:N`, any of it left out, or `TYPE:N`.

        The parts may stand in any order, each at most once, with or without the first `/`. `TYPE`, `TYPE:N` and
        `TYPE:*` are for CPU, GPU, TPU, EPU and CUSTOM, in any case; `None` is the empty name.

        Raises:
            ParseError: if the text is not a device name; the message names the byte.

        >>> DeviceSpec.from_string("job:localhost/replica:0/task:0/TPU:0").to_string()
        '/job:localhost/replica:0/task:0/device:TPU:0'
        >>> DeviceSpec.from_string("/job:a/cpu:x")
        Traceback (most recent call last):
        shardwise.errors.ParseError: device name, byte 7: not a decimal number
        """
        return cls(*parse_device("" if spec is None else spec))

    def parse_from_string(self, spec: str | None) -> DeviceSpec:
        """Read a device name; the same as `from_string`, as in TensorFlow 2.

        >>> DeviceSpec().parse_from_string("GPU:1")
        DeviceSpec(device_type='GPU', device_index=1)
        """
        return self.from_string(spec)

    def make_merged_spec(self, dev: DeviceSpec) -> DeviceSpec:
        """Return the parts of `dev`, and this spec's where `dev` leaves them open.

        >>> DeviceSpec(job="worker", device_type="CPU").make_merged_spec(DeviceSpec(device_type="GPU"))
        DeviceSpec(job='worker', device_type='GPU')
        """
        instance("dev", dev, DeviceSpec)
        theirs = {name: getattr(dev, name) for name in _PARTS}
        return self.replace(**{name: part for name, part in theirs.items() if part is not None})

    def replace(self, **parts: Any) -> DeviceSpec:
        """Return the same spec with other `parts`, named as the constructor names them.

        >>> DeviceSpec(job="worker", device_type="CPU").replace(device_type="GPU")
        DeviceSpec(job='worker', device_type='GPU')
        """
        return DeviceSpec(**{**self._named(), **parts})

    @property
    def job(self) -> str | None:
        """The job, such as `"worker"`."""
        return self._parts[0]

    @property
    def replica(self) -> int | None:
        """The replica."""
        return self._parts[1]

    @property
    def task(self) -> int | None:
        """The task: the process within the job."""
        return self._parts[2]

    @property
    def device_type(self) -> str | None:
        """The type, such as `"CPU"`."""
        return self._parts[3]

    @property
    def device_index(self) -> int | None:
        """The number among the devices of the type, or `None` for any."""
        return self._parts[4]

    def to_string(self) -> str:
        """Print the device name.

        >>> DeviceSpec(device_type="TPU").to_string()
        '/device:TPU:*'
        """
        return self._text

    def _named(self) -> dict[str, Any]:
        return dict(zip(_PARTS, self._parts, strict=True))

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, DeviceSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={part!r}" for name, part in self._named().items() if part is not None)
        return f"DeviceSpec({parts})"

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceSpec, self._parts
