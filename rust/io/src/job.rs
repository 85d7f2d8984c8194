//! The work of a job: tensors whose pieces lie in sources, and the pieces that destinations are to
//! hold.
//!
//! A piece is a box of its tensor, and where its elements are in its holder: the byte offset of the box's first element,
//! and the byte strides. A pair of a source piece and a destination piece that overlap is a copy; the engine finds the
//! pairs itself, so a job grows with the pieces and not with their product.
//!
//! Inside, a tensor of elements of `itemsize` bytes is one of bytes, with one dim more: so an element is nothing special,
//! be it a bit flag or a record of megabytes.

use std::{fs::File, path::PathBuf, sync::Arc};

use shardwise_core::{
    region::{Region, Regions},
    tiling::Poll,
};

use crate::{
    check::{BOXES, check_box, check_span, listed, problem_of_cover, short},
    error::{Error, Result, no_room},
    piece::{Piece, Pieces, Tensor},
};

pub use crate::piece::Wanted;

/// Numpy's limit; more is a mistake of the caller's.
const MAX_RANK: usize = 64;

/// A file to read.
#[derive(Debug, Clone, Default)]
pub struct SourceFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The size in bytes, as the caller found it when the job was made.
    pub size: i64,
    /// The time of the last write, in nanoseconds; none if the caller does not care.
    pub modified: Option<i64>,
    /// The time of the last change of any kind, in nanoseconds; none if the caller does not care.
    pub changed: Option<i64>,
    /// The file, if the caller has it open: then it is this one that is read, whatever has become of the path.
    pub file: Option<Arc<File>>,
}

/// Memory that is read or written: an array of the caller's.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    pub(crate) start: *mut u8,
    low: i64,
    high: i64,
}

// SAFETY: the contract of `Memory::new` makes the memory valid for as long as the job lives, from any thread.
unsafe impl Send for Memory {}
// SAFETY: as above; the engine never lets two threads write the same bytes.
unsafe impl Sync for Memory {}

impl Memory {
    /// Memory around `start`, from `low` bytes (0 or less) to `high` bytes (exclusive) of it.
    ///
    /// # Safety
    /// Bytes `start + low .. start + high` must be valid for reads, and for writes if a destination has them, while a
    /// job with them runs; nobody else may write them meanwhile, nor read them if a destination has them; and bytes that
    /// a destination's pieces name must not be bytes of anything else in the job.
    #[must_use]
    pub unsafe fn new(start: *mut u8, low: i64, high: i64) -> Self {
        Self { start, low, high }
    }

    /// The range of addresses: the first, and one past the last.
    pub(crate) fn addresses(&self) -> (i64, i64) {
        let start = self.start as i64;
        (start.saturating_add(self.low), start.saturating_add(self.high))
    }
}

/// A file that memory is mapped from ([`crate::maps`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedFile {
    /// The path of the file.
    pub path: PathBuf,
    /// One past the last byte of it that the memory has.
    pub end: i64,
    /// The size in bytes.
    pub size: i64,
    /// The times of the last write and of the last change of any kind, in nanoseconds; none if this process may write
    /// it through the memory.
    pub times: Option<(i64, i64)>,
}

/// A source of pieces.
#[derive(Debug, Clone)]
pub enum Source {
    /// A file.
    File(SourceFile),
    /// Memory.
    Memory(Memory),
    /// Memory that is that of a mapped file, which is read so that a file that is cut short meanwhile is an error.
    Mapped(Memory, MappedFile),
}

/// A destination of pieces.
#[derive(Debug, Clone)]
pub enum Destination {
    /// A file that is made, of this size in the end.
    File {
        /// The path of the file.
        path: PathBuf,
        /// The final size; what no piece covers stays zero.
        size: i64,
        /// True if it must be there already, in this size, and what no piece covers stays as it is:
        /// others write that.
        there: bool,
        /// The folder that it is in, if the caller has it open: then it is opened from there by its name, and no other
        /// part of the path is followed.
        folder: Option<Arc<File>>,
    },
    /// Memory.
    Memory(Memory),
    /// A file that is there and is compared with.
    Compared(SourceFile),
    /// Nowhere: the pieces are only digested, as if they were written to a file without an end.
    Nowhere,
}

/// Everything that is to be done in one run.
#[derive(Debug, Clone, Default)]
pub struct Job {
    pub(crate) sources: Vec<Source>,
    pub(crate) destinations: Vec<Destination>,
    pub(crate) tensors: Vec<Tensor>,
    pieces: usize,
}

impl Job {
    /// A job between these holders, without tensors.
    ///
    /// # Errors
    /// [`Error::Job`] for a negative size.
    pub fn new(sources: Vec<Source>, destinations: Vec<Destination>) -> Result<Self> {
        let sizes = sources.iter().filter_map(|source| match source {
            Source::File(file) => Some(file.size),
            Source::Memory(_) | Source::Mapped(..) => None,
        });
        let made = destinations.iter().filter_map(|destination| match destination {
            Destination::File { size, .. } => Some(*size),
            Destination::Compared(file) => Some(file.size),
            Destination::Memory(_) | Destination::Nowhere => None,
        });
        if let Some(size) = sizes.chain(made).find(|&size| size < 0) {
            return Err(Error::job(format!("a file's size is {size}; it must be at least 0")));
        }
        Ok(Self { sources, destinations, tensors: Vec::new(), pieces: 0 })
    }

    /// The number of destination pieces so far.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.pieces
    }

    /// Adds a tensor. `sources` and `destinations` are rows of its pieces: `[holder, offset, start…, stop…, strides…]`,
    /// offset and strides in bytes, holders by their position in the job. Elements that no source piece covers, and
    /// no destination piece needs, may be missing.
    ///
    /// # Errors
    /// [`Error::Job`], naming the tensor and the piece: for a number out of range, source pieces that overlap, destination
    /// pieces that the source pieces do not cover, and a checksum of a piece that is not one run; [`Error::Interrupted`] if
    /// `poll` says so.
    pub fn add(
        &mut self,
        itemsize: i64,
        shape: &[i64],
        sources: &[i64],
        destinations: &[i64],
        wanted: Wanted,
        poll: Poll<'_>,
    ) -> Result<()> {
        let number = self.tensors.len();
        let fail = |message: String| Err(Error::job(format!("tensors[{number}]: {message}")));
        let row = 2 + 3 * shape.len();
        if shape.len() > MAX_RANK {
            return fail(format!("has {} dims; at most {MAX_RANK} are possible", shape.len()));
        }
        if itemsize < 1 || shape.iter().any(|&size| size < 0) {
            return fail(format!(
                "shape is {} and itemsize is {itemsize}; sizes must be at least 0, and the itemsize at least 1",
                short(shape)
            ));
        }
        if !sources.len().is_multiple_of(row) || !destinations.len().is_multiple_of(row) {
            return fail(format!("its pieces are not rows of {row} numbers"));
        }
        let mut strides = vec![1; shape.len() + 1];
        let mut bytes = Some(itemsize);
        for dim in (0..shape.len()).rev() {
            // Of a shape without elements, nothing is ever computed from them.
            strides[dim] = bytes.unwrap_or(0);
            bytes = bytes.and_then(|bytes| bytes.checked_mul(shape[dim]));
        }
        if bytes.is_none() && !shape.contains(&0) {
            return fail(format!("shape {} of {itemsize} bytes each is over 2**63 - 1 bytes", short(shape)));
        }
        let sources = Pieces::with_bytes(sources, shape.len(), itemsize)?;
        let destinations = Pieces::with_bytes(destinations, shape.len(), itemsize)?;
        let mut shape = shape.to_vec();
        shape.push(itemsize);
        let first = self.pieces;
        let tensor = Tensor { shape, strides, itemsize, wanted, sources, destinations, first };
        self.check(&tensor).or_else(fail)?;
        if let Some(what) = problem_of_cover(&tensor, poll)? {
            return fail(what);
        }
        self.pieces += tensor.destinations.len();
        self.tensors.push(tensor);
        Ok(())
    }

    fn check(&self, tensor: &Tensor) -> std::result::Result<(), String> {
        for (index, piece) in tensor.sources.iter().enumerate() {
            check_box(tensor, &piece).map_err(|what| format!("source piece {index}: {what}"))?;
            let limits = self.sources.get(piece.holder).map(|source| match source {
                Source::File(file) => (0, file.size, true),
                Source::Memory(memory) | Source::Mapped(memory, _) => (memory.low, memory.high, false),
            });
            check_span(&piece, limits).map_err(|what| format!("source piece {index}: {what}"))?;
        }
        for (index, piece) in tensor.destinations.iter().enumerate() {
            let fail = |what: String| format!("destination piece {index}: {what}");
            check_box(tensor, &piece).map_err(fail)?;
            let limits = self.destinations.get(piece.holder).map(|destination| match destination {
                Destination::File { size, .. } => (0, *size, true),
                Destination::Compared(file) => (0, file.size, true),
                Destination::Memory(memory) => (memory.low, memory.high, false),
                Destination::Nowhere => (0, i64::MAX, true),
            });
            check_span(&piece, limits).map_err(fail)?;
            if piece.volume() > 0 && piece.overlaps_itself() {
                return Err(fail("its strides make elements overlap, so it cannot be written".to_owned()));
            }
            // What is compared may lie in any way; it has a CRC-32 if it is one run.
            let compared = matches!(self.destinations.get(piece.holder), Some(Destination::Compared(_)));
            if tensor.wanted.crc && !compared && !piece.is_one_run() {
                return Err(fail("is not one run of bytes, so it has no CRC-32".to_owned()));
            }
        }
        Ok(())
    }

    /// Checks what concerns all tensors together: that no byte is written twice.
    ///
    /// # Errors
    /// [`Error::Job`] naming the file and the pieces; [`Error::Interrupted`] if `poll` says so.
    pub fn check_destinations(&self, poll: Poll<'_>) -> Result<()> {
        let mut spans: Vec<(usize, i64, i64, usize, usize)> = Vec::new();
        spans.try_reserve_exact(self.pieces).map_err(no_room("the list of pieces"))?;
        for (number, tensor) in self.tensors.iter().enumerate() {
            for (index, piece) in tensor.destinations.iter().enumerate() {
                let written =
                    matches!(self.destinations[piece.holder], Destination::File { .. } | Destination::Memory(_));
                if let (true, Some((low, high))) = (written && piece.volume() > 0, piece.span()) {
                    spans.push((piece.holder, low, high, number, index));
                }
            }
        }
        spans.sort_unstable();
        let mut at = 0;
        while at < spans.len() {
            // A cluster: spans of one file that follow one another without a gap between them.
            let (holder, _, mut high, ..) = spans[at];
            let mut end = at + 1;
            while end < spans.len() && spans[end].0 == holder && spans[end].1 < high {
                high = high.max(spans[end].2);
                end += 1;
            }
            if end > at + 1 {
                self.check_cluster(&spans[at..end], poll)?;
            }
            at = end;
        }
        Ok(())
    }

    /// Pieces whose spans interleave are apart if they are disjoint boxes of one array: that of the tensor, or one in
    /// which they lie otherwise, as the parts of a dim that one device holds do.
    fn check_cluster(&self, spans: &[(usize, i64, i64, usize, usize)], poll: Poll<'_>) -> Result<()> {
        let piece = |at: usize| self.tensors[spans[at].3].destinations.get(spans[at].4);
        let first = piece(0);
        // The stride of a dim of one position says nothing.
        let other = (1..spans.len()).find(|&at| spans[at].3 != spans[0].3 || piece(at).strides != first.strides);
        let clash = match other {
            Some(at) => Some((at - 1, at)),
            None => {
                let is_tensor = (1..spans.len()).all(|at| piece(at).origin() == first.origin());
                let mut regions = Regions::new(first.region.rank());
                regions.reserve(spans.len()).map_err(no_room(BOXES))?;
                for at in 0..spans.len() {
                    let piece = piece(at);
                    let start = if is_tensor { piece.region.start().to_vec() } else { piece.steps_from(first.offset) };
                    let stop: Vec<i64> = start.iter().zip(piece.region.extents()).map(|(at, size)| at + size).collect();
                    regions.push(Region::new(&start, &stop)).map_err(no_room(BOXES))?;
                }
                // Boxes that are apart are bytes that are apart only if the array that holds them does not overlap itself.
                let mut around = regions.get(0).to_buf();
                regions.iter().for_each(|region| around.include(region));
                let whole = Piece { region: around.region(), ..first };
                match listed(regions.iter(), first.region.rank(), poll)? {
                    Err((a, b)) => Some((a as usize, b as usize)),
                    Ok(_) => whole.overlaps_itself().then_some((0, 1)),
                }
            }
        };
        let Some((a, b)) = clash else { return Ok(()) };
        let path = match &self.destinations[spans[0].0] {
            Destination::File { path, .. } => path.display().to_string(),
            _ => format!("destination {}", spans[0].0),
        };
        let name = |at: usize| format!("piece {} of tensors[{}]", spans[at].4, spans[at].3);
        Err(Error::job(format!("{path}: {} and {} would be written to the same bytes", name(a), name(b))))
    }

    /// The bytes that all destination pieces hold.
    ///
    /// # Errors
    /// [`Error::Job`] if they are over 2⁶³ − 1.
    pub fn bytes(&self) -> Result<i64> {
        let mut pieces = self.tensors.iter().flat_map(|tensor| tensor.destinations.iter());
        let total = pieces.try_fold(0_i64, |total, piece| total.checked_add(piece.volume()));
        total.ok_or_else(|| Error::job("the destination pieces are over 2**63 - 1 bytes in all"))
    }
}
