"""Objects of a store that several tasks make together: beginning their uploads, and joining the parts at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from ...._text import counted
from ...._threads import Threads
from ....errors import ParseError
from ...data.location import taken
from ...data.objects import ObjectPath
from .part_sizes import WINDOW, Limits
from .parts import names_of_uploads, upload_tag
from .place import Completion, NewCheckpoint
from .receipts import sealed_line
from .task import TaskReceipt
from .uploads import Multipart, put_object
from .whole_objects import ask_all, is_made, remove

__all__ = ["SharedObjects"]

#: The most bytes of remaining parts that are made in memory at a time.
_TOGETHER = 64 * 2**20

#: Markers in place of an upload's parts: the object is complete; and neither the object nor the upload exists.
_MADE: Mapping[int, tuple[int, str]] = {}
_GONE: Mapping[int, tuple[int, str]] = {}


class SharedObjects:
    """The objects of a checkpoint that several tasks make together.

    Args:
        new: The checkpoint.
        limits: The limits of the store on parts.
        root: The folder of the receipts.
        object_of: Returns the object of a file, by the file's number.
    """

    def __init__(
        self, new: NewCheckpoint, limits: Limits, root: ObjectPath, object_of: Callable[[int], ObjectPath]
    ) -> None:
        self._new, self._limits, self._root, self._object = new, limits, root, object_of
        #: True if all uploads are complete, so that there is none to abort.
        self._is_complete = False

    @property
    def uploads(self) -> ObjectPath:
        """Path of the list of multipart uploads."""
        return self._root / "uploads"

    def remainder(self, task: int) -> ObjectPath:
        """Return the path of the object for bytes of a task that are shorter than the least part."""
        return self._root / f"{task}.remainder"

    def begin(self, *, are_checked: bool) -> None:
        """Begin an upload for each file, unless another process has; if `are_checked`, begin again those that are gone.

        Raises:
            FileExistsError: if there is an object that no upload has made.
        """
        numbers = range(len(self._new.files))
        try:
            names = self._names()
        except FileNotFoundError:
            for number, is_there in enumerate(ask_all(lambda number: self._object(number).is_file(), numbers)):
                if is_there:
                    raise taken(self._object(number)) from None
            uploads = [self._upload(number) for number in numbers]
            try:
                names = list(ask_all(Multipart.begin, uploads))
            except BaseException:  # Nobody else knows of those that were begun.
                list(ask_all(Multipart.abort, [upload for upload in uploads if upload.name]))
                raise
            try:
                put_object(self.uploads, sealed_line([self._new.digest, names]), is_new=True)
            except FileExistsError:  # Another was faster.
                list(ask_all(Multipart.abort, uploads))
                self._names()
            return
        parts = ask_all(self._parts, list(zip(numbers, names, strict=True))) if are_checked else ()
        gone = [number for number, there in enumerate(parts) if there is _GONE]
        for number in gone:
            names[number] = self._upload(number).begin()
        if gone:
            put_object(self.uploads, sealed_line([self._new.digest, names]), is_new=False)

    def still_there(self, receipts: Sequence[TaskReceipt]) -> Iterator[TaskReceipt]:
        """Yield those receipts whose parts the store still has."""
        files = sorted({file for receipt in receipts for file, *_ in receipt.shares})
        names: Sequence[str] = [""] * len(self._new.files)
        with suppress(FileNotFoundError):  # Else another process has committed the plan, or given it up.
            names = self._names()
        parts = dict(zip(files, ask_all(self._parts, [(file, names[file]) for file in files]), strict=True))
        are_there = ask_all(lambda receipt: self._is_there(receipt, parts), receipts)
        yield from (receipt for receipt, is_there in zip(receipts, are_there, strict=True) if is_there)

    def _is_there(self, receipt: TaskReceipt, parts: Mapping[int, Mapping[int, tuple[int, str]]]) -> bool:
        """Return whether the store still has all parts, and the remainder, that a receipt names."""
        for file, begin, end, etag in receipt.shares:
            there = parts[file]
            number = self._limits.part_number(self._new.sizes[file], begin)
            if there is _MADE:
                continue
            if etag and there.get(number) != (end - begin, etag):
                return False
            if not etag and not is_made(self.remainder(receipt.task), receipt.uploaded):
                return False
        return True

    def put_together(self, completion: Completion) -> None:
        """Complete all objects from the parts that tasks have uploaded and the bytes between them."""
        numbers = range(len(self._new.files))
        left = [number for number in numbers if not self._upload(number).is_made()]
        if not left:
            return
        try:
            names = self._names()
        except FileNotFoundError:
            if not all(self._upload(number).is_made() for number in left):
                raise
            return  # Another process was faster.
        held: dict[int, list[tuple[int, int, str, int, int]]] = {number: [] for number in left}
        for task, shares in completion.shares.items():
            at = 0
            for file, begin, end, etag in shares:
                if file in held:
                    held[file].append((begin, end, etag, task, at))
                at += 0 if etag else end - begin
        headers = {number: list(completion.headers(number)) for number in left}
        pieces = {number: self._pieces(number, held[number], headers[number]) for number in left}

        def make(number: int) -> None:
            try:
                self._complete(number, names[number], pieces[number], completion)
            except (FileNotFoundError, ParseError):
                if not self._upload(number).is_made():  # By another process, meanwhile.
                    raise

        most = 2 * max(self._limits.least_shared(self._new.sizes[number]) for number in left)
        with Threads(max(1, min(WINDOW, _TOGETHER // most)), "shardwise-join") as pool:
            list(pool.map(make, left))

    def _pieces(
        self, number: int, held: Iterable[tuple[int, int, str, int, int]], headers: Iterable[tuple[int, bytes]]
    ) -> list[_ObjectPart]:
        """Return the pieces of an object in order, without gaps.

        Raises:
            ParseError: if they do not cover the object.
        """
        found = [_ObjectPart(*each, b"") for each in held]
        found += [_ObjectPart(at, at + len(text), "", -1, 0, text) for at, text in headers if text]
        found.sort(key=lambda each: (each.begin, each.task < 0))
        end, joined = 0, []
        for each in found:
            if each.end <= end and each.task < 0:
                continue  # It is in a part already.
            if each.begin != end:
                break
            joined.append(each)
            end = each.end
        if end != self._new.sizes[number] or len({each.begin for each in joined}) != len(joined):
            raise ParseError(
                f"{self._object(number)}: according to the receipts of the tasks, nothing was written from byte {end} "
                "on"
            )
        return joined

    def _complete(self, number: int, name: str, pieces: Sequence[_ObjectPart], completion: Completion) -> None:
        """Upload the parts of an object that no task could make alone, and complete the object."""
        size, upload = self._new.sizes[number], self._upload(number, name)
        least = self._limits.least_shared(size)
        etags = {self._limits.part_number(size, each.begin): each.etag for each in pieces if each.etag}
        for begin, end in _gaps(pieces):
            # Of at least so many bytes each, and less than twice as many.
            count = max((end - begin) // least, 1)
            edges = [begin + (end - begin) * part // count for part in range(count + 1)]
            for first, last in pairwise(edges):
                data = bytearray()
                for each in pieces:
                    at = first + len(data)
                    if at < last and each.begin <= at < each.end:
                        data += self._remainder_of(each, at, min(each.end, last), completion)
                number = self._limits.part_number(size, first)
                etags[number] = upload.put(number, data)
        upload.complete(etags, is_new=True)

    def _remainder_of(self, piece: _ObjectPart, begin: int, end: int, completion: Completion) -> bytes:
        """Return bytes of an object that no uploaded part covers yet: from a text, or from a task's remainder."""
        if piece.task < 0:
            return piece.text[begin - piece.begin : end - piece.begin]
        there = self.remainder(piece.task)
        if not is_made(there, completion.uploaded.get(piece.task)):
            raise ParseError(f"{there}: is not what the receipt of task {piece.task} says; run that task again")
        at = piece.at + begin - piece.begin
        return there.read(at, at + end - begin, completion.uploaded[piece.task][1])

    def forget(self) -> None:
        """Abort the uploads that are not complete, and remove the remainders."""
        with suppress(OSError, ParseError):
            names = [] if self._is_complete else self._names()
            list(ask_all(lambda number: self._upload(number, names[number]).abort(), range(len(names))))
        tasks = sorted({task for task in range(len(self._new.tasks)) if self._has_remainder(task)})
        list(ask_all(lambda task: remove(self.remainder(task)), tasks))
        remove(self.uploads)

    def _has_remainder(self, task: int) -> bool:
        return any(share.part > share.begin for share in self._new.shares(task))

    def _names(self) -> list[str]:
        names = names_of_uploads(self.uploads, self._new.digest)
        if len(names) != len(self._new.files):
            raise ParseError(
                f"{self.uploads}: the list of uploads has {counted(len(names), 'entry', 'entries')} for "
                f"{counted(len(self._new.files), 'file')}"
            )
        return names

    def _upload(self, number: int, name: str = "") -> Multipart:
        return Multipart(self._object(number), upload_tag(self._new.digest, number), name)

    def _parts(self, upload: tuple[int, str]) -> Mapping[int, tuple[int, str]]:
        """Return the uploaded parts of an object, as size and ETag by the part's number.

        `_MADE` stands for an object that is complete, `_GONE` for one that is not there, nor its upload.

        Args:
            upload: The file's number, and the store's name of the upload.
        """
        found = self._upload(*upload).parts() if upload[1] else None
        if found is not None:
            return found
        return _MADE if self._upload(upload[0]).is_made() else _GONE


class _ObjectPart(NamedTuple):
    """A piece of an object: an uploaded part, bytes of a task's remainder, or a text between tensors."""

    begin: int
    end: int
    #: The ETag of the part; empty if the piece is not in a part yet.
    etag: str
    #: The number of the task; -1 for a text.
    task: int
    #: The first byte in the task's remainder, for a piece that is not in a part.
    at: int
    text: bytes


def _gaps(pieces: Sequence[_ObjectPart]) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of the object that no uploaded part covers yet; neighbouring ranges are joined."""
    begin = end = 0
    for each in pieces:
        if each.etag:
            if begin < end:
                yield begin, end
            begin = end = each.end
        else:
            end = each.end
    if begin < end:
        yield begin, end
