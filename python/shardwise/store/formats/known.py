"""Formats of checkpoints, recognised by names and first bytes: which module reads each, or why none does.

A format is one entry of `FORMS` and one module. The entries are tried in order, on names and first bytes only; the
first that recognises the path opens it. A known format that cannot be read is an entry too: its sentence says why,
and what to do instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from ..._text import shown
from ...errors import ParseError
from ..data.location import Location, hub_hint, refuse_other
from ..data.parts import (
    BARE,
    ENGINE_FILE,
    FSDP_FOLDER,
    MODEL_FILES,
    OPTIMIZER_FILE,
    RANK_FILE,
    REKEYED_FILE,
    WHOLE_FILE,
    bare_ranks,
)
from ..tensors.kinds import kind_of
from ..tensors.stored import UnsupportedError
from .candidate import Candidate, has_items, is_prefix, is_step, is_universal

__all__ = ["BY_LAYOUTS", "FORMS", "OPTIONS", "Form", "known_form", "no_optimizer"]

# So many names in a folder of no known format are looked at, whether they are folders of one.
_MOST_FOLDERS = 16


class Form(NamedTuple):
    """A format of checkpoints.

    Attributes:
        name: The value of `StoredCheckpoint.format`.
        knows: Returns whether a path has this format.
        module: The module of this package whose `open_form(path)` opens it, with `OPTIONS`; empty if it cannot be read.
        refusal: For a format without a module, the sentence that says why, and what to do instead.
    """

    name: str
    knows: Callable[[Candidate], object]
    module: str = ""
    refusal: str = ""


#: The arguments of `open_checkpoint` that a module's `open_form` takes besides the path. Modules not listed take none.
OPTIONS = {
    "by_rules": ("layouts",),
    "keras": ("part",),
    "safetensors.form": ("part", "parameter_names"),
    "torch.fsdp": ("padded", "parameter_names"),
    "torch.items": ("parameter_names",),
    "torch.plain": ("part", "parameter_names"),
    "torch.training": ("parameter_names",),
}


def _named(*names: str) -> Callable[[Candidate], object]:
    wanted = frozenset(names)
    return lambda candidate: not wanted.isdisjoint(candidate.names)


def _matching(pattern: str) -> Callable[[Candidate], object]:
    return lambda candidate: candidate.matching(pattern)


def _file(*suffixes: str, magic: bytes = b"") -> Callable[[Candidate], object]:
    return lambda candidate: (
        not candidate.is_folder and candidate.path.name.endswith(suffixes or "") and candidate.head.startswith(magic)
    )


#: The name of a file of PyTorch's `HuggingFaceStorageWriter`.
_SHARD = r"shard-\d+-model-\d+-of-\d+\.safetensors"
_STEP = r"(?:[A-Za-z][A-Za-z0-9]*_)?\d+"
#: The name of a data file of a checkpoint of TensorFlow, or of a SavedModel.
_TENSORFLOW = r".*\.data-\d+-of-\d+|saved_model\.pb"
_BY_TENSORFLOW = (
    "is a checkpoint of TensorFlow; after reader = tf.train.load_checkpoint(PREFIX), save_checkpoint(PATH, {name: "
    "reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if name != "
    "'_CHECKPOINTABLE_OBJECT_GRAPH'}) makes a checkpoint of it; the names of its files begin with PREFIX, which is "
    "variables/variables in a SavedModel"
)
#: Bare files of ranks. Nothing in them says how tensors are cut; they have this format if the caller gives layouts.
BY_LAYOUTS = Form("ranks by rules", lambda _: False, "by_rules")
#: The other formats, in the order in which they are tried.
FORMS: list[Form] = [
    Form(
        "orbax (unfinished)",
        lambda candidate: ".orbax-checkpoint-tmp" in candidate.path.name,
        refusal="is what an interrupted save of Orbax left behind; open the last complete step next to it",
    ),
    Form("megatron", _named("latest_checkpointed_iteration.txt"), "megatron.form"),
    Form("megatron", lambda candidate: {"metadata.json", "common.pt"} <= set(candidate.names), "megatron.form"),
    Form("dcp", _named(".metadata"), "torch.dcp"),
    Form("dcp", lambda candidate: candidate.path.name == ".metadata" and not candidate.is_folder, "torch.dcp"),
    Form(
        "dcp (without collectives)",
        _matching(r"__\d+\.metadata"),
        refusal="has one metadata file per rank, as written with use_collectives=False, and no common one; load it "
        "with torch.distributed.checkpoint on the same number of ranks, and save it once with use_collectives=True",
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
        "the parameters; put model_world_size_W_rank_R.pt, or pytorch_model_fsdp_0_rankR.bin, of all ranks there",
    ),
    Form(
        "fsdp2 (one file)",
        lambda candidate: (
            not candidate.is_folder
            and re.fullmatch(r".*(?:optim|extra_state)_world_size_\d+_rank_\d+\.pt", candidate.path.name)
        ),
        refusal="is one rank's part of an optimizer or of a run; open its folder, with the files of all ranks",
    ),
    Form(
        "fsdp1",
        _matching(r".*_fsdp(?:_\d+)?_rank_?\d+\.(?:bin|pt)"),
        refusal="holds the flat parameters of FSDP1, which do not describe the tensors in them; save it once with "
        "SHARDED_STATE_DICT or FULL_STATE_DICT",
    ),
    Form("torch_checkpointing", has_items, "torch.items"),
    Form(
        "universal",
        lambda candidate: "latest_universal" in candidate.names or is_universal(candidate),
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
        lambda candidate: any(is_step(candidate.path / name) for name in candidate.matching(_STEP)),
        "orbax.form",
    ),
    Form("ranks", lambda candidate: "shardwise.json" in candidate.names and candidate.matching(RANK_FILE), "sharded"),
    Form("vllm", lambda candidate: "shardwise.json" in candidate.names and candidate.matching(ENGINE_FILE), "sharded"),
    Form(
        "ranks (unfinished)",
        lambda candidate: "shardwise.json" not in candidate.names and candidate.matching(RANK_FILE),
        refusal="has files for ranks but no shardwise.json, which is written last: the run that made it, or "
        "the copy, was interrupted",
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
    Form(
        "torch",
        lambda candidate: (
            WHOLE_FILE in candidate.names
            and len(candidate.matching(r".*\.(?:pt|pth|bin)")) == 1 + len(candidate.matching(REKEYED_FILE))
        ),
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
        "was made from; or load it with from_pretrained(FOLDER, gguf_file=NAME, quantization_config="
        "GgufConfig(dequantize=True)) of transformers, and open what its save_pretrained writes",
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
                candidate.path.name.endswith(".index") and is_prefix(candidate.path.with_name(candidate.path.name[:-6]))
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
        refusal="is in the format of PyTorch before 1.6, or of torch.save without zip, which is a program that "
        "must be run; load and save it once with torch.save",
    ),
    Form("safetensors", lambda candidate: candidate.head[8:9] == b"{", "safetensors.form"),
    Form(
        "dcp-safetensors (not consolidated)",
        lambda candidate: "sharded" in candidate.names and Candidate(candidate.path / "sharded").matching(_SHARD),
        refusal="was to be consolidated by PyTorch, but was not; the shards in its folder 'sharded' can be opened",
    ),
]


def known_form(given: Location) -> Form:
    """Return the format of a path, judged by names and first bytes only.

    Raises:
        OSError: if nothing is there.
        UnsupportedError: if it is of a format that cannot be read, or of an unknown one.
    """
    candidate = Candidate(given)
    if not given.exists():
        try:
            given.stat()
        except FileNotFoundError as error:
            if given.with_name(f"{given.name}.index").exists() and is_prefix(given):
                raise UnsupportedError(f"{given}: {_BY_TENSORFLOW}") from None
            if isinstance(error.filename, str) and (hint := hub_hint(error.filename)):
                raise FileNotFoundError(error.errno, f"{error.strerror}{hint}", error.filename) from None
            raise
    refuse_other(given)
    for form in FORMS:
        if form.knows(candidate):
            if not form.module:
                raise UnsupportedError(f"{given}: {form.refusal}")
            return form
    if candidate.is_folder:
        names = ", ".join(candidate.names[:4])
        inside = next((name for name in candidate.names[:_MOST_FOLDERS] if _is_known(candidate.path / name)), None)
        if inside is not None:
            raise UnsupportedError(f"{given}: not a checkpoint itself; open its folder {shown(inside)}, which is one")
        steps = candidate.matching(r".*\.orbax-checkpoint-tmp.*")
        alone, said = ("", "") if steps else _file_inside(candidate)
        if alone:
            raise UnsupportedError(f"{given}: not a checkpoint of any known format; its file {shown(alone)} {said}")
        hint = "; it only has an interrupted save of Orbax" if steps else ""
        held = f"it holds {shown(names)}" if names else "the folder is empty"
        raise UnsupportedError(f"{given}: not a checkpoint of any known format; {held}{hint}")
    raise UnsupportedError(f"{given}: not a checkpoint of any known format; it is {kind_of(candidate.head)}")


def _is_known(path: Location) -> bool:
    """Return whether a path is a folder of a format that can be read."""
    if not path.is_dir():
        return False
    candidate = Candidate(path)
    return any(form.module for form in islice((form for form in FORMS if form.knows(candidate)), 1))


def _file_inside(candidate: Candidate) -> tuple[str, str]:
    """Return the first file of a known format in a folder of an unknown one, with advice; or an empty text."""
    for name in candidate.names[:_MOST_FOLDERS]:
        inner = Candidate(candidate.path / name)
        form = None if inner.is_folder else next((form for form in FORMS if form.knows(inner)), None)
        if form is not None:
            ends = name.rpartition(".")[2]
            alike = len(candidate.matching(rf".*\.{re.escape(ends)}")) if form.module else 1
            more = f", one of {alike} .{ends} files, and nothing says which belong together" if alike > 1 else ""
            return name, f"can be opened by itself{more}" if form.module else form.refusal
    return "", ""


def no_optimizer(path: object) -> ParseError:
    """Return the error for names of an optimizer's parameters that are given with a path that has no optimizer."""
    return ParseError(
        f"{path}: parameter_names is given, but it has no optimizer of PyTorch whose parameters have numbers"
    )
