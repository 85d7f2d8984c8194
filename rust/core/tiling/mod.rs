//! The boxes of a tensor that each holder has (rule 2.10).
//!
//! A [`Tiling`] has holders (devices, ranks, files), known by their numbers, and for each the shape of its own array and
//! its pieces: boxes of the tensor, each with its place in that array.
//!
//! | module | answers |
//! |---|---|
//! | `partition` | a partition is a tiling in closed form: one piece for each device |
//! | `packed` | one with packed dims, with several pieces for each |
//! | [`divided`] | the questions that both of these answer |
//! | [`grid`] | a regular grid of chunks, each a holder (zarr) |
//! | [`flat`] | ranges of the flattened tensor, each a holder's 1-D array (FSDP, ZeRO) |
//! | [`boxes`] | any boxes |
//! | `pieces` | the pieces of all holders in a list |
//! | [`tiles`] | the boxes of a tiling found by position, for plans |
//! | [`check`] | whether boxes share elements, and which elements none of them holds |
//!
//! **Replicas.** Holders of the identical box are replicas if the tiling says that it has replicas. Whatever else two
//! pieces have in common is an error.

use std::{fmt::Debug, sync::Arc};

use crate::{
    error::{Error, Result},
    index::radix,
    partition::Partition,
};

pub(crate) mod balance;
pub mod boxes;
pub(crate) mod cells;
pub mod check;
pub mod divided;
mod edges;
pub mod flat;
pub mod grid;
pub mod listed;
mod packed;
mod partition;
mod pieces;
pub(crate) mod shards;
pub mod tiles;
mod tree;

use listed::Listed;
pub(crate) use pieces::STEPS_PER_POLL;
pub use pieces::{Piece, Pieces, Place, Poll};
use tiles::{Ticker, Tiles};
pub use tree::BoxTree;

/// The boxes of one tensor that each holder has.
///
/// ```
/// use shardwise_core::{error::Error, parallel::never, tiling::{Place, Tiling, flat::FlatRanges}};
/// // Three elements of a 2 × 3 tensor for the first rank, two for the second.
/// let ranks = FlatRanges::new(&[2, 3], [(0, 4), (4, 6)].into_iter(), false)?;
/// let mut pieces = Vec::new();
/// ranks.visit_pieces(0, &mut |piece| {
///     pieces.push((piece.region.text(), piece.place == Place::Flat(3)));
///     Ok(())
/// })?;
/// assert_eq!(pieces, [("[0:1, 0:3]".to_owned(), false), ("[1:2, 0:1]".to_owned(), true)]);
/// assert_eq!((ranks.array_shape(0)?, ranks.check(&mut never)), (vec![4], Ok(())));
/// # Ok::<(), Error>(())
/// ```
pub trait Tiling: Debug + Send + Sync {
    /// The tensor's shape.
    fn shape(&self) -> &[i64];

    /// The number of holders; they are numbered from 0.
    fn holders(&self) -> i64;

    /// The shape of a holder's own array: of the tensor's rank, or of one dim if its pieces are [`Place::Flat`].
    ///
    /// # Errors
    /// [`Error::OutOfRange`] or [`Error::DeviceIndex`] if there is no such holder.
    fn array_shape(&self, holder: i64) -> Result<Vec<i64>>;

    /// Shows `visit` the pieces of a holder, in their order; they are numbered from 0. Some may be empty.
    ///
    /// # Errors
    /// As [`Tiling::array_shape`]; what `visit` returns.
    fn visit_pieces(&self, holder: i64, visit: &mut dyn FnMut(Piece<'_>) -> Result<()>) -> Result<()>;

    /// True if holders of the identical box are replicas.
    fn has_replicas(&self) -> bool;

    /// The shape of the chunks, if the holders are all the chunks of a regular grid, in C order.
    fn chunks(&self) -> Option<&[i64]> {
        None
    }

    /// Check that the pieces hold every element of the tensor, and no element twice but as
    /// replicas.
    ///
    /// # Errors
    /// [`Error::BoxesOverlap`], [`Error::BoxMissing`]; what `poll` returns.
    fn check(&self, poll: Poll<'_>) -> Result<()>;

    /// The different boxes, to be found by position.
    ///
    /// # Errors
    /// [`Error::BoxesOverlap`]; [`Error::TooMany`] if there is no memory to list them; what `poll` returns.
    fn tiles(&self, poll: Poll<'_>) -> Result<Box<dyn Tiles + '_>> {
        Ok(Box::new(Listed::new(self.pieces(poll)?, self.has_replicas(), poll)?))
    }

    /// All pieces in one list.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for them; what `poll` returns.
    fn pieces(&self, poll: Poll<'_>) -> Result<Arc<Pieces>> {
        pieces_one_by_one(self, poll)
    }

    /// Fills `out` with the elements of every holder's own array.
    ///
    /// # Errors
    /// [`Error::Overflow`] if one has more than 2^63 - 1; as [`Tiling::array_shape`] if `out` is longer than the holders;
    /// what `poll` returns.
    fn array_sizes_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        let mut ticker = Ticker::new();
        for (holder, out) in out.iter_mut().enumerate() {
            ticker.tick(poll)?;
            *out = radix::product("the array of a holder", &self.array_shape(holder as i64)?)?;
        }
        Ok(())
    }

    /// Fills `out` with the elements of every holder's pieces.
    ///
    /// # Errors
    /// As [`Tiling::visit_pieces`] if `out` is longer than the holders; what `poll` returns.
    fn held_sizes_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        let mut ticker = Ticker::new();
        for (holder, out) in out.iter_mut().enumerate() {
            ticker.tick(poll)?;
            *out = 0;
            self.visit_pieces(holder as i64, &mut |piece| {
                *out = out.saturating_add(piece.region.elements()?);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// The tiling as a partition of which each device holds one box, if it is one: plans between two such are made in
    /// closed form.
    fn as_partition(self: Arc<Self>) -> Option<Arc<Partition>> {
        None
    }
}

/// The pieces of a tiling, holder by holder.
fn pieces_one_by_one(tiling: &(impl Tiling + ?Sized), poll: Poll<'_>) -> Result<Arc<Pieces>> {
    let mut pieces = Pieces::new(tiling.shape().len());
    for holder in 0..tiling.holders() {
        if (holder as usize).is_multiple_of(STEPS_PER_POLL) {
            poll()?;
        }
        tiling.visit_pieces(holder, &mut |piece| pieces.push(piece))?;
        pieces.end_holder()?;
    }
    Ok(Arc::new(pieces))
}

/// The number of elements of `shape`, once it is known to be a shape.
fn checked_shape(shape: &[i64]) -> Result<i64> {
    if let Some((dim, &size)) = shape.iter().enumerate().find(|&(_, &size)| size < 0) {
        return Err(Error::NegativeDim { dim, size });
    }
    radix::product("shape", shape)
}

/// The holder of this number, once it is known to be there.
fn checked_holder(holder: i64, holders: i64) -> Result<i64> {
    if holder < 0 || holder >= holders {
        return Err(Error::OutOfRange { what: "holder", position: None, value: holder, limit: holders });
    }
    Ok(holder)
}

#[cfg(test)]
pub(crate) mod tests;
