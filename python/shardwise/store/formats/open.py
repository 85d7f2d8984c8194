"""Opening a checkpoint of any format: what a path is, and which module reads it.

A format is one entry of `FORMS` and one module. The entries are tried in order, with names and first bytes only; the
first that knows the path opens it. A format that is known but cannot be read is an entry too: its sentence says why,
and what to do instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

from ..._arguments import check_items, is_true
from ..._fork import cached_property, importing
from ..._text import shown
from ...errors import ParseError
from ..data.location import Location, entries_of, first_bytes, hub_hint, location_of, refuse_other, unlisted
from ..data.parts import (
    BARE,
    ENGINE_FILE,
    FSDP_FOLDER,
    MODEL_FILES,
    OPTIMIZER_FILE,
    RANK_FILE,
    bare_ranks,
)
from ..tensors.checkpoint import StoredCheckpoint
from ..tensors.kinds import kind_of
from ..tensors.stored import UnsupportedError

__all__ = ["FORMS", "Candidate", "Form", "known_form", "open_checkpoint"]

# A folder of more entries is not listed further: the files that tell formats apart are at most as many as processes.
_MOST_NAMES = 1_000_000
# So many names in a folder of no known format are looked at, whether they are folders of one.
_MOST_FOLDERS = 16
#: The indexes that tell a folder's format, and that say what belongs to it.
_MARKERS = ("shardwise.json", ".metadata", "model.safetensors.index.json")


#: The modules whose files may be parts of a checkpoint.
_OF_ONE_FILE = ("safetensors.form", "torch.plain", "keras")
#: The module of files of ranks, whose tensors may be padded.
_OF_RANKS = "torch.fsdp"
#: The modules of models in one folder, beside which files of a training run may lie.
_OF_MODELS = ("safetensors.form", "torch.plain", "torch.training")


class Candidate:
    """A path that may be a checkpoint, looked at once for all formats."""

    def __init__(self, path: Location) -> None:
        self.path = path
        self.is_folder = path.is_dir()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names in the folder, sorted; none for a file."""
        if not self.is_folder:
            return ()
        names = set()
        for name, _ in entries_of(self.path):
            names.add(name)
            if len(names) > _MOST_NAMES:
                raise ParseError(f"{self.path}: more than {_MOST_NAMES} entries, the limit")
        # Without its index, a folder would be taken for another format.
        names |= unlisted(self.path, (name for name in _MARKERS if name not in names))
        return tuple(sorted(names))

    def matching(self, pattern: str) -> list[str]:
        """The names in the folder that match a regular expression as a whole."""
        compiled = re.compile(pattern)
        return [name for name in self.names if compiled.fullmatch(name)]

    @cached_property
    def head(self) -> bytes:
        """The first bytes of the file; none for a folder."""
        if self.is_folder or not self.path.is_file():
            return b""
        return first_bytes(self.path, 512)


class Form(NamedTuple):
    """A format of checkpoints.

    Attributes:
        name: The value of `StoredCheckpoint.format`.
        knows: Whether a path has this format.
        module: The module of this package whose `open_form(path)` opens it; empty if none can.
        refusal: If there is no module, the sentence that says why, and what to do instead.
    """

    name: str
    knows: Callable[[Candidate], object]
    module: str = ""
    refusal: str = ""


def _named(*names: str) -> Callable[[Candidate], object]:
    wanted = frozenset(names)
    return lambda candidate: not wanted.isdisjoint(candidate.names)


def _matching(pattern: str) -> Callable[[Candidate], object]:
    return lambda candidate: candidate.matching(pattern)


def _file(*suffixes: str, magic: bytes = b"") -> Callable[[Candidate], object]:
    return lambda candidate: (
        not candidate.is_folder and candidate.path.name.endswith(suffixes or "") and candidate.head.startswith(magic)
    )


#: A file of `HuggingFaceStorageWriter`.
_SHARD = r"shard-\d+-model-\d+-of-\d+\.safetensors"
_STEP = r"(?:[A-Za-z][A-Za-z0-9]*_)?\d+"
#: A file of the data of a checkpoint of TensorFlow, or a SavedModel.
_TENSORFLOW = r".*\.data-\d+-of-\d+|saved_model\.pb"
_BY_TENSORFLOW = (
    "is a checkpoint of TensorFlow; after reader = tf.train.load_checkpoint(PREFIX), save_checkpoint(PATH, {name: "
    "reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if name != "
    "'_CHECKPOINTABLE_OBJECT_GRAPH'}) makes a checkpoint of it; PREFIX is what its files begin with, in a SavedModel "
    "variables/variables"
)

#: The formats, in the order in which they are tried.
FORMS: list[Form] = [
    Form(
        "orbax (unfinished)",
        lambda candidate: ".orbax-checkpoint-tmp" in candidate.path.name,
        refusal="is what an interrupted save of Orbax left behind; open the last complete step beside it",
    ),
    Form("megatron", _named("latest_checkpointed_iteration.txt"), "megatron.form"),
    Form("megatron", lambda candidate: {"metadata.json", "common.pt"} <= set(candidate.names), "megatron.form"),
    Form("dcp", _named(".metadata"), "torch.dcp"),
    Form("dcp", lambda candidate: candidate.path.name == ".metadata" and not candidate.is_folder, "torch.dcp"),
    Form(
        "dcp (without collectives)",
        _matching(r"__\d+\.metadata"),
        refusal="has one metadata file per rank, as written with use_collectives=False, and no common one; load it "
        "with torch.distributed.checkpoint by as many ranks, and save it once without use_collectives=False",
    ),
    Form(
        "dcp (unfinished)",
        lambda candidate: candidate.matching(r".*\.distcp") or ".metadata.tmp" in candidate.names,
        refusal="has the data of a PyTorch distributed checkpoint but no .metadata, which is written last: the save "
        "was interrupted, or files are missing; take the last complete checkpoint",
    ),
    Form(
        "dcp (one file)",
        _file(".distcp"),
        refusal="is one file of a PyTorch distributed checkpoint, whose .metadata says what is in it; open its folder",
    ),
    Form(
        "dcp",
        lambda candidate: any(
            (candidate.path / name / ".metadata").exists() for name in candidate.matching(FSDP_FOLDER)[:_MOST_FOLDERS]
        ),
        "torch.training",
    ),
    Form(
        "fsdp2",
        _matching(r".*model_world_size_\d+_rank_\d+\.pt|pytorch_model_fsdp(?:_\d+)?_rank_?\d+\.bin"),
        "torch.fsdp",
    ),
    Form(
        "fsdp2 (without a model)",
        _matching(r"(?:.*optim|extra_state)_world_size_\d+_rank_\d+\.pt|optimizer(?:_\d+)?_rank_?\d+\.bin"),
        refusal="has the states of an optimizer by rank, but no files of the model, which have the names and shapes of "
        "the parameters; put model_world_size_W_rank_R.pt, or pytorch_model_fsdp_0_rankR.bin, of all ranks beside them",
    ),
    Form(
        "fsdp2 (one file)",
        lambda candidate: (
            not candidate.is_folder
            and re.fullmatch(r".*(?:optim|extra_state)_world_size_\d+_rank_\d+\.pt", candidate.path.name)
        ),
        refusal="is what one rank has of an optimizer or of a run; open its folder, with the files of all ranks",
    ),
    Form(
        "fsdp1",
        _matching(r".*_fsdp(?:_\d+)?_rank_?\d+\.(?:bin|pt)"),
        refusal="holds the flat parameters of FSDP1, which do not describe the tensors in them; save it once with "
        "SHARDED_STATE_DICT or FULL_STATE_DICT",
    ),
    Form(
        "universal",
        lambda candidate: "latest_universal" in candidate.names or _is_universal(candidate),
        "torch.universal",
    ),
    Form(
        "deepspeed",
        lambda candidate: (
            candidate.matching(r".*(?:zero_pp_rank|mp_rank)_\d+.*_states\.pt")
            or ("latest" in candidate.names and candidate.matching(r"global_step\d+"))
        ),
        "torch.deepspeed",
    ),
    Form("megatron", _matching(r"mp_rank_\d\d(?:_\d{3})*"), "megatron.form"),
    Form("orbax", _named("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "orbax.checkpoint"), "orbax.form"),
    Form(
        "orbax",
        lambda candidate: any(_is_step(candidate.path / name) for name in candidate.matching(_STEP)),
        "orbax.form",
    ),
    Form("ranks", lambda candidate: "shardwise.json" in candidate.names and candidate.matching(RANK_FILE), "sharded"),
    Form("vllm", lambda candidate: "shardwise.json" in candidate.names and candidate.matching(ENGINE_FILE), "sharded"),
    Form(
        "ranks (unfinished)",
        lambda candidate: "shardwise.json" not in candidate.names and candidate.matching(RANK_FILE),
        refusal="has files for ranks but no shardwise.json, which is written last: the run that made it was "
        "interrupted, or the copy was",
    ),
    Form(
        "vllm",
        _matching(ENGINE_FILE),
        refusal=f"is an engine's sharded state, a file for each rank; {BARE}",
    ),
    Form(
        "sharded",
        lambda candidate: "shardwise.json" in candidate.names and candidate.matching(r"shard-\d+-.*"),
        "sharded",
    ),
    # Without tensors, or all that is left of one: the manifest names the files that are missing.
    Form("sharded", lambda candidate: list(candidate.names) == ["shardwise.json"], "sharded"),
    Form("dcp-safetensors", _matching(_SHARD), "torch.dcp_safetensors"),
    Form("safetensors", _matching(r".*\.safetensors(?:\.index\.json)?"), "safetensors.form"),
    Form("safetensors", _file(".safetensors", ".safetensors.index.json"), "safetensors.form"),
    Form("keras", _matching(r".*\.weights\.(?:json|h5)"), "keras"),
    Form("keras", _file(".weights.json"), "keras"),
    Form("keras", _file(magic=b"\x89HDF\r\n\x1a\n"), "keras"),
    Form(
        "keras (archive)",
        _file(".keras", magic=b"PK\x03\x04"),
        refusal="is a Keras archive; unzip it and open the model.weights.h5 in it",
    ),
    Form("torch", _matching(r"pytorch_model(?:-\d+-of-\d+)?\.bin|pytorch_model\.bin\.index\.json"), "torch.plain"),
    Form(
        "torch",
        lambda candidate: candidate.matching(OPTIMIZER_FILE) and len({*MODEL_FILES} & {*candidate.names}) == 1,
        "torch.plain",
    ),
    Form("torch", _file(".bin.index.json"), "torch.plain"),
    Form(
        "numpy",
        _file(".npz", magic=b"PK\x03\x04"),
        refusal="is an archive of numpy.savez; save_checkpoint(PATH, dict(numpy.load(FILE))) makes a checkpoint of it",
    ),
    Form("torch", _file(magic=b"PK\x03\x04"), "torch.plain"),
    Form(
        "nemo",
        _file(".nemo"),
        refusal="is an archive of NeMo; unpack it (tar xf FILE), and open the folder model_weights or the file "
        "model_weights.ckpt in it",
    ),
    Form(
        "gguf",
        _file(magic=b"GGUF"),
        refusal="is a GGUF file, as used by llama.cpp, whose blocks of weights are not read; open the model that it "
        "was made from, or what save_pretrained of transformers writes after from_pretrained(FOLDER, gguf_file=NAME, "
        "quantization_config=GgufConfig(dequantize=True))",
    ),
    Form(
        "flax",
        _file(".msgpack"),
        refusal="is a file of Flax; save_checkpoint(PATH, flax.traverse_util.flatten_dict(flax.serialization."
        "msgpack_restore(Path(FILE).read_bytes()), sep='.')) makes a checkpoint of it",
    ),
    Form(
        "easylm",
        lambda candidate: re.match(r"streaming_(?:params|train_state)", candidate.path.name),
        refusal="is a stream of EasyLM's; save_checkpoint(PATH, {'.'.join(key): flax.serialization.from_bytes(None, "
        "value) for key, value in msgpack.Unpacker(open(FILE, 'rb'), max_buffer_size=0)}) makes a checkpoint of it",
    ),
    Form(
        "tensorflow",
        lambda candidate: (
            candidate.matching(_TENSORFLOW)
            or (not candidate.is_folder and re.fullmatch(_TENSORFLOW, candidate.path.name))
            or (
                candidate.path.name.endswith(".index")
                and _is_prefix(candidate.path.with_name(candidate.path.name[:-6]))
            )
        ),
        refusal=_BY_TENSORFLOW,
    ),
    Form(
        "paddle",
        lambda candidate: candidate.matching(r".*\.pdparams") or candidate.path.name.endswith(".pdparams"),
        refusal="is a checkpoint of PaddlePaddle; save_checkpoint(PATH, paddle.load(FILE, return_numpy=True)) makes a "
        "checkpoint of it, if the values are arrays; bfloat16 comes as uint16, which array.view(ml_dtypes.bfloat16) "
        "undoes",
    ),
    Form(
        "torch", lambda candidate: list(bare_ranks(candidate.names).values()) == ["consolidated.00.pth"], "torch.plain"
    ),
    Form(
        "files of ranks",
        lambda candidate: len(bare_ranks(candidate.names)) > 1,
        refusal=f"has a file for each rank; {BARE}",
    ),
    Form(
        "torch (before 1.6)",
        lambda candidate: (
            re.match(rb"\x80.\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.", candidate.head, re.DOTALL)
            # A tar archive, which may hold anything: PyTorch put an entry with one of these names first.
            or (
                candidate.head[257:262] == b"ustar"
                and re.match(rb"(?:sys_info|pickle|tensors|storages)\0", candidate.head)
            )
        ),
        refusal="is in the format that PyTorch wrote before 1.6, or without its zip format, a program that must "
        "be run; load and save it once with torch.save",
    ),
    Form("safetensors", lambda candidate: candidate.head[8:9] == b"{", "safetensors.form"),
    Form(
        "dcp-safetensors (not consolidated)",
        lambda candidate: "sharded" in candidate.names and Candidate(candidate.path / "sharded").matching(_SHARD),
        refusal="was to be consolidated by PyTorch, but was not; the shards in its folder sharded can be opened",
    ),
]


def _is_prefix(path: Location) -> bool:
    """Return whether a path is what the files of a checkpoint of TensorFlow begin with."""
    data = re.compile(re.escape(path.name) + r"\.data-\d+-of-\d+")
    return any(data.fullmatch(name) for name, _ in entries_of(path.parent))


def _is_universal(candidate: Candidate) -> bool:
    """Return whether a folder has a folder zero of folders of parameters."""
    if "zero" not in candidate.names or not (candidate.path / "zero").is_dir():
        return False
    inside = Candidate(candidate.path / "zero").names
    return "optimizer_state.pt" in inside or any(
        (candidate.path / "zero" / name / "fp32.pt").exists() for name in inside[:8]
    )


def _is_step(path: Location) -> bool:
    return any((path / name).exists() for name in ("_CHECKPOINT_METADATA", "commit_success.txt", "_METADATA"))


def open_checkpoint(
    path: str | os.PathLike[str] | Location,
    *,
    part: bool = False,
    padded: bool = False,
    parameter_names: Sequence[str] | None = None,
) -> StoredCheckpoint:
    """Open a checkpoint of any format: a mapping from names to stored tensors.

    Only indexes and headers are read. A tensor says its dtype, its shape, and which file holds which box of it;
    `read` copies any box of it, whatever the pieces are. No framework is imported, and nothing in a file is run.

    Args:
        path: A safetensors file or a folder of them in Hugging Face's format; a distributed checkpoint of PyTorch, also
            as safetensors; a folder of `model_world_size_W_rank_R.pt`, as trainers with FSDP write them; a `.pt` or
            `.bin` file of `torch.save`; a folder of DeepSpeed's, or a universal one; a Megatron `torch_dist`
            checkpoint; an Orbax checkpoint, or a folder of its steps, whose last one is opened; Keras' `.weights.h5`,
            alone or sharded. Also a URL that fsspec knows, such as `s3://bucket/model`, or an `ObjectPath`, which takes
            options.
        part: Whether one file of a checkpoint in several may be opened by itself. Its tensors are what is in that file;
            of those that are cut, the shapes are those of the parts.
        padded: Whether the tensors of ranks, in `model_world_size_W_rank_R.pt`, may be longer than what they hold of
            the whole: all as long as the first rank's. Their beginnings are read, and what follows is padding. It does
            not change how other checkpoints are opened.
        parameter_names: The names of the parameters of PyTorch's optimizers in the order of their numbers, where a file
            has numbers only, and the model beside does not settle which is which. In the program that made the
            optimizer they are `[names[p] for group in optimizer.param_groups for p in group["params"]]`, with
            `names = {p: name for name, p in model.named_parameters()}`.

    Raises:
        OSError: if a file cannot be opened or read.
        ParseError: if it is none of these, or one that cannot be read; if it is a part of a checkpoint, whose other
            files are missing, or that should be opened as a whole; if a file does not follow its format, or the pieces
            of a tensor leave a gap or overlap. Names the file and the tensor, or the byte.
        ImportError: if reading this format needs a library that is not installed.

    >>> import json, tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> header = json.dumps({"bias": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "model.safetensors")
    ...     data = np.arange(3, dtype="<f4").tobytes()
    ...     _ = file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    ...     with open_checkpoint(file) as checkpoint:
    ...         print(checkpoint["bias"], checkpoint.read("bias", (slice(1, 3),)))
    <StoredTensor 'bias': float32 (3,), 1 piece> [1. 2.]
    """
    form = known_form(location_of(path))
    with importing:
        module = import_module(f".{form.module}", __package__)
    how: dict[str, Any] = {}
    if part and form.module in _OF_ONE_FILE and not form.path.is_dir():
        how["part"] = True
    if is_true("padded", padded) and form.module == _OF_RANKS:
        how["padded"] = True
    if parameter_names is not None:
        check_items("parameter_names", parameter_names, str)
        of_files = form.module in ("torch.plain", _OF_RANKS)
        if not of_files and (form.module not in _OF_MODELS or not form.path.is_dir()):
            raise ParseError(
                f"{path}: parameter_names is given, but it has no optimizer of PyTorch whose parameters have numbers"
            )
    if form.module not in _OF_MODELS or not form.path.is_dir():
        if parameter_names is not None:
            how["parameter_names"] = parameter_names
        opened: StoredCheckpoint = module.open_form(form.path, **how)
        return opened
    with importing:
        from .torch.training import with_training_files
    return with_training_files(module.open_form(form.path, **how), form.path, parameter_names)


def _is_known(path: Location) -> bool:
    """Return whether a path is a folder of a format that can be read."""
    if not path.is_dir():
        return False
    candidate = Candidate(path)
    return any(form.module for form in islice((form for form in FORMS if form.knows(candidate)), 1))


def _file_inside(candidate: Candidate) -> tuple[str, str]:
    """The first file of a known format in a folder that is of none, and what can be done with it; or nothing."""
    for name in candidate.names[:_MOST_FOLDERS]:
        inner = Candidate(candidate.path / name)
        form = None if inner.is_folder else next((form for form in FORMS if form.knows(inner)), None)
        if form is not None:
            ends = name.rpartition(".")[2]
            alike = len(candidate.matching(rf".*\.{re.escape(ends)}")) if form.module else 1
            more = f", one of {alike} .{ends} files, of which nothing says what they are together" if alike > 1 else ""
            return name, f"can be opened by itself{more}" if form.module else form.refusal
    return "", ""


class _KnownForm(NamedTuple):
    """A path, and the module of this package that opens it."""

    path: Location
    module: str


def known_form(given: Location) -> _KnownForm:
    """Say which module opens a path, by names and first bytes only.

    Raises:
        OSError: if there is nothing.
        UnsupportedError: if it is of a format that cannot be read, or of none.
    """
    candidate = Candidate(given)
    if not given.exists():
        try:
            given.stat()
        except FileNotFoundError as error:
            if given.with_name(f"{given.name}.index").exists() and _is_prefix(given):
                raise UnsupportedError(f"{given}: {_BY_TENSORFLOW}") from None
            if isinstance(error.filename, str) and (hint := hub_hint(error.filename)):
                raise FileNotFoundError(error.errno, f"{error.strerror}{hint}", error.filename) from None
            raise
    refuse_other(given)
    for form in FORMS:
        if form.knows(candidate):
            if not form.module:
                raise UnsupportedError(f"{given}: {form.refusal}")
            return _KnownForm(given, form.module)
    if candidate.is_folder:
        names = ", ".join(candidate.names[:4])
        inside = next((name for name in candidate.names[:_MOST_FOLDERS] if _is_known(candidate.path / name)), None)
        if inside is not None:
            raise UnsupportedError(
                f"{given}: not a checkpoint itself; its folder {shown(inside)} is one, which can be opened"
            )
        steps = candidate.matching(r".*\.orbax-checkpoint-tmp.*")
        alone, said = ("", "") if steps else _file_inside(candidate)
        if alone:
            raise UnsupportedError(f"{given}: not a checkpoint of any known format; its file {shown(alone)} {said}")
        hint = "; it only has an interrupted save of Orbax" if steps else ""
        held = f"it holds {shown(names)}" if names else "the folder is empty"
        raise UnsupportedError(f"{given}: not a checkpoint of any known format; {held}{hint}")
    raise UnsupportedError(f"{given}: not a checkpoint of any known format; it is {kind_of(candidate.head)}")
