//! The place of a transfer's box in the arrays of its two holders.
//!
//! A piece is seen through a *window* on its holder's array. If the array has the tensor's rank, the window is all of it.
//! If it has one dim, the window is the piece's part of it, in the shape of the piece. The box then lies in the window as
//! it lies in the tensor, except that it counts from another origin.

use crate::{
    error::{Error, Result},
    region::Region,
    room::{self, Room as _},
    tiling::{Pieces, Place, Poll, Tiling},
};

/// The places of all pieces of a tiling.
#[derive(Debug)]
pub struct Places {
    pieces: std::sync::Arc<Pieces>,
    rank: usize,
    /// For each piece and dim, the position in the tensor that is position 0 of the window.
    origins: Vec<i64>,
    /// For each piece, its offset in a flat array, or -1; empty if no array is flat.
    offsets: Vec<i64>,
}

/// A holder's array, as a piece of it is seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Window<'a> {
    /// The whole array.
    Whole,
    /// The elements from `offset` on of an array of one dim, in the shape of the piece.
    Flat {
        /// The start of the piece.
        offset: i64,
        /// The piece.
        piece: Region<'a>,
    },
}

/// The place of one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The position in the tensor, dim by dim, that is position 0 of the window.
    pub origin: Vec<i64>,
    /// If the array is flat, the offset of the piece in it, and its extents.
    pub flat: Option<(i64, Vec<i64>)>,
}

impl Seen {
    /// The place of the piece number `piece` of `holder`; costs no more than to visit the holder's
    /// pieces.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] or [`Error::DeviceIndex`] if there is no such holder or piece.
    pub fn new(tiling: &dyn Tiling, holder: i64, piece: i64) -> Result<Self> {
        let (mut found, mut count) = (None, 0);
        tiling.visit_pieces(holder, &mut |one| {
            if count == piece {
                found = Some(match one.place {
                    Place::At(local) => {
                        let sides = one.region.start().iter().zip(local);
                        Self { origin: sides.map(|(start, local)| start - local).collect(), flat: None }
                    }
                    Place::Flat(offset) => {
                        let flat = Some((offset, one.region.extents().collect()));
                        Self { origin: one.region.start().to_vec(), flat }
                    }
                });
            }
            count += 1;
            Ok(())
        })?;
        found.ok_or(Error::OutOfRange { what: "piece", position: None, value: piece, limit: count })
    }
}

impl Places {
    /// The places of the pieces of `tiling`.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for them; what `poll` returns.
    pub fn new(tiling: &dyn Tiling, poll: Poll<'_>) -> Result<Self> {
        let pieces = tiling.pieces(poll)?;
        let rank = tiling.shape().len();
        let what = format_args!("the places of {} pieces", pieces.len());
        let (mut origins, mut offsets) = (room::list(pieces.len().saturating_mul(rank), what)?, Vec::new());
        let zeros = vec![0; rank];
        for position in 0..pieces.len() {
            let piece = pieces.get(position, &zeros);
            match piece.place {
                Place::At(local) => {
                    origins.extend(piece.region.start().iter().zip(local).map(|(start, local)| start - local));
                    if !offsets.is_empty() {
                        offsets.push(-1);
                    }
                }
                Place::Flat(offset) => {
                    origins.extend_from_slice(piece.region.start());
                    if offsets.is_empty() {
                        offsets.room(pieces.len(), what)?;
                        offsets.resize(position, -1);
                    }
                    offsets.push(offset);
                }
            }
        }
        Ok(Self { pieces, rank, origins, offsets })
    }

    /// The position in the tensor, dim by dim, that is position 0 of a piece's window.
    #[must_use]
    #[inline(always)]
    pub fn origin(&self, holder: i64, piece: i64) -> &[i64] {
        let position = self.pieces.position(holder, piece);
        &self.origins[position * self.rank..(position + 1) * self.rank]
    }

    /// The window of a piece.
    #[must_use]
    pub fn window(&self, holder: i64, piece: i64) -> Window<'_> {
        let position = self.pieces.position(holder, piece);
        match self.offsets.get(position) {
            Some(&offset) if offset >= 0 => Window::Flat { offset, piece: self.pieces.regions().get(position) },
            _ => Window::Whole,
        }
    }

    /// True if any array is flat.
    #[must_use]
    pub fn has_flat(&self) -> bool {
        !self.offsets.is_empty()
    }

    /// The pieces.
    #[must_use]
    pub fn pieces(&self) -> &Pieces {
        &self.pieces
    }
}
