//! Slots: where the parts of destination pieces are put together, digested, and taken from.

use shardwise_core::{
    region::{Region, RegionBuf},
    short,
};

use crate::{
    digest::Digest,
    piece::Tensor,
    strided::{Dim, Pointer, collapsed, positions},
};

/// The digests of the destination pieces that a unit wrote to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Finding {
    /// The piece, by its number among all.
    pub(crate) piece: u64,
    /// The digest of what was written, in the tensor.
    pub(crate) digest: u128,
    /// The contribution to the piece's CRC-32.
    pub(crate) crc: u32,
    /// The first byte of the tensor, in C order, that the compared file has otherwise; -1 if there is none.
    pub(crate) differs: i64,
}

/// The runs of a box between two memories: the length of each, and the dims over which they are.
pub(crate) struct BoxRuns {
    pub(crate) dims: Vec<Dim>,
    pub(crate) run: i64,
}

impl BoxRuns {
    /// The runs of a box between memories with these strides.
    pub(crate) fn between(bounds: Region<'_>, from: &[i64], to: &[i64]) -> Self {
        let dims = (0..bounds.rank()).map(|dim| Dim { extent: bounds.extent(dim), from: from[dim], to: to[dim] });
        let (dims, run) = collapsed(dims);
        Self { dims, run }
    }

    /// True if the runs are all of a block of this length, one after the other.
    pub(crate) fn fills(&self, length: i64) -> bool {
        let mut bytes = self.run;
        for dim in self.dims.iter().rev() {
            if dim.from != bytes {
                return false;
            }
            bytes *= dim.extent;
        }
        bytes == length
    }
}

/// The memory in which one destination piece's part of a tile is put together.
pub(crate) struct Slot<'t> {
    pub(crate) tensor: &'t Tensor,
    pub(crate) piece: usize,
    pub(crate) bounds: RegionBuf,
    pub(crate) strides: Vec<i64>,
    pub(crate) start: Pointer,
    /// True if it is the memory of a source, which is only read.
    pub(crate) is_source: bool,
}

impl Slot<'_> {
    /// The address of the element at `position` of the tensor, which is in the slot.
    pub(crate) fn at(&self, position: &[i64]) -> Pointer {
        let steps = position.iter().zip(self.bounds.region().start()).zip(&self.strides);
        self.start.offset(steps.map(|((position, start), stride)| (position - start) * stride).sum())
    }

    /// The byte of the tensor, in C order, that byte `index` of a dense slot is.
    pub(crate) fn position(&self, index: i64) -> i64 {
        let bounds = self.bounds.region();
        let mut dims: Vec<usize> = (0..self.strides.len()).filter(|&dim| bounds.extent(dim) > 1).collect();
        short::sort_by_key(&mut dims, |&dim| std::cmp::Reverse(self.strides[dim]));
        let mut rest = index;
        let mut at = bounds.offset(&self.tensor.strides);
        for dim in dims {
            at += rest / self.strides[dim] * self.tensor.strides[dim];
            rest %= self.strides[dim];
        }
        at
    }

    pub(crate) fn nothing(&self) -> Finding {
        Finding { piece: (self.tensor.first + self.piece) as u64, digest: 0, crc: 0, differs: -1 }
    }

    /// The runs of the file that a dense slot is: byte of the file, bytes, and where they are in memory.
    pub(crate) fn file_runs(&self, mut each: impl FnMut(i64, i64, Pointer)) {
        let (piece, bounds) = (self.tensor.destinations.get(self.piece), self.bounds.region());
        let BoxRuns { dims, run } = BoxRuns::between(bounds, piece.strides, &self.strides);
        let first = piece.at(bounds.start());
        positions(&dims, |offset, to| each(first + offset, run, self.start.offset(to)));
    }

    pub(crate) fn checksums(&self) -> Finding {
        let mut finding = self.nothing();
        if self.tensor.wanted.digest {
            let bounds = self.bounds.region();
            let BoxRuns { dims, run } = BoxRuns::between(bounds, &self.tensor.strides, &self.strides);
            let first = bounds.offset(&self.tensor.strides);
            let mut digest = Digest::default();
            positions(&dims, |position, to| {
                // SAFETY: a run of the slot, which has just been put together, or of a source; nobody writes it now.
                digest.add(first + position, unsafe { self.start.offset(to).slice(run) });
            });
            finding.digest = digest.value();
        }
        let piece = self.tensor.destinations.get(self.piece);
        if self.tensor.wanted.crc && piece.is_one_run() {
            let whole = piece.volume();
            self.file_runs(|offset, length, from| {
                // SAFETY: as above.
                let crc = crc32fast::hash(unsafe { from.slice(length) });
                finding.crc ^= crc_before(crc, (whole - (offset - piece.offset) - length) as u64);
            });
        }
        finding
    }
}

/// The contribution of bytes with this CRC-32 to the CRC-32 of a text in which `after` more bytes
/// follow them: contributions are combined with exclusive or, in any order, since the CRC is
/// linear.
#[must_use]
pub fn crc_before(crc: u32, after: u64) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.combine(&crc32fast::Hasher::new_with_initial_len(0, after));
    hasher.finalize()
}
