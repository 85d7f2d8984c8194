//! The transfers between any two tilings, found box by box.
//!
//! For each piece of a destination holder the source is asked which of its tiles lie under it: each of them is a transfer,
//! except what the holder has itself. The source's tiles share no element, so a piece is there if the volumes add up.

use std::ops::Range;

use crate::{
    error::{Error, Result},
    plan::transfer::Transfer,
    region::{Region, Regions},
    room::Room as _,
    tiling::{
        Pieces, Poll,
        check::missing,
        tiles::{Held, Ticker, Tiles},
    },
};

/// The list that there may be no room for here.
const TRANSFERS: &str = "the transfers";

/// For how many transfers there is room at once at most, before they are known.
const LARGEST_GUESS: usize = 1 << 18;

/// All transfers, and all boxes that stay.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) moved: List,
    pub(super) kept: List,
}

/// Transfers in the order of their destination holders.
#[derive(Debug)]
pub(super) struct List {
    rank: usize,
    rows: Vec<i64>,
    /// The numbers of the source's and the destination's piece; empty as long as all are 0.
    pieces: Vec<[u32; 2]>,
}

/// A box that a destination holder needs, found in the source.
pub(super) struct Found<'a> {
    pub(super) tile: i64,
    pub(super) addend: usize,
    /// The piece in which the holder has it itself.
    pub(super) own: Option<Held>,
    pub(super) destination: usize,
    pub(super) destination_piece: usize,
    pub(super) region: Region<'a>,
}

/// Shows `visit` what the holders of `pieces` need, in order, for each addend; `same` as in [`super::Plan::new`].
pub(super) fn walk(
    tiles: &dyn Tiles,
    pieces: &Pieces,
    same: &[i64],
    poll: Poll<'_>,
    mut visit: impl FnMut(Found<'_>) -> Result<()>,
) -> Result<()> {
    let mut finder = tiles.finder();
    let (addends, mut ticker) = (tiles.addends(), Ticker::new());
    for (destination, &twin) in same.iter().enumerate() {
        for (destination_piece, position) in pieces.of_holder(destination).enumerate() {
            ticker.tick(poll)?;
            let whole = pieces.regions().get(position);
            if whole.is_empty() {
                continue;
            }
            let mut left = whole.volume();
            finder.under(whole, &mut |tile, region| {
                left -= region.volume();
                let own = if twin < 0 { None } else { tiles.held_by(tile, twin) };
                for addend in 0..addends {
                    ticker.tick(poll)?;
                    let own = own.filter(|own| own.addend == addend as i64);
                    visit(Found { tile, addend, own, destination, destination_piece, region })?;
                }
                Ok(())
            })?;
            if left != 0 {
                return Err(not_held(tiles, destination, whole, poll));
            }
        }
    }
    Ok(())
}

impl Listed {
    /// The transfers from the holders of `tiles` to those of `pieces`, sent by whom `sender` names.
    pub(super) fn new(
        tiles: &dyn Tiles,
        pieces: &Pieces,
        same: &[i64],
        poll: Poll<'_>,
        mut sender: impl FnMut(&Found<'_>) -> Result<Held>,
    ) -> Result<Self> {
        let rank = pieces.regions().rank();
        let (mut moved, mut kept) = (List::new(rank), List::new(rank));
        // A guess: each transfer begins where a box of either side does, mostly. What is not used costs nothing.
        let guess = tiles.count().saturating_add(pieces.len()).min(LARGEST_GUESS);
        moved.rows.room(guess * Transfer::row_length(rank), TRANSFERS)?;
        walk(tiles, pieces, same, poll, |found| {
            let to = (found.destination, found.destination_piece);
            match found.own {
                Some(own) => kept.push(own, to, found.region),
                None => moved.push(sender(&found)?, to, found.region),
            }
        })?;
        Ok(Self { moved, kept })
    }
}

/// The error that names what the source lacks of a box.
fn not_held(tiles: &dyn Tiles, holder: usize, region: Region<'_>, poll: Poll<'_>) -> Error {
    let mut held = Regions::new(region.rank());
    let gap = (tiles.finder())
        .under(region, &mut |_, common| held.push(common))
        .and_then(|()| missing(region, held.iter(), poll));
    match gap {
        Ok(gap) => {
            let (start, stop) = gap.unwrap_or_else(|| (region.start().to_vec(), region.stop().to_vec()));
            Error::NotHeld { holder, start, stop }
        }
        Err(error) => error,
    }
}

impl List {
    fn new(rank: usize) -> Self {
        Self { rank, rows: Vec::new(), pieces: Vec::new() }
    }

    fn push(&mut self, held: Held, (destination, piece): (usize, usize), common: Region<'_>) -> Result<()> {
        let row = Transfer::row_length(self.rank);
        self.rows.room(row, TRANSFERS)?;
        self.rows.extend_from_slice(&[held.holder, destination as i64]);
        self.rows.extend_from_slice(common.start());
        self.rows.extend_from_slice(common.stop());
        if held.piece != 0 || piece != 0 || !self.pieces.is_empty() {
            let before = self.rows.len() / row - 1;
            self.pieces.room(before + 1 - self.pieces.len(), TRANSFERS)?;
            self.pieces.resize(before, [0, 0]);
            self.pieces.push([held.piece as u32, piece as u32]);
        }
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len() / Transfer::row_length(self.rank)
    }

    pub(super) fn rows(&self) -> &[i64] {
        &self.rows
    }

    pub(super) fn get(&self, number: usize) -> Transfer<'_> {
        let row = Transfer::row_length(self.rank);
        let mut transfer = Transfer::of_row(&self.rows[number * row..(number + 1) * row]);
        if let Some(&[source, destination]) = self.pieces.get(number) {
            (transfer.source_piece, transfer.destination_piece) = (i64::from(source), i64::from(destination));
        }
        transfer
    }

    /// The first transfer to this destination holder, or to one behind it.
    fn first_to(&self, holder: usize) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            if (self.get(middle).destination as usize) < holder { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// The range of the transfers that go to a destination holder.
    pub(super) fn of_holder(&self, holder: usize) -> Range<usize> {
        self.first_to(holder)..self.first_to(holder + 1)
    }

    /// Shows `visit` the transfers to some of the destination holders.
    pub(super) fn visit(&self, holders: Range<usize>, visit: impl FnMut(Transfer<'_>) -> Result<()>) -> Result<()> {
        let here = (self.first_to(holders.start)..self.len()).map(|number| self.get(number));
        here.take_while(|transfer| holders.contains(&(transfer.destination as usize))).try_for_each(visit)
    }

    pub(super) fn pieces_into(&self, out: &mut [i64]) {
        out.fill(0);
        for (out, pieces) in out.chunks_exact_mut(2).zip(&self.pieces) {
            (out[0], out[1]) = (i64::from(pieces[0]), i64::from(pieces[1]));
        }
    }
}
