//! Tensors, and their pieces: boxes, and where their elements are.

use shardwise_core::{
    index::radix,
    region::{Region, Regions},
    short,
};

use crate::error::{Result, no_room};

/// A piece: a box, and where its elements are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece<'a> {
    pub(crate) holder: usize,
    /// The byte in its holder where the box's first element begins.
    pub(crate) offset: i64,
    pub(crate) region: Region<'a>,
    pub(crate) strides: &'a [i64],
}

impl Piece<'_> {
    pub(crate) fn volume(&self) -> i64 {
        self.region.volume()
    }

    /// The byte in its holder of the element at `position`; within the piece, so it was checked.
    pub(crate) fn at(&self, position: &[i64]) -> i64 {
        let steps = position.iter().zip(self.region.start()).zip(self.strides);
        steps.fold(self.offset, |at, ((position, start), stride)| at + (position - start) * stride)
    }

    /// The bytes of the holder from the piece's first to one past its last; none if it is empty or beyond 64 bits.
    pub(crate) fn span(&self) -> Option<(i64, i64)> {
        let (mut low, mut high) = (self.offset, self.offset.checked_add(1)?);
        for (extent, stride) in self.region.extents().zip(self.strides) {
            let reach = (extent - 1).checked_mul(*stride)?;
            low = low.checked_add(reach.min(0))?;
            high = high.checked_add(reach.max(0))?;
        }
        Some((low, high))
    }

    /// True if its bytes follow one another in C order in its holder.
    pub(crate) fn is_one_run(&self) -> bool {
        let mut bytes = 1;
        for (extent, &stride) in self.region.extents().zip(self.strides).rev() {
            if extent > 1 && stride != bytes {
                return false;
            }
            bytes *= extent.max(1);
        }
        true
    }

    /// The offset of element 0 of the tensor, if it were there: pieces of one array agree in it.
    pub(crate) fn origin(&self) -> i128 {
        let steps = self.region.start().iter().zip(self.strides);
        steps.fold(i128::from(self.offset), |at, (&start, &stride)| at - i128::from(start) * i128::from(stride))
    }

    /// The numbers of steps of each stride, the longest first, that lead from a byte of the holder
    /// to the piece's first; those of the shortest one, which is that of bytes, lead over the rest.
    pub(crate) fn steps_from(&self, byte: i64) -> Vec<i64> {
        let mut dims: Vec<usize> = (0..self.strides.len()).filter(|&dim| self.strides[dim] != 0).collect();
        short::sort_by_key(&mut dims, |&dim| std::cmp::Reverse(self.strides[dim].unsigned_abs()));
        let (mut rest, mut steps) = (self.offset - byte, vec![0; self.strides.len()]);
        for dim in dims {
            steps[dim] = rest.div_euclid(self.strides[dim]);
            rest = rest.rem_euclid(self.strides[dim]);
        }
        steps
    }

    /// True if two elements may share a byte.
    pub(crate) fn overlaps_itself(&self) -> bool {
        radix::overlaps_itself(1, self.region.extents().zip(self.strides.iter().copied()))
    }
}

/// Pieces of one tensor.
#[derive(Debug, Clone)]
pub(crate) struct Pieces {
    /// Holder and offset of each.
    places: Vec<(usize, i64)>,
    regions: Regions,
    /// The strides of all, piece by piece.
    strides: Vec<i64>,
}

impl Pieces {
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn get(&self, index: usize) -> Piece<'_> {
        let ((holder, offset), rank) = (self.places[index], self.regions.rank());
        Piece { holder, offset, region: self.regions.get(index), strides: &self.strides[index * rank..][..rank] }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Piece<'_>> {
        (0..self.len()).map(|index| self.get(index))
    }

    pub(crate) fn regions(&self) -> &Regions {
        &self.regions
    }

    /// The pieces of `rows`, `[holder, offset, start…, stop…, strides…]` each, with a last dim for the bytes of an element.
    pub(crate) fn with_bytes(rows: &[i64], rank: usize, itemsize: i64) -> Result<Self> {
        let what = "the list of pieces";
        let width = 2 + 3 * rank;
        let count = rows.len() / width;
        let (mut places, mut regions, mut strides) = (Vec::new(), Regions::new(rank + 1), Vec::new());
        places.try_reserve_exact(count).map_err(no_room(what))?;
        regions.reserve(count).map_err(no_room(what))?;
        strides.try_reserve_exact(count.saturating_mul(rank + 1)).map_err(no_room(what))?;
        let (mut start, mut stop) = (vec![0; rank + 1], vec![itemsize; rank + 1]);
        for row in rows.chunks_exact(width) {
            let (place, rest) = row.split_at(2);
            let (corners, steps) = rest.split_at(2 * rank);
            let region = Region::of_row(corners);
            start[..rank].copy_from_slice(region.start());
            stop[..rank].copy_from_slice(region.stop());
            places.push((place[0] as usize, place[1]));
            regions.push(Region::new(&start, &stop)).map_err(no_room(what))?;
            strides.extend_from_slice(steps);
            strides.push(1);
        }
        Ok(Self { places, regions, strides })
    }
}

/// The digests to compute of a tensor on the way.
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
