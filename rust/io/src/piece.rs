//! Tensors, and their pieces: boxes, and where their elements are.

use crate::{
    boxes::volume,
    error::{Error, Result},
};

/// A piece: one row of numbers, `[holder, offset, start…, stop…, strides…]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece<'a> {
    pub(crate) holder: usize,
    /// The byte in its holder where the box's first element begins.
    pub(crate) offset: i64,
    pub(crate) start: &'a [i64],
    pub(crate) stop: &'a [i64],
    pub(crate) strides: &'a [i64],
}

impl Piece<'_> {
    pub(crate) fn volume(&self) -> i64 {
        volume(self.start, self.stop)
    }

    /// The byte in its holder of the element at `position`; within the piece, so it was checked.
    pub(crate) fn at(&self, position: &[i64]) -> i64 {
        let steps = position.iter().zip(self.start).zip(self.strides);
        steps.fold(self.offset, |at, ((position, start), stride)| at + (position - start) * stride)
    }

    /// The bytes of the holder from the piece's first to one past its last; none if it is empty or beyond 64 bits.
    pub(crate) fn span(&self) -> Option<(i64, i64)> {
        let (mut low, mut high) = (self.offset, self.offset.checked_add(1)?);
        for ((start, stop), stride) in self.start.iter().zip(self.stop).zip(self.strides) {
            let reach = (stop - start - 1).checked_mul(*stride)?;
            low = low.checked_add(reach.min(0))?;
            high = high.checked_add(reach.max(0))?;
        }
        Some((low, high))
    }

    /// Where element 0 of the tensor would be: pieces of one array agree in it.
    pub(crate) fn origin(&self) -> i128 {
        let steps = self.start.iter().zip(self.strides);
        steps.fold(i128::from(self.offset), |at, (&start, &stride)| at - i128::from(start) * i128::from(stride))
    }

    /// Whether two elements may share a byte: whether a stride is within the reach of the smaller ones.
    pub(crate) fn overlaps_itself(&self) -> bool {
        let extents = self.start.iter().zip(self.stop).map(|(start, stop)| stop - start);
        let mut dims: Vec<(i128, i128)> = (extents.zip(self.strides).filter(|(extent, _)| *extent > 1))
            .map(|(extent, stride)| (i128::from(*stride).abs(), i128::from(extent)))
            .collect();
        dims.sort_unstable();
        let mut reach = 1;
        dims.into_iter().any(|(stride, extent)| {
            let within = stride < reach;
            reach += stride * (extent - 1);
            within
        })
    }
}

/// Pieces of one tensor.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pieces {
    rows: Vec<i64>,
    rank: usize,
}

impl Pieces {
    pub(crate) fn len(&self) -> usize {
        self.rows.len() / (2 + 3 * self.rank)
    }

    pub(crate) fn get(&self, index: usize) -> Piece<'_> {
        let row = &self.rows[index * (2 + 3 * self.rank)..][..2 + 3 * self.rank];
        let (head, boxes) = row.split_at(2);
        let (start, rest) = boxes.split_at(self.rank);
        let (stop, strides) = rest.split_at(self.rank);
        Piece { holder: head[0] as usize, offset: head[1], start, stop, strides }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Piece<'_>> {
        (0..self.len()).map(|index| self.get(index))
    }

    /// The rows with a last dim for the bytes of an element.
    pub(crate) fn with_bytes(rows: &[i64], rank: usize, itemsize: i64) -> Result<Self> {
        let count = rows.len() / (2 + 3 * rank);
        let mut bytes = Vec::new();
        let needed = count.checked_mul(5 + 3 * rank);
        let reserved = needed.map(|needed| bytes.try_reserve_exact(needed));
        if !matches!(reserved, Some(Ok(()))) {
            return Err(Error::Memory { what: "the list of pieces" });
        }
        for row in rows.chunks_exact(2 + 3 * rank) {
            bytes.extend_from_slice(&row[..2 + rank]);
            bytes.push(0);
            bytes.extend_from_slice(&row[2 + rank..2 + 2 * rank]);
            bytes.push(itemsize);
            bytes.extend_from_slice(&row[2 + 2 * rank..]);
            bytes.push(1);
        }
        Ok(Self { rows: bytes, rank: rank + 1 })
    }
}

/// What to compute of a tensor on the way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The digest of each destination piece ([`crate::digest`]).
    pub digest: bool,
    /// The CRC-32 of each destination piece's bytes in its file, which must be one run.
    pub crc: bool,
}

/// One tensor.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) shape: Vec<i64>,
    /// The bytes from element to element in C order.
    pub(crate) strides: Vec<i64>,
    pub(crate) itemsize: i64,
    pub(crate) wanted: Wanted,
    pub(crate) sources: Pieces,
    pub(crate) destinations: Pieces,
    /// The number of its first destination piece among all.
    pub(crate) first: usize,
}
