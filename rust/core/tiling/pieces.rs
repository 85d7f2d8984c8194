//! Boxes of a tensor, and where their holders have them.

use crate::{
    error::Result,
    region::{Region, Regions},
    room::Room as _,
};

pub use crate::parallel::Poll;

/// The steps, of tens of nanoseconds each, after which a loop polls.
pub(crate) const STEPS_PER_POLL: usize = 1 << 14;

/// The place of a piece in its holder's own array.
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
    /// The place of the box in its holder's own array.
    pub place: Place<'a>,
}

/// The pieces of all holders of a tiling, in a list.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pieces {
    /// The start of each holder's pieces; one more entry than there are holders.
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
    /// [`Error::TooMany`](crate::error::Error::TooMany) if there is no memory for the list.
    pub fn one_each(regions: Regions) -> Result<Self> {
        let mut begins = Vec::new();
        reserve(&mut begins, regions.len().saturating_add(1))?;
        begins.extend(0..=regions.len());
        Ok(Self { begins, regions, starts: Vec::new(), offsets: Vec::new() })
    }

    /// Adds a piece of the holder at hand.
    ///
    /// # Errors
    /// [`Error::TooMany`](crate::error::Error::TooMany) if there is no memory for it.
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

    /// Room for `more` pieces in flat arrays.
    ///
    /// # Errors
    /// [`Error::TooMany`](crate::error::Error::TooMany) if there is no memory for them.
    pub(super) fn reserve_flat(&mut self, more: usize) -> Result<()> {
        self.regions.reserve(more)?;
        let missing = self.regions.len() - self.offsets.len();
        reserve(&mut self.offsets, more.saturating_add(missing))
    }

    /// Ends the holder at hand; the pieces that follow are the next one's.
    ///
    /// # Errors
    /// [`Error::TooMany`](crate::error::Error::TooMany) if there is no memory for it.
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

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// The range of the pieces of `holder` in the list.
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

/// Room for `more` entries.
fn reserve<T>(list: &mut Vec<T>, more: usize) -> Result<()> {
    list.room(more, format_args!("{more} entries of a list of pieces"))
}
