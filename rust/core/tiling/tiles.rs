//! The different boxes of a tiling, found by position.
//!
//! A *tile* is a box that one holder holds, or several replicas. For a plan each tiling says which tiles lie under a box,
//! and which of a tile's replicas is to send next: in closed form for the shards of a partition and the chunks of a grid,
//! and for boxes in a list by the edges of the grid that they form, or by a tree where they form none.

use crate::{
    error::Result,
    region::Region,
    tiling::{Poll, STEPS_PER_POLL},
};

/// The tiles of one tiling.
pub trait Tiles: Send + Sync {
    /// The number of partial sums that make one value: the holders of a tile's different addends
    /// hold the same box.
    fn addends(&self) -> usize {
        1
    }

    /// The number of tiles.
    fn count(&self) -> usize;

    /// A finder of the tiles under boxes, one box after another.
    fn finder(&self) -> Box<dyn Finder + '_>;

    /// A chooser of senders.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for what the holders have sent.
    fn senders(&self) -> Result<Box<dyn Senders + '_>>;

    /// All who hold an addend of a tile.
    ///
    /// # Errors
    /// [`Error::TooMany`] if they are too many to list.
    fn replicas(&self, tile: i64, addend: usize) -> Result<Vec<i64>>;

    /// The piece in which `holder` holds the tile, if it does.
    fn held_by(&self, tile: i64, holder: i64) -> Option<Held>;
}

impl<T: Tiles + ?Sized> Tiles for &T {
    fn addends(&self) -> usize {
        (**self).addends()
    }

    fn count(&self) -> usize {
        (**self).count()
    }

    fn finder(&self) -> Box<dyn Finder + '_> {
        (**self).finder()
    }

    fn senders(&self) -> Result<Box<dyn Senders + '_>> {
        (**self).senders()
    }

    fn replicas(&self, tile: i64, addend: usize) -> Result<Vec<i64>> {
        (**self).replicas(tile, addend)
    }

    fn held_by(&self, tile: i64, holder: i64) -> Option<Held> {
        (**self).held_by(tile, holder)
    }
}

/// Finds the tiles under boxes. It remembers what the last one needed: neighbours cost less.
pub trait Finder {
    /// Shows `visit` the tiles that share elements with a box that is not empty, and what each has in common with it, in
    /// the order of the tiles' numbers.
    ///
    /// # Errors
    /// What `visit` returns.
    fn under(&mut self, region: Region<'_>, visit: &mut dyn FnMut(i64, Region<'_>) -> Result<()>) -> Result<()>;
}

/// Chooses who sends, so that the load is spread over the replicas.
pub trait Senders {
    /// The sender of the next `volume` elements of an addend of a tile.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for the loads.
    fn next(&mut self, tile: i64, addend: usize, volume: i64) -> Result<Held>;
}

/// A tile as a piece of one of its holders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The holder.
    pub holder: i64,
    /// The piece's number among the holder's.
    pub piece: i64,
    /// The number of the addend that it is.
    pub addend: i64,
}

/// Polls once in so many calls.
pub(crate) struct Ticker(usize);

impl Ticker {
    pub(crate) fn new() -> Self {
        Self(0)
    }

    pub(crate) fn tick(&mut self, poll: Poll<'_>) -> Result<()> {
        self.0 += 1;
        if self.0.is_multiple_of(STEPS_PER_POLL) { poll() } else { Ok(()) }
    }
}
