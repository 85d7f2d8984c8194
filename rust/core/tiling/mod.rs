//! Who holds which boxes of a tensor (rule 2.10).
//!
//! A [`Tiling`] has holders (devices, ranks, files), known by their numbers, and for each the shape of its own array and
//! its pieces: boxes of the tensor, each with its place in that array.
//!
//! | module | answers |
//! |---|---|
//! | `partition` | a partition is a tiling in closed form: one piece for each device |
//! | `packed` | one with packed dims, with several pieces for each |
//! | [`grid`] | a regular grid of chunks, each a holder (zarr) |
//! | [`flat`] | ranges of the flattened tensor, each a holder's 1-D array (FSDP, ZeRO) |
//! | [`boxes`] | any boxes |
//! | [`tiles`] | the boxes of a tiling found by position, for plans |
//! | [`check`] | whether boxes share elements, and which elements none of them holds |
//!
//! **Replicas.** Holders of the identical box are replicas if the tiling says that it has replicas. Whatever else two
//! pieces have in common is an error.

use std::{fmt::Debug, sync::Arc};

use crate::{
    error::{Error, Result},
    partition::Partition,
    region::{Region, Regions},
};

pub(crate) mod balance;
pub mod boxes;
pub(crate) mod cells;
pub mod check;
mod edges;
pub mod flat;
pub mod grid;
pub mod listed;
mod packed;
mod partition;
pub(crate) mod shards;
pub mod tiles;
mod tree;

pub use crate::parallel::Poll;
use listed::Listed;
use tiles::Tiles;

/// After how many steps of tens of nanoseconds a loop polls.
pub(crate) const STEPS_PER_POLL: usize = 1 << 14;

/// Where a piece lies in its holder's own array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place<'a> {
    /// The array has the tensor's rank, and the piece is a box of it that starts here.
    At(&'a [i64]),
    /// The array has one dim, and the piece's elements lie there in C order, one after the other, from here on.
    Flat(i64),
}

/// A box of the tensor, and where its holder has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece<'a> {
    /// The box of the tensor.
    pub region: Region<'a>,
    /// Where it lies in its holder's own array.
    pub place: Place<'a>,
}

/// Who holds what of one tensor.
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

    /// Whether holders of the identical box are replicas.
    fn has_replicas(&self) -> bool;

    /// That the pieces hold every element of the tensor, and no element twice but as replicas.
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

    /// The tiling as a partition of which each device holds one box, if it is one: plans between two such are made in
    /// closed form.
    fn as_partition(self: Arc<Self>) -> Option<Arc<Partition>> {
        None
    }
}

/// The pieces of all holders of a tiling, in a list.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pieces {
    /// Where each holder's pieces begin; one more entry than there are holders.
    begins: Vec<usize>,
    regions: Regions,
    /// For each piece, where it starts in its holder's array, dim by dim; empty as long as all start at its corner.
    starts: Vec<i64>,
    /// For each piece, its offset in a flat array, or -1; empty as long as there are none.
    offsets: Vec<i64>,
}

impl Pieces {
    /// No holders of a tensor of `rank` dims.
    #[must_use]
    pub fn new(rank: usize) -> Self {
        Self { begins: vec![0], regions: Regions::new(rank), starts: Vec::new(), offsets: Vec::new() }
    }

    /// One piece for each box, at the corner of its holder's array.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for the list.
    pub fn one_each(regions: Regions) -> Result<Self> {
        let mut begins = Vec::new();
        reserve(&mut begins, regions.len().saturating_add(1))?;
        begins.extend(0..=regions.len());
        Ok(Self { begins, regions, starts: Vec::new(), offsets: Vec::new() })
    }

    /// Adds a piece of the holder at hand.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for it.
    pub fn push(&mut self, piece: Piece<'_>) -> Result<()> {
        let (count, rank) = (self.regions.len(), self.regions.rank());
        self.regions.push(piece.region)?;
        if let Place::At(start) = piece.place
            && (!self.starts.is_empty() || start.iter().any(|&at| at != 0))
        {
            let more = (count + 1) * rank - self.starts.len();
            reserve(&mut self.starts, more)?;
            self.starts.resize(count * rank, 0);
            self.starts.extend_from_slice(start);
        } else if !self.starts.is_empty() {
            reserve(&mut self.starts, rank)?;
            self.starts.resize((count + 1) * rank, 0);
        }
        let offset = if let Place::Flat(offset) = piece.place { offset } else { -1 };
        if offset >= 0 || !self.offsets.is_empty() {
            let more = count + 1 - self.offsets.len();
            reserve(&mut self.offsets, more)?;
            self.offsets.resize(count, -1);
            self.offsets.push(offset);
        }
        Ok(())
    }

    /// Ends the holder at hand; the pieces that follow are the next one's.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for it.
    pub fn end_holder(&mut self) -> Result<()> {
        reserve(&mut self.begins, 1)?;
        self.begins.push(self.regions.len());
        Ok(())
    }

    /// The number of holders.
    #[must_use]
    pub fn holders(&self) -> usize {
        self.begins.len() - 1
    }

    /// The number of pieces.
    #[must_use]
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Where the pieces of `holder` are in the list.
    #[must_use]
    pub fn of_holder(&self, holder: usize) -> std::ops::Range<usize> {
        self.begins[holder]..self.begins[holder + 1]
    }

    /// The place in the list of a holder's piece.
    #[must_use]
    pub fn position(&self, holder: i64, piece: i64) -> usize {
        self.begins[holder as usize] + piece as usize
    }

    /// The holder of the piece at `position` of the list, and its number among the holder's pieces.
    #[must_use]
    pub fn owner(&self, position: usize) -> (i64, i64) {
        if self.begins.get(position) == Some(&position) && self.begins.get(position + 1) > Some(&position) {
            return (position as i64, 0); // one piece each, mostly
        }
        let holder = self.begins.partition_point(|&begin| begin <= position) - 1;
        (holder as i64, (position - self.begins[holder]) as i64)
    }

    /// The boxes.
    #[must_use]
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// The piece at `position` of the list; `origin` are as many zeros as there are dims.
    #[must_use]
    pub fn get<'a>(&'a self, position: usize, origin: &'a [i64]) -> Piece<'a> {
        let rank = self.regions.rank();
        let place = match self.offsets.get(position) {
            Some(&offset) if offset >= 0 => Place::Flat(offset),
            _ => Place::At(self.starts.get(position * rank..(position + 1) * rank).unwrap_or(origin)),
        };
        Piece { region: self.regions.get(position), place }
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

/// Room for `more` entries.
fn reserve<T>(list: &mut Vec<T>, more: usize) -> Result<()> {
    list.try_reserve(more).map_err(|_| Error::TooMany { what: format!("{more} entries of a list of pieces") })
}

/// That `shape` is one, and the number of its elements.
fn checked_shape(shape: &[i64]) -> Result<i64> {
    if let Some((dim, &size)) = shape.iter().enumerate().find(|&(_, &size)| size < 0) {
        return Err(Error::NegativeDim { dim, size });
    }
    crate::index::radix::product("shape", shape)
}

/// That there is a holder of this number.
fn checked_holder(holder: i64, holders: i64) -> Result<i64> {
    if holder < 0 || holder >= holders {
        return Err(Error::OutOfRange { what: "holder", position: None, value: holder, limit: holders });
    }
    Ok(holder)
}

#[cfg(test)]
pub(crate) mod tests;
