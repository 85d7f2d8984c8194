//! The transfers from one partition to another (rule 2.6).
//!
//! Under a destination box lie the boxes of some source shards: a grid, because both partitions are products of cuts.
//! Every cell of the grid is one transfer, but for the cell that the destination device holds itself. Nothing is left to
//! merge, and no plan has fewer transfers: a device holds one box of the source, so the parts of two cells never come
//! from one sender. The cost is that of walking the cells.
//!
//! Replicas share the sending: see `balance`.
//!
//! **Partial sums.** If the source is unreduced over axes of `a` coordinates in all, each cell has `a` addends, and
//! "once" means once per addend: one transfer for each, in the order of the coordinates, to be summed where they arrive.

use std::{ops::Range, sync::Arc};

use crate::{
    error::{Error, Result},
    layout::AxisRole,
    linear::Linear,
    parallel,
    partition::Partition,
    radix,
    reshard::{
        balance::Balance,
        coverage::Boxes,
        intersect::{Overlaps, Placed},
    },
};

/// How many devices are walked between two polls.
const DEVICES_PER_POLL: usize = 1 << 12;

/// What must move between two partitions of one shape.
///
/// ```
/// use shardwise_core::{layout::Layout, mesh::Mesh, partition::Partition, reshard::plan::Plan, uneven::Uneven};
/// use std::sync::Arc;
/// let mesh = Arc::new(Mesh::new(&["x"], &[2])?);
/// let cut = |specs: [&[&str]; 2]| {
///     Partition::new(Arc::new(Layout::new(mesh.clone(), &specs, &[])?), &[4, 4], Uneven::Even).map(Arc::new)
/// };
/// let plan = Plan::new(cut([&["x"], &[]])?, cut([&[], &["x"]])?, vec![0, 1])?; // rows to columns
/// let mut rows = vec![0; plan.transfers() * plan.row()];
/// plan.transfers_into(&mut rows, &mut || Ok(()))?;
/// // Device 1 sends the lower left quarter to device 0, device 0 the upper right one to device 1.
/// assert_eq!(rows, [1, 0, 2, 0, 4, 2, 0, 1, 0, 2, 2, 4]);
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Plan {
    source: Source,
    destination: Arc<Partition>,
    transfers: usize,
    kept: usize,
}

#[derive(Debug, Clone)]
enum Source {
    Shards(Shards),
    Boxes(Boxes),
}

/// A source that is a partition.
#[derive(Debug, Clone)]
struct Shards {
    partition: Arc<Partition>,
    /// For each destination device, the source device that is the same, or -1.
    same: Vec<i64>,
    overlaps: Vec<Overlaps>,
    /// Shard indices of all source devices, (devices, dims); only filled if a device is in both meshes.
    source_index: Vec<i64>,
    /// Shard indices of all destination devices, (devices, dims).
    destination_index: Vec<i64>,
    /// What each unreduced coordinate adds to the device index, in order.
    addends: Vec<i64>,
    /// A source device's unreduced coordinate, as one number.
    addend: Linear,
}

impl Plan {
    /// The plan from `source` to `destination`; `same[d]` is the device of the source's mesh that is device `d` of the
    /// destination's, or -1.
    ///
    /// # Errors
    /// [`Error::Shapes`] if the shapes differ, [`Error::UnreducedDestination`], [`Error::Length`] if `same` has not one
    /// entry per device, [`Error::DeviceIndex`] for an entry that is no source device, [`Error::Overflow`] or
    /// [`Error::TooMany`] if the devices or the transfers are too many.
    pub fn new(source: Arc<Partition>, destination: Arc<Partition>, same: Vec<i64>) -> Result<Self> {
        check_destination(source.shape(), &destination)?;
        let devices = usize::try_from(destination.mesh().size()).unwrap_or(usize::MAX);
        if same.len() != devices {
            return Err(Error::Length { left: "same", left_len: same.len(), right: "devices", right_len: devices });
        }
        if let Some(&index) = same.iter().find(|&&s| s < -1 || s >= source.mesh().size()) {
            return Err(Error::DeviceIndex { index, size: source.mesh().size() });
        }
        let dims = 0..source.shape().len();
        let overlaps = dims.map(|dim| Overlaps::new(&source, &destination, dim)).collect::<Result<_>>()?;
        let any_same = same.iter().any(|&s| s >= 0);
        let shards = Shards {
            source_index: if any_same { shard_indices(&source)? } else { Vec::new() },
            destination_index: shard_indices(&destination)?,
            addends: addends(&source)?,
            addend: addend_function(&source),
            partition: source,
            same,
            overlaps,
        };
        let (transfers, kept) = shards.count(&destination)?;
        Ok(Self { source: Source::Shards(shards), destination, transfers, kept })
    }

    /// The plan from boxes made by hand, each a source of its own, to `destination`. Nothing counts as kept.
    ///
    /// # Errors
    /// As [`Boxes::new`]; [`Error::UnreducedDestination`].
    pub fn from_boxes(bounds: Vec<i64>, destination: Arc<Partition>) -> Result<Self> {
        check_destination(destination.shape(), &destination)?;
        let boxes = Boxes::new(bounds, &destination)?;
        Ok(Self {
            transfers: boxes.rows().len() / row(&destination),
            kept: 0,
            source: Source::Boxes(boxes),
            destination,
        })
    }

    /// The destination.
    #[must_use]
    pub fn destination(&self) -> &Arc<Partition> {
        &self.destination
    }

    /// The number of transfers.
    #[must_use]
    pub fn transfers(&self) -> usize {
        self.transfers
    }

    /// The number of boxes that stay where they are.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// How many partial sums make one value.
    #[must_use]
    pub fn addends(&self) -> usize {
        match &self.source {
            Source::Shards(shards) => shards.addends.len(),
            Source::Boxes(_) => 1,
        }
    }

    /// The numbers per transfer: source device, destination device, start and stop of the global box.
    #[must_use]
    pub fn row(&self) -> usize {
        row(&self.destination)
    }

    /// Start and stop of every source's box: (sources, dims, 2) in C order.
    ///
    /// # Errors
    /// None but those of the partition.
    pub fn source_boxes(&self) -> Result<Vec<i64>> {
        match &self.source {
            Source::Shards(shards) => boxes(&shards.partition),
            Source::Boxes(boxes) => Ok(boxes.bounds().to_vec()),
        }
    }

    /// Start and stop of every destination shard's box: (devices, dims, 2) in C order.
    ///
    /// # Errors
    /// None but those of the partition.
    pub fn destination_boxes(&self) -> Result<Vec<i64>> {
        boxes(&self.destination)
    }

    /// Which addend of the partial sums the source device holds: its coordinate over the unreduced axes, as one number.
    #[must_use]
    pub fn addend_of(&self, device: i64) -> i64 {
        match &self.source {
            Source::Shards(shards) if shards.addends.len() > 1 => shards.addend.at(device),
            _ => 0,
        }
    }

    /// The transfers as [`Self::transfers_into`] gives them, in memory of their own.
    ///
    /// # Errors
    /// [`Error::TooMany`] if they are too many for the memory.
    pub fn transfer_rows(&self) -> Result<Vec<i64>> {
        let mut rows = zeros(self.transfers * self.row())?;
        self.transfers_into(&mut rows, &mut parallel::never)?;
        Ok(rows)
    }

    /// The destination devices, in at most `parts` ranges whose transfers may be visited each on its own; in one if who
    /// sends to a device depends on what was sent to others.
    #[must_use]
    pub fn ranges(&self, parts: usize) -> Vec<Range<usize>> {
        let devices = self.destination.mesh().size() as usize;
        let apart = matches!(&self.source, Source::Shards(shards) if shards.partition.replicas() == 1);
        let step = devices.div_ceil(if apart { parts.max(1) } else { 1 });
        (0..devices).step_by(step).map(|start| start..(start + step).min(devices)).collect()
    }

    /// Shows `visit` each transfer to the devices of one of [`Self::ranges`], as a row of [`Self::transfers_into`], in the
    /// same order.
    ///
    /// # Errors
    /// What `visit` returns.
    pub fn visit_transfers(&self, devices: Range<usize>, visit: impl FnMut(&[i64]) -> Result<()>) -> Result<()> {
        match &self.source {
            Source::Shards(shards) => shards.transfers(devices, &mut parallel::never, visit),
            Source::Boxes(boxes) => boxes.rows().chunks_exact(self.row()).try_for_each(visit),
        }
    }

    /// The boxes that stay as [`Self::kept_into`] gives them, in memory of their own.
    ///
    /// # Errors
    /// [`Error::TooMany`] if they are too many for the memory.
    pub fn kept_rows(&self) -> Result<Vec<i64>> {
        let mut rows = zeros(self.kept * self.row())?;
        self.kept_into(&mut rows)?;
        Ok(rows)
    }

    /// Fills `out`, of ([`Self::transfers`], [`Self::row`]), in the order of the destination devices.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not as many elements; what `poll` returns.
    pub fn transfers_into(&self, out: &mut [i64], poll: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        check_length(out, self.transfers * self.row())?;
        match &self.source {
            Source::Shards(shards) => {
                let mut rows = out.chunks_exact_mut(self.row());
                shards.transfers(0..shards.same.len(), poll, |transfer| {
                    // There is a row for each: they were counted.
                    rows.next().into_iter().for_each(|row| row.copy_from_slice(transfer));
                    Ok(())
                })
            }
            Source::Boxes(boxes) => {
                out.copy_from_slice(boxes.rows());
                Ok(())
            }
        }
    }

    /// Fills `out`, of ([`Self::kept`], [`Self::row`]), with the boxes that stay on their device.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not as many elements.
    pub fn kept_into(&self, out: &mut [i64]) -> Result<()> {
        check_length(out, self.kept * self.row())?;
        if let Source::Shards(shards) = &self.source {
            shards.kept_into(out);
        }
        Ok(())
    }
}

impl Shards {
    fn rank(&self) -> usize {
        self.overlaps.len()
    }

    /// The shard index of each destination device.
    fn destination_of(&self, device: usize) -> &[i64] {
        &self.destination_index[device * self.rank()..(device + 1) * self.rank()]
    }

    /// Where, among the overlaps of each dim, the part lies that the device holds itself; false if it holds none.
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

    fn count(&self, destination: &Partition) -> Result<(usize, usize)> {
        let overflow = || Error::Overflow { what: "the number of transfers".to_owned() };
        // All devices' cells: the replicas of a destination shard have as many as it.
        let mut cells = usize::try_from(destination.replicas()).map_err(|_| overflow())?;
        for factor in self.overlaps.iter().map(Overlaps::count).chain([self.addends.len()]) {
            cells = cells.checked_mul(factor).ok_or_else(overflow)?;
        }
        cells.checked_mul(2 + 2 * self.rank()).ok_or_else(overflow)?;
        let mut cell = vec![0; self.rank()];
        let kept = (0..self.same.len()).filter(|&device| self.own_cell(device, &mut cell)).count();
        Ok((cells - kept, kept))
    }

    fn kept_into(&self, out: &mut [i64]) {
        let rank = self.rank();
        let mut cell = vec![0; rank];
        let mut rows = out.chunks_exact_mut(2 + 2 * rank);
        for device in 0..self.same.len() {
            if self.own_cell(device, &mut cell)
                && let Some(row) = rows.next()
            {
                (row[0], row[1]) = (self.same[device], device as i64);
                for (dim, (&position, &index)) in cell.iter().zip(self.destination_of(device)).enumerate() {
                    let overlap = self.overlaps[dim].of(index)[position].overlap;
                    (row[2 + dim], row[2 + rank + dim]) = (overlap.start, overlap.stop);
                }
            }
        }
    }

    /// Shows `visit` each transfer to the devices, as a row of [`Plan::transfers_into`].
    fn transfers(
        &self,
        devices: Range<usize>,
        poll: &mut dyn FnMut() -> Result<()>,
        mut visit: impl FnMut(&[i64]) -> Result<()>,
    ) -> Result<()> {
        let rank = self.rank();
        let mut balance = Balance::new(&self.partition, self.addends.len());
        let mut own = vec![0; rank];
        let mut grid = Grid {
            sides: Vec::with_capacity(rank),
            weights: self.partition.shard_strides(),
            cell: vec![0; rank],
            row: vec![0; 2 + 2 * rank],
            shard: 0,
        };
        for device in devices {
            if device % DEVICES_PER_POLL == 0 {
                poll()?;
            }
            let want = self.destination_of(device);
            grid.sides.clear();
            grid.sides.extend(self.overlaps.iter().zip(want).map(|(dim, &index)| dim.of(index)));
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
    /// What a shard index weighs in the source's shard id.
    weights: &'a [i64],
    cell: Vec<usize>,
    /// The row of the cell's transfer, from the canonical owner.
    row: Vec<i64>,
    /// The shard that the cell lies in.
    shard: i64,
}

impl Grid<'_> {
    fn begin(&mut self, device: usize) {
        (self.row[0], self.row[1], self.shard) = (0, device as i64, 0);
        for dim in 0..self.sides.len() {
            self.enter(dim, 0);
        }
    }

    fn enter(&mut self, dim: usize, position: usize) {
        let Placed { overlap, device } = self.sides[dim][position];
        let rank = self.sides.len();
        self.cell[dim] = position;
        self.row[0] += device;
        self.shard += overlap.source * self.weights[dim];
        (self.row[2 + dim], self.row[2 + rank + dim]) = (overlap.start, overlap.stop);
    }

    /// Goes to the next cell; false after the last.
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

/// The numbers per transfer to `destination`.
fn row(destination: &Partition) -> usize {
    2 + 2 * destination.shape().len()
}

fn zeros(len: usize) -> Result<Vec<i64>> {
    let mut rows = Vec::new();
    rows.try_reserve_exact(len).map_err(|_| Error::TooMany { what: format!("{len} numbers") })?;
    rows.resize(len, 0);
    Ok(rows)
}

/// Room for so many numbers per device.
fn per_device(partition: &Partition, numbers: usize) -> Result<Vec<i64>> {
    let devices = partition.mesh().size();
    let len = usize::try_from(devices).ok().and_then(|devices| devices.checked_mul(numbers));
    zeros(len.ok_or_else(|| Error::TooMany { what: format!("{numbers} numbers for each of {devices} devices") })?)
}

fn check_length(out: &[i64], expected: usize) -> Result<()> {
    if out.len() != expected {
        return Err(Error::Length { left: "out", left_len: out.len(), right: "rows", right_len: expected });
    }
    Ok(())
}

/// A destination holds values: partial sums cannot be made of them.
fn check_destination(shape: &[i64], destination: &Partition) -> Result<()> {
    if shape != destination.shape() {
        return Err(Error::Shapes { given: shape.to_vec(), destination: destination.shape().to_vec() });
    }
    let names = destination.mesh().names();
    let axes: Vec<_> = destination.layout().unreduced_axes().iter().map(|&axis| names[axis].clone()).collect();
    if !axes.is_empty() {
        return Err(Error::UnreducedDestination { axes });
    }
    Ok(())
}

fn boxes(partition: &Partition) -> Result<Vec<i64>> {
    let mut out = per_device(partition, 2 * partition.shape().len())?;
    partition.boxes_into(&mut out, &mut parallel::never)?;
    Ok(out)
}

/// The shard index of every device: (devices, dims).
fn shard_indices(partition: &Partition) -> Result<Vec<i64>> {
    let rank = partition.shape().len();
    let mut out = per_device(partition, rank)?;
    for dim in 0..rank {
        partition.shard_index_function(dim).fill(0, &mut out, dim, rank);
    }
    Ok(out)
}

/// The unreduced coordinate of a device, as one number.
fn addend_function(source: &Partition) -> Linear {
    let unreduced = source.layout().unreduced_axes();
    let sizes: Vec<_> = unreduced.iter().map(|&axis| source.mesh().sizes()[axis]).collect();
    let weights = radix::strides(&sizes);
    Linear::new(source.mesh(), |axis| unreduced.iter().position(|&a| a == axis).map_or(0, |i| weights[i]))
}

/// What each unreduced coordinate adds to the device index, in order; one 0 if nothing is unreduced.
fn addends(source: &Partition) -> Result<Vec<i64>> {
    let mesh = source.mesh();
    let mut all = vec![0];
    for (axis, role) in source.layout().roles().iter().enumerate() {
        if *role == AxisRole::Unreduced {
            let (size, stride) = (mesh.sizes()[axis], mesh.strides()[axis]);
            let mut more = Vec::new();
            let count = usize::try_from(size).ok().and_then(|size| size.checked_mul(all.len()));
            if count.is_none_or(|count| more.try_reserve_exact(count).is_err()) {
                return Err(Error::TooMany { what: format!("{size} times {} addends", all.len()) });
            }
            more.extend(all.iter().flat_map(|&base| (0..size).map(move |c| base + c * stride)));
            all = more;
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests;
