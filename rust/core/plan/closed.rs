//! The transfers between two partitions (rule 2.6).
//!
//! Under a destination box lie the boxes of some source shards: a grid, because both partitions are products of cuts.
//! Every cell of the grid is one transfer, except the cell that the destination device holds itself. Nothing is left to
//! merge, and no plan has fewer transfers: a device holds one box of the source, so the parts of two cells never come
//! from one sender. The cost is that of walking the cells.
//!
//! Replicas share the sending: see `tiling::balance`.
//!
//! **Partial sums.** If the source is unreduced over axes of `a` coordinates in all, each cell has `a` addends, and
//! "once" means once per addend: one transfer for each, in the order of the coordinates, to be summed where they arrive.

use std::{ops::Range, sync::Arc};

use crate::{
    error::{Error, Result},
    index::linear::Linear,
    partition::Partition,
    plan::{
        intersect::{Overlaps, Placed},
        transfer::{Transfer, zeros},
    },
    region::Region,
    tiling::{
        Poll,
        balance::Balance,
        shards::{addend_function, addends},
    },
};

/// The number of devices between two polls.
pub(super) const DEVICES_PER_POLL: usize = 1 << 12;

/// The transfers of a plan between two partitions, found when they are asked for.
#[derive(Debug, Clone)]
pub(super) struct Closed {
    source: Arc<Partition>,
    pub(super) transfers: usize,
    pub(super) kept: usize,
    /// For each destination device, the source device that is the same, or -1.
    same: Arc<[i64]>,
    overlaps: Vec<Overlaps>,
    /// Shard indices of all source devices, (devices, dims); only filled if a device is in both meshes.
    source_index: Vec<i64>,
    /// Shard indices of all destination devices, (devices, dims).
    destination_index: Vec<i64>,
    /// The addition of each unreduced coordinate to the device index, in order.
    addends: Vec<i64>,
    /// A source device's unreduced coordinate, as one number.
    addend: Linear,
}

impl Closed {
    /// The transfers from `source` to `destination`, of one shape; `same` as in [`super::Plan::new`].
    pub(super) fn new(
        source: Arc<Partition>,
        destination: Arc<Partition>,
        same: Arc<[i64]>,
        poll: Poll<'_>,
    ) -> Result<Self> {
        let dims = 0..source.shape().len();
        let overlaps = dims.map(|dim| Overlaps::new(&source, &destination, dim, poll)).collect::<Result<_>>()?;
        let any_same = same.iter().any(|&s| s >= 0);
        let mut closed = Self {
            source_index: if any_same { shard_indices(&source)? } else { Vec::new() },
            destination_index: shard_indices(&destination)?,
            addends: addends(&source)?,
            addend: addend_function(&source),
            source,
            same,
            overlaps,
            transfers: 0,
            kept: 0,
        };
        (closed.transfers, closed.kept) = closed.count(&destination, poll)?;
        Ok(closed)
    }

    /// The number of partial sums that make one value.
    pub(super) fn addends(&self) -> usize {
        self.addends.len()
    }

    /// True if each addend of a shard is on one device only.
    pub(super) fn has_one_replica(&self) -> bool {
        self.source.layout().replicas() == 1
    }

    pub(super) fn rank(&self) -> usize {
        self.overlaps.len()
    }

    /// The shard index of each destination device.
    #[inline]
    fn destination_of(&self, device: usize) -> &[i64] {
        &self.destination_index[device * self.rank()..(device + 1) * self.rank()]
    }

    /// The overlaps under a device's box along each dim.
    pub(super) fn sides(&self, device: usize) -> impl Iterator<Item = &[Placed]> {
        self.overlaps.iter().zip(self.destination_of(device)).map(|(dim, &index)| dim.of(index))
    }

    /// The position, among the overlaps of each dim, of the part that the device holds itself;
    /// false if it holds none.
    #[inline]
    fn own_cell(&self, device: usize, cell: &mut [usize]) -> bool {
        let Ok(source) = usize::try_from(self.same[device]) else { return false };
        let have = &self.source_index[source * self.rank()..(source + 1) * self.rank()];
        let want = self.destination_of(device);
        for (dim, overlaps) in self.overlaps.iter().enumerate() {
            match overlaps.of(want[dim]).binary_search_by_key(&have[dim], |placed| placed.overlap.source) {
                Ok(position) => cell[dim] = position,
                Err(_) => return false,
            }
        }
        true
    }

    fn count(&self, destination: &Partition, poll: Poll<'_>) -> Result<(usize, usize)> {
        let overflow = || Error::Overflow { what: "the number of transfers".to_owned() };
        // All devices' cells: the replicas of a destination shard have as many as it.
        let mut cells = usize::try_from(destination.layout().replicas()).map_err(|_| overflow())?;
        for factor in self.overlaps.iter().map(Overlaps::count).chain([self.addends.len()]) {
            cells = cells.checked_mul(factor).ok_or_else(overflow)?;
        }
        cells.checked_mul(2 + 2 * self.rank()).ok_or_else(overflow)?;
        let mut cell = vec![0; self.rank()];
        let mut kept = 0;
        for device in 0..self.same.len() {
            if (device + 1) % DEVICES_PER_POLL == 0 {
                poll()?; // not of a few: to get the interpreter for it takes longer than their plan
            }
            kept += usize::from(self.own_cell(device, &mut cell));
        }
        Ok((cells - kept, kept))
    }

    /// Shows `visit` the boxes that stay with the devices.
    pub(super) fn visit_kept(
        &self,
        devices: Range<usize>,
        mut visit: impl FnMut(Transfer<'_>) -> Result<()>,
    ) -> Result<()> {
        let rank = self.rank();
        let (mut cell, mut row) = (vec![0; rank], vec![0; 2 * rank]);
        for device in devices {
            if !self.own_cell(device, &mut cell) {
                continue;
            }
            for (dim, (&position, &index)) in cell.iter().zip(self.destination_of(device)).enumerate() {
                let overlap = self.overlaps[dim].of(index)[position].overlap;
                (row[dim], row[rank + dim]) = (overlap.start, overlap.stop);
            }
            visit(Transfer {
                source: self.same[device],
                source_piece: 0,
                destination: device as i64,
                destination_piece: 0,
                region: Region::of_row(&row),
            })?;
        }
        Ok(())
    }

    /// Fills `out` with the rows of all transfers.
    pub(super) fn rows_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        let mut rows = out.chunks_exact_mut(Transfer::row_length(self.rank()));
        self.walk(0..self.same.len(), poll, |transfer| {
            // There is a row for each: they were counted.
            rows.next().into_iter().for_each(|row| row.copy_from_slice(transfer));
            Ok(())
        })
    }

    /// Shows `visit` each transfer to the devices.
    pub(super) fn visit(
        &self,
        devices: Range<usize>,
        poll: Poll<'_>,
        mut visit: impl FnMut(Transfer<'_>) -> Result<()>,
    ) -> Result<()> {
        self.walk(devices, poll, |row| visit(Transfer::of_row(row)))
    }

    /// Shows `visit` the row of each transfer to the devices.
    fn walk(&self, devices: Range<usize>, poll: Poll<'_>, mut visit: impl FnMut(&[i64]) -> Result<()>) -> Result<()> {
        let rank = self.rank();
        let mut balance = Balance::new(&self.source, self.addends.len());
        let mut own = vec![0; rank];
        let mut grid = Grid {
            sides: Vec::with_capacity(rank),
            weights: self.source.layout().shard_strides(),
            cell: vec![0; rank],
            row: vec![0; 2 + 2 * rank],
            shard: 0,
        };
        for device in devices {
            if (device + 1) % DEVICES_PER_POLL == 0 {
                poll()?;
            }
            grid.sides.clear();
            grid.sides.extend(self.sides(device));
            if grid.sides.iter().any(|side| side.is_empty()) {
                continue;
            }
            let has_own = self.own_cell(device, &mut own);
            let own_addend = if has_own { self.addend.at(self.same[device]) } else { 0 };
            grid.begin(device);
            loop {
                let owner = grid.row[0];
                let is_own = has_own && own == grid.cell;
                for (addend, &step) in self.addends.iter().enumerate() {
                    if is_own && addend as i64 == own_addend {
                        continue;
                    }
                    grid.row[0] = owner + step + balance.replica(grid.shard, addend, || grid.volume())?;
                    visit(&grid.row)?;
                    grid.row[0] = owner;
                }
                if !grid.advance() {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// The cells under one destination box, walked in row-major order; what one cell has in common with the next stays in
/// the row.
struct Grid<'a> {
    sides: Vec<&'a [Placed]>,
    /// The weight of a shard index in the source's shard id.
    weights: &'a [i64],
    cell: Vec<usize>,
    /// The row of the cell's transfer, from the canonical owner.
    row: Vec<i64>,
    /// The shard that the cell lies in.
    shard: i64,
}

impl Grid<'_> {
    #[inline]
    fn begin(&mut self, device: usize) {
        (self.row[0], self.row[1], self.shard) = (0, device as i64, 0);
        for dim in 0..self.sides.len() {
            self.enter(dim, 0);
        }
    }

    #[inline]
    fn enter(&mut self, dim: usize, position: usize) {
        let Placed { overlap, device } = self.sides[dim][position];
        let rank = self.sides.len();
        self.cell[dim] = position;
        self.row[0] += device;
        self.shard += overlap.source * self.weights[dim];
        (self.row[2 + dim], self.row[2 + rank + dim]) = (overlap.start, overlap.stop);
    }

    /// Goes to the next cell; false after the last.
    #[inline]
    fn advance(&mut self) -> bool {
        for dim in (0..self.sides.len()).rev() {
            let position = self.cell[dim];
            self.row[0] -= self.sides[dim][position].device;
            self.shard -= self.sides[dim][position].overlap.source * self.weights[dim];
            if position + 1 < self.sides[dim].len() {
                self.enter(dim, position + 1);
                return true;
            }
            self.enter(dim, 0);
        }
        false
    }

    /// The elements of the cell.
    fn volume(&self) -> i64 {
        let sides = self.sides.iter().zip(&self.cell);
        sides.map(|(side, &at)| side[at].overlap.stop - side[at].overlap.start).product()
    }
}

/// Room for so many numbers per device.
fn per_device(partition: &Partition, numbers: usize) -> Result<Vec<i64>> {
    let devices = partition.mesh().size();
    zeros(usize::try_from(devices).unwrap_or(usize::MAX), numbers)
}

/// The shard index of every device: (devices, dims).
fn shard_indices(partition: &Partition) -> Result<Vec<i64>> {
    let rank = partition.shape().len();
    let mut out = per_device(partition, rank)?;
    for dim in 0..rank {
        partition.layout().shard_index_function(dim).fill(0, &mut out, dim, rank);
    }
    Ok(out)
}
