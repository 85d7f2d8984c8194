//! Ranges of the flattened tensor, each the 1-D array of a holder: FSDP's flat parameters, ZeRO's partitions.

use crate::{
    error::{Error, Result},
    region::boxes_of_range,
    room,
    tiling::{Piece, Place, Poll, STEPS_PER_POLL, Tiling, checked_holder, checked_shape},
};

/// For each holder the elements `[start, stop)` of the tensor in C order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FlatRanges {
    shape: Vec<i64>,
    size: i64,
    ranges: Vec<(i64, i64)>,
    replicas: bool,
}

impl FlatRanges {
    /// The ranges of a tensor of `shape`, one for each holder; empty ones are allowed.
    ///
    /// # Errors
    /// [`Error::NegativeDim`], [`Error::Overflow`]; [`Error::FlatRange`] for a range that is not within the tensor;
    /// [`Error::TooMany`] if memory cannot hold them.
    pub fn new(shape: &[i64], ranges: impl ExactSizeIterator<Item = (i64, i64)>, replicas: bool) -> Result<Self> {
        let size = checked_shape(shape)?;
        let mut kept = room::list(ranges.len(), "the ranges")?;
        kept.extend(ranges);
        let wrong = |&(_, &(start, stop)): &(usize, &(i64, i64))| start < 0 || start > stop || stop > size;
        if let Some((holder, &(start, stop))) = kept.iter().enumerate().find(wrong) {
            return Err(Error::FlatRange { holder, start, stop, size });
        }
        Ok(Self { shape: shape.to_vec(), size, ranges: kept, replicas })
    }

    /// The error that names the first box of a range of the flattened tensor.
    fn first_box(&self, range: (i64, i64), error: impl Fn(Vec<i64>, Vec<i64>) -> Error) -> Error {
        let mut first = None;
        let done = boxes_of_range(range, &self.shape, &mut |region, _| {
            first.get_or_insert_with(|| (region.start().to_vec(), region.stop().to_vec()));
            Ok(())
        });
        let (start, stop) = first.unwrap_or_default();
        done.err().unwrap_or_else(|| error(start, stop))
    }
}

impl Tiling for FlatRanges {
    fn shape(&self) -> &[i64] {
        &self.shape
    }

    fn holders(&self) -> i64 {
        self.ranges.len() as i64
    }

    fn array_shape(&self, holder: i64) -> Result<Vec<i64>> {
        let (start, stop) = self.ranges[checked_holder(holder, self.holders())? as usize];
        Ok(vec![stop - start])
    }

    fn visit_pieces(&self, holder: i64, visit: &mut dyn FnMut(Piece<'_>) -> Result<()>) -> Result<()> {
        let range = self.ranges[checked_holder(holder, self.holders())? as usize];
        boxes_of_range(range, &self.shape, &mut |region, offset| {
            visit(Piece { region, place: Place::Flat(offset - range.0) })
        })
    }

    fn has_replicas(&self) -> bool {
        self.replicas
    }

    fn check(&self, poll: Poll<'_>) -> Result<()> {
        let mut order: Vec<usize> = room::list(self.ranges.len(), "the ranges")?;
        order.extend((0..self.ranges.len()).filter(|&i| self.ranges[i].0 < self.ranges[i].1));
        order.sort_unstable_by_key(|&i| (self.ranges[i], i));
        let mut last: Option<usize> = None;
        let mut at = 0;
        for (turn, &holder) in order.iter().enumerate() {
            if turn % STEPS_PER_POLL == 0 {
                poll()?;
            }
            let (start, stop) = self.ranges[holder];
            if let Some(before) = last.filter(|_| start < at) {
                if self.replicas && self.ranges[before] == (start, stop) {
                    continue;
                }
                return Err(self.first_box((start, stop.min(at)), |start, stop| {
                    let (first, second) = (before.min(holder) as i64, before.max(holder) as i64);
                    Error::BoxesOverlap { first, second, start, stop }
                }));
            }
            if start > at {
                return Err(self.first_box((at, start), |start, stop| Error::BoxMissing { start, stop }));
            }
            (last, at) = (Some(holder), stop);
        }
        if at < self.size {
            return Err(self.first_box((at, self.size), |start, stop| Error::BoxMissing { start, stop }));
        }
        Ok(())
    }
}
