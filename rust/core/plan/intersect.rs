//! The source shards that lie under each destination shard along one dim.
//!
//! A box of a partition is a product of intervals, so two boxes meet where their intervals meet in every dim. The
//! intersections are therefore found once per dim, in time that grows with their number, and multiplied out by the plan.

use crate::{
    error::Result,
    partition::Partition,
    room::Room as _,
    tiling::{
        Poll,
        cells::{Common, under_cut},
        shards::device_part,
        tiles::Ticker,
    },
};

/// A source interval that meets a destination interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overlap {
    /// The source's shard index along the dim.
    pub source: i64,
    /// The first position that both hold.
    pub start: i64,
    /// One past the last.
    pub stop: i64,
}

/// For every destination shard index along one dim, its overlaps with the source's intervals, in order.
///
/// ```
/// use shardwise_core::{layout::Layout, mesh::Mesh, parallel::never, partition::Partition};
/// use shardwise_core::{plan::intersect::Overlaps, uneven::Uneven};
/// use std::sync::Arc;
/// let mesh = Arc::new(Mesh::new(&["x", "y"], &[2, 3])?);
/// let cut = |axis| Partition::new(Arc::new(Layout::new(mesh.clone(), &[&[axis]], &[])?), &[6], Uneven::Even);
/// let found = Overlaps::new(&cut("x")?, &cut("y")?, 0, &mut never)?; // halves to thirds
/// let middle: Vec<_> = found.of(1).iter().map(|p| (p.overlap.source, p.overlap.start, p.overlap.stop)).collect();
/// assert_eq!(middle, [(0, 2, 3), (1, 3, 4)]);
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Overlaps {
    /// The start of each destination's overlaps in `all`; one more entry than there are
    /// destinations.
    begins: Vec<usize>,
    all: Vec<Placed>,
}

/// An overlap, and who holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// The overlap.
    pub overlap: Overlap,
    /// The addition of the source's shard index to the device index of the canonical owner.
    pub device: i64,
}

impl Overlaps {
    /// The overlaps of two partitions of one shape along `dim`.
    ///
    /// # Errors
    /// [`Error::TooMany`](crate::error::Error::TooMany) if there is no memory for them; what `poll` returns.
    pub fn new(source: &Partition, destination: &Partition, dim: usize, poll: Poll<'_>) -> Result<Self> {
        let (from, to) = (&source.dims()[dim], &destination.dims()[dim]);
        // Each begins where a shard of one side does, and a shard that is not empty has a first element of its own.
        let most = from.shards().min(from.elements()).saturating_add(to.shards().min(to.elements()));
        let (mut begins, mut all) = (Vec::new(), Vec::new());
        reserve(&mut begins, to.shards().saturating_add(1), "shards", dim)?;
        reserve(&mut all, most, "overlaps", dim)?;
        begins.push(0);
        let (mut common, mut ticker): (Vec<Common>, _) = (Vec::new(), Ticker::new());
        for index in 0..to.shards() {
            ticker.tick(poll)?;
            let (start, stop) = to.bounds(index);
            common.clear();
            under_cut(from, start, stop, &mut common)?;
            all.extend(common.iter().map(|&(source_index, start, stop)| Placed {
                overlap: Overlap { source: source_index, start, stop },
                device: device_part(source, dim, source_index),
            }));
            begins.push(all.len());
        }
        Ok(Self { begins, all })
    }

    /// The overlaps of the destination shard `index`; none if it is empty.
    #[inline]
    #[must_use]
    pub fn of(&self, index: i64) -> &[Placed] {
        &self.all[self.begins[index as usize]..self.begins[index as usize + 1]]
    }

    /// The number of overlaps in all.
    #[must_use]
    pub fn count(&self) -> usize {
        self.all.len()
    }
}

fn reserve<T>(list: &mut Vec<T>, count: i64, what: &str, dim: usize) -> Result<()> {
    list.room(usize::try_from(count).unwrap_or(usize::MAX), format_args!("{count} {what} along dim {dim}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uneven::{Cut, Uneven};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn overlaps_are_those_found_by_comparing_all_pairs(
            n in 0..40_i64,
            a in prop::collection::vec(1..5_i64, 0..3),
            b in prop::collection::vec(1..5_i64, 0..3),
            rules in prop::collection::vec(prop::sample::select(&Uneven::ALL[1..]), 2),
        ) {
            let source = Cut::new(0, n, &a, rules[0]).unwrap();
            let destination = Cut::new(0, n, &b, rules[1]).unwrap();
            for index in 0..destination.shards() {
                let (start, stop) = destination.bounds(index);
                let mut all: Vec<Common> = (0..source.shards())
                    .map(|s| (s, source.bounds(s)))
                    .map(|(s, (from, to))| (s, from.max(start), to.min(stop)))
                    .filter(|(_, start, stop)| start < stop)
                    .collect();
                all.sort_by_key(|common| common.1);
                let mut found = Vec::new();
                under_cut(&source, start, stop, &mut found).unwrap();
                prop_assert_eq!(found, all);
            }
        }
    }

    #[test]
    fn empty_shards_in_between_are_not_visited() {
        // Three elements over a million million shards: nearly all are empty, before and between the three.
        let source = Cut::new(0, 3, &[1 << 20, 1 << 20], Uneven::Chunk).unwrap();
        let mut found = Vec::new();
        under_cut(&source, 0, 3, &mut found).unwrap();
        assert_eq!(found.len(), 3);
    }
}
