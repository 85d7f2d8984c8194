//! The contiguous runs of a device of a packed partition.

use crate::{
    error::{Error, Result},
    packed::Packed,
    parallel::{self, Poll},
    radix, room,
    sections::part::Interval,
};

/// The list that there may be no room for here.
const RUNS: &str = "the runs of packed shards";

/// The runs of one device in the C-order global array, as few and as long as they can be, in increasing order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedRuns {
    /// For each outer dim, the offsets of the positions that are held, major first.
    outer: Vec<Vec<i64>>,
    /// The runs of each of their products, as (offset, length).
    inner: Vec<(i64, i64)>,
    /// All runs, where those of neighbouring rows meet; the other two are empty then.
    joined: Vec<(i64, i64)>,
}

impl PackedRuns {
    /// The runs of `device`.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device, [`Error::TooMany`] if there is no memory for them.
    pub fn of(packed: &Packed, device: i64) -> Result<Self> {
        let dims: Vec<Vec<(i64, i64)>> = packed.intervals(device)?.iter().map(|dim| meeting(dim)).collect();
        let none = Self { outer: Vec::new(), inner: Vec::new(), joined: Vec::new() };
        if dims.iter().any(Vec::is_empty) {
            return Ok(none);
        }
        let (shape, strides) = (packed.shape(), packed.strides());
        // The trailing dims that are held whole are contiguous.
        let whole = (0..shape.len()).rev().take_while(|&dim| dims[dim] == [(0, shape[dim])]).count();
        let Some(last) = (shape.len() - whole).checked_sub(1) else {
            return Ok(Self { inner: vec![(0, packed.size())], ..none });
        };
        let stride = strides[last];
        let inner: Vec<(i64, i64)> =
            dims[last].iter().map(|&(start, stop)| (start * stride, (stop - start) * stride)).collect();
        let mut outer = Vec::with_capacity(last);
        for dim in 0..last {
            let count: i64 = dims[dim].iter().map(|(start, stop)| stop - start).sum();
            let mut offsets = room::list(count, RUNS)?;
            offsets.extend(dims[dim].iter().flat_map(|&(start, stop)| start..stop).map(|at| at * strides[dim]));
            outer.push(offsets);
        }
        let meets = dims[last][0].0 == 0 && dims[last].last().is_some_and(|&(_, stop)| stop == shape[last]);
        let runs = Self { outer, inner, joined: Vec::new() };
        if !meets || last == 0 {
            return Ok(runs);
        }
        let mut joined: Vec<(i64, i64)> = room::list(runs.listed(), RUNS)?;
        let mut all = room::list(runs.listed().saturating_mul(2), RUNS)?;
        all.resize(2 * runs.listed() as usize, 0);
        runs.fill_into(&mut all, &mut parallel::never)?;
        for run in all.chunks_exact(2) {
            match joined.last_mut() {
                Some((start, length)) if *start + *length == run[0] => *length += run[1],
                _ => joined.push((run[0], run[1])),
            }
        }
        Ok(Self { joined, ..none })
    }

    /// The number of runs, those of each row by themselves.
    fn listed(&self) -> i64 {
        self.outer.iter().fold(self.inner.len() as i64, |count, offsets| count.saturating_mul(offsets.len() as i64))
    }

    /// The number of runs.
    #[must_use]
    pub fn count(&self) -> i64 {
        if self.joined.is_empty() { self.listed() } else { self.joined.len() as i64 }
    }

    /// Fills `out`, of (runs, 2) in C order, with offset and length of each run.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not two slots per run; what `poll` returns.
    #[inline(never)]
    pub fn fill_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        let slots = usize::try_from(self.count()).unwrap_or(usize::MAX).saturating_mul(2);
        if slots != out.len() {
            return Err(Error::Length { left: "out", left_len: out.len(), right: "the runs", right_len: slots });
        }
        if !self.joined.is_empty() {
            for (slot, &(offset, length)) in out.chunks_exact_mut(2).zip(&self.joined) {
                (slot[0], slot[1]) = (offset, length);
            }
            return Ok(());
        }
        let row = 2 * self.inner.len();
        if row == 0 {
            return Ok(());
        }
        let sizes: Vec<i64> = self.outer.iter().map(|offsets| offsets.len() as i64).collect();
        let rows_per_piece = (parallel::PIECE / row).max(1);
        let elements = out.len();
        parallel::for_each(elements, out.chunks_mut(rows_per_piece * row).enumerate(), poll, |(number, piece)| {
            let mut at = radix::unravel((number * rows_per_piece) as i64, &sizes);
            for slots in piece.chunks_exact_mut(row) {
                let origin: i64 = self.outer.iter().zip(&at).map(|(offsets, &at)| offsets[at as usize]).sum();
                for (slot, &(offset, length)) in slots.chunks_exact_mut(2).zip(&self.inner) {
                    (slot[0], slot[1]) = (origin + offset, length);
                }
                for (digit, &size) in at.iter_mut().zip(&sizes).rev() {
                    *digit += 1;
                    if *digit < size {
                        break;
                    }
                    *digit = 0;
                }
            }
            Ok(())
        })
    }
}

/// The intervals as (start, stop), with those put together that meet.
fn meeting(intervals: &[Interval]) -> Vec<(i64, i64)> {
    let mut all: Vec<(i64, i64)> = Vec::with_capacity(intervals.len());
    for interval in intervals {
        match all.last_mut() {
            Some((_, stop)) if *stop == interval.start => *stop = interval.stop,
            _ => all.push((interval.start, interval.stop)),
        }
    }
    all
}
