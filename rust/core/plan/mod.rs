//! Plans from one tiling of a tensor to another: who sends which box to whom (rules 2.6 and 2.11).
//!
//! | module | answers |
//! |---|---|
//! | [`transfer`] | one box on its way |
//! | `closed` | the transfers between two partitions, dim by dim: nothing is listed |
//! | [`intersect`] | which source shards lie under each destination shard along one dim |
//! | `listed` | the transfers between any two tilings, found box by box |
//! | [`places`] | where a transfer's box lies in the arrays of its two holders |
//! | [`model`] | the plans of many tensors with one balance over all |
//! | [`program`] | what each holder has to do, in which order |
//! | [`rounds`] | the transfers in rounds, each within a budget of memory |
//! | `rows` | the transfers as rows of numbers |
//! | [`turns`] | the first box of each holder, then the second of each, and so on |

use std::{ops::Range, sync::Arc};

use crate::{
    error::{Error, Result},
    index::linear::Linear,
    tiling::{Poll, Tiling, shards::addend_function, tiles::Held},
};

mod closed;
pub mod intersect;
mod listed;
pub mod model;
pub mod places;
pub mod program;
pub mod rounds;
mod rows;
pub mod transfer;
pub mod turns;

use closed::Closed;
use listed::Listed;
pub use transfer::Transfer;

/// The boxes that must move between two tilings of one tensor.
///
/// ```
/// use shardwise_core::{layout::Layout, mesh::Mesh, parallel::never, partition::Partition, plan::Plan, uneven::Uneven};
/// use std::sync::Arc;
/// let mesh = Arc::new(Mesh::new(&["x"], &[2])?);
/// let cut = |specs: [&[&str]; 2]| {
///     Partition::new(Arc::new(Layout::new(mesh.clone(), &specs, &[])?), &[4, 4], Uneven::Even).map(Arc::new)
/// };
/// let plan = Plan::new(cut([&["x"], &[]])?, cut([&[], &["x"]])?, vec![0, 1], &mut never)?; // rows to columns
/// let mut rows = vec![0; plan.transfers() * plan.row()];
/// plan.transfers_into(&mut rows, &mut never)?;
/// // Device 1 sends the lower left quarter to device 0, device 0 the upper right one to device 1.
/// assert_eq!(rows, [1, 0, 2, 0, 4, 2, 0, 1, 0, 2, 2, 4]);
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
#[derive(Debug)]
pub struct Plan {
    source: Arc<dyn Tiling>,
    destination: Arc<dyn Tiling>,
    same: Arc<[i64]>,
    transfers: Transfers,
    addends: usize,
    /// A source holder's unreduced coordinate, as one number; `None` if nothing is unreduced.
    addend: Option<Linear>,
}

/// One of the two ends of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The end that boxes come from.
    Source,
    /// The end that they go to.
    Destination,
}

#[derive(Debug)]
enum Transfers {
    Closed(Closed),
    Listed(Listed),
}

impl Plan {
    /// The plan from `source` to `destination`; `same[d]` is the holder of the source that is holder `d` of the
    /// destination, or -1. What that one holds already stays.
    ///
    /// The destination need not hold the whole tensor, and its holders may ask for the same elements; the source must
    /// hold what they ask for.
    ///
    /// # Errors
    /// [`Error::Shapes`] if the shapes differ, [`Error::UnreducedDestination`], [`Error::Length`] if `same` has not one
    /// entry for each holder, [`Error::DeviceIndex`] for an entry that is not a source holder, [`Error::BoxesOverlap`] if
    /// the source's boxes share elements, [`Error::NotHeld`] if it lacks elements that the destination asks for,
    /// [`Error::Overflow`] or [`Error::TooMany`] if the holders or the transfers are too many; what `poll` returns.
    #[inline(never)]
    pub fn new(source: Arc<dyn Tiling>, destination: Arc<dyn Tiling>, same: Vec<i64>, poll: Poll<'_>) -> Result<Self> {
        Self::check_ends(&*source, &destination, &same)?;
        if let (Some(from), Some(to)) = (source.clone().as_partition(), destination.clone().as_partition()) {
            let same: Arc<[i64]> = same.into();
            let closed = Closed::new(from.clone(), to, same.clone(), poll)?;
            let addends = closed.addends();
            let addend = (addends > 1).then(|| addend_function(&from));
            return Ok(Self { source, destination, same, transfers: Transfers::Closed(closed), addends, addend });
        }
        let (listed, addends) = {
            let tiles = source.tiles(poll)?;
            let mut senders = tiles.senders()?;
            let listed = Listed::new(&*tiles, &*destination.pieces(poll)?, &same, poll, |found| {
                senders.next(found.tile, found.addend, found.region.volume())
            })?;
            (listed, tiles.addends())
        };
        Ok(Self::listed(source, destination, same, listed, addends))
    }

    /// The same plan with senders that are given, transfer by transfer: source holders that hold the box.
    ///
    /// # Errors
    /// As [`Self::new`]; [`Error::Sender`] for one that does not hold the box, [`Error::Length`] if they are not as many
    /// as the transfers.
    pub fn with_senders(
        source: Arc<dyn Tiling>,
        destination: Arc<dyn Tiling>,
        same: Vec<i64>,
        senders: &[i64],
        poll: Poll<'_>,
    ) -> Result<Self> {
        Self::check_ends(&*source, &destination, &same)?;
        let (mut number, holders) = (0, source.holders());
        let (listed, addends) = {
            let tiles = source.tiles(poll)?;
            let listed = Listed::new(&*tiles, &*destination.pieces(poll)?, &same, poll, |found| {
                let position = number;
                number += 1;
                let Some(&holder) = senders.get(position) else { return Ok(Held { holder: 0, piece: 0, addend: 0 }) };
                let held = if holder < 0 || holder >= holders { None } else { tiles.held_by(found.tile, holder) };
                let held = held.filter(|held| held.addend == found.addend as i64);
                held.ok_or_else(|| Error::Sender { position, holder, text: found.region.text() })
            })?;
            (listed, tiles.addends())
        };
        if number != senders.len() {
            let left_len = senders.len();
            return Err(Error::Length { left: "senders", left_len, right: "transfers", right_len: number });
        }
        Ok(Self::listed(source, destination, same, listed, addends))
    }

    fn listed(
        source: Arc<dyn Tiling>,
        destination: Arc<dyn Tiling>,
        same: Vec<i64>,
        listed: Listed,
        addends: usize,
    ) -> Self {
        let partition = if addends > 1 { source.clone().as_partition() } else { None };
        let addend = partition.map(|from| addend_function(&from));
        Self { source, destination, same: same.into(), transfers: Transfers::Listed(listed), addends, addend }
    }

    /// Check that two tilings are of one shape, the second one of values, and that `same` says who
    /// is who.
    ///
    /// # Errors
    /// Those of [`Plan::new`] that say so.
    pub fn check_ends(source: &dyn Tiling, destination: &Arc<dyn Tiling>, same: &[i64]) -> Result<()> {
        if source.shape() != destination.shape() {
            let (given, destination) = (source.shape().to_vec(), destination.shape().to_vec());
            return Err(Error::Shapes { given, destination });
        }
        if let Some(partition) = destination.clone().as_partition() {
            let names = partition.mesh().names();
            let unreduced = partition.layout().unreduced_axes();
            if !unreduced.is_empty() {
                return Err(Error::UnreducedDestination {
                    axes: unreduced.iter().map(|&a| names[a].clone()).collect(),
                });
            }
        }
        let holders = usize::try_from(destination.holders()).unwrap_or(usize::MAX);
        if same.len() != holders {
            return Err(Error::Length { left: "same", left_len: same.len(), right: "holders", right_len: holders });
        }
        if let Some(&index) = same.iter().find(|&&s| s < -1 || s >= source.holders()) {
            return Err(Error::DeviceIndex { index, size: source.holders() });
        }
        Ok(())
    }

    /// The tiling of one end.
    #[must_use]
    pub fn end(&self, end: End) -> &Arc<dyn Tiling> {
        match end {
            End::Source => &self.source,
            End::Destination => &self.destination,
        }
    }

    /// The source.
    #[must_use]
    pub fn source(&self) -> &Arc<dyn Tiling> {
        &self.source
    }

    /// The destination.
    #[must_use]
    pub fn destination(&self) -> &Arc<dyn Tiling> {
        &self.destination
    }

    /// For each destination holder, the source holder that is the same, or -1.
    #[must_use]
    pub fn same(&self) -> &[i64] {
        &self.same
    }

    /// The number of transfers.
    #[must_use]
    pub fn transfers(&self) -> usize {
        match &self.transfers {
            Transfers::Closed(closed) => closed.transfers,
            Transfers::Listed(listed) => listed.moved.len(),
        }
    }

    /// The number of boxes that stay where they are.
    #[must_use]
    pub fn kept(&self) -> usize {
        match &self.transfers {
            Transfers::Closed(closed) => closed.kept,
            Transfers::Listed(listed) => listed.kept.len(),
        }
    }

    /// The number of partial sums that make one value.
    #[must_use]
    pub fn addends(&self) -> usize {
        self.addends
    }

    /// The numbers of a transfer in a list of them; see [`Transfer::of_row`].
    #[must_use]
    pub fn row(&self) -> usize {
        Transfer::row_length(self.destination.shape().len())
    }

    /// The addend of the partial sums that a source holder has: its coordinate over the unreduced axes, as a number.
    #[must_use]
    pub fn addend_of(&self, holder: i64) -> i64 {
        self.addend.as_ref().map_or(0, |addend| addend.at(holder))
    }

    /// The destination holders, in at most `parts` ranges whose transfers may be visited each on its own; in one if who
    /// sends to a holder depends on what was sent to others.
    #[must_use]
    pub fn ranges(&self, parts: usize) -> Vec<Range<usize>> {
        let holders = self.destination.holders() as usize;
        let apart = match &self.transfers {
            Transfers::Closed(closed) => closed.has_one_replica(),
            Transfers::Listed(_) => true,
        };
        let step = holders.div_ceil(if apart { parts.max(1) } else { 1 }).max(1);
        (0..holders).step_by(step).map(|start| start..(start + step).min(holders)).collect()
    }

    /// Shows `visit` each transfer to the holders of one of [`Self::ranges`], in the order of the destination holders.
    ///
    /// # Errors
    /// What `poll` or `visit` returns.
    pub fn visit_transfers(
        &self,
        holders: Range<usize>,
        poll: Poll<'_>,
        visit: impl FnMut(Transfer<'_>) -> Result<()>,
    ) -> Result<()> {
        match &self.transfers {
            Transfers::Closed(closed) => closed.visit(holders, poll, visit),
            Transfers::Listed(listed) => listed.moved.visit(holders, visit),
        }
    }

    /// Shows `visit` each box that stays with one of the holders, as a transfer to itself.
    ///
    /// # Errors
    /// What `visit` returns.
    pub fn visit_kept(&self, holders: Range<usize>, visit: impl FnMut(Transfer<'_>) -> Result<()>) -> Result<()> {
        match &self.transfers {
            Transfers::Closed(closed) => closed.visit_kept(holders, visit),
            Transfers::Listed(listed) => listed.kept.visit(holders, visit),
        }
    }

    /// True if the places of all pieces of one end are more than those of some boxes: of a large
    /// grid a few chunks may be asked for.
    #[must_use]
    pub fn is_far_larger(&self, end: End, boxes: usize) -> bool {
        self.end(end).holders() as u64 > 4 * boxes as u64 + 1024
    }
}

#[cfg(test)]
mod tests;
