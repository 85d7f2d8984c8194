//! The transfers of a plan and the boxes that stay, as rows of numbers.

use super::{
    End, Plan, Transfers,
    places::{Places, Seen},
    transfer::{Transfer, zeros},
};
use crate::{
    error::{Error, Result},
    parallel::Poll,
};

impl Plan {
    /// The transfers as [`Self::transfers_into`] gives them, in memory of their own.
    ///
    /// # Errors
    /// [`Error::TooMany`] if they are too many for the memory; what `poll` returns.
    pub fn transfer_rows(&self, poll: Poll<'_>) -> Result<Vec<i64>> {
        let mut rows = zeros(self.transfers(), self.row())?;
        self.transfers_into(&mut rows, poll)?;
        Ok(rows)
    }

    /// The boxes that stay as [`Self::kept_into`] gives them, in memory of their own.
    ///
    /// # Errors
    /// [`Error::TooMany`] if they are too many for the memory.
    pub fn kept_rows(&self) -> Result<Vec<i64>> {
        let mut rows = zeros(self.kept(), self.row())?;
        self.kept_into(&mut rows)?;
        Ok(rows)
    }

    /// Fills `out`, of ([`Self::transfers`], [`Self::row`]), in the order of the destination holders.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not as many elements; what `poll` returns.
    #[inline(never)]
    pub fn transfers_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        check_length(out, self.transfers() * self.row())?;
        match &self.transfers {
            Transfers::Closed(closed) => closed.rows_into(out, poll),
            Transfers::Listed(listed) => {
                out.copy_from_slice(listed.moved.rows());
                Ok(())
            }
        }
    }

    /// Fills `out`, of ([`Self::kept`], [`Self::row`]), with the boxes that stay with their holder.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not as many elements.
    #[inline(never)]
    pub fn kept_into(&self, out: &mut [i64]) -> Result<()> {
        check_length(out, self.kept() * self.row())?;
        let mut rows = out.chunks_exact_mut(self.row());
        self.visit_kept(0..self.destination.holders() as usize, |transfer| {
            rows.next().into_iter().for_each(|row| transfer.write(row));
            Ok(())
        })
    }

    /// Fills `out`, of ([`Self::transfers`], 2), with the numbers of the pieces: the source holder's, and the destination
    /// holder's.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not as many elements.
    #[inline(never)]
    pub fn pieces_into(&self, out: &mut [i64]) -> Result<()> {
        check_length(out, 2 * self.transfers())?;
        match &self.transfers {
            Transfers::Closed(_) => out.fill(0),
            Transfers::Listed(listed) => listed.moved.pieces_into(out),
        }
        Ok(())
    }

    /// The same for the boxes that stay: ([`Self::kept`], 2).
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not as many elements.
    #[inline(never)]
    pub fn kept_pieces_into(&self, out: &mut [i64]) -> Result<()> {
        check_length(out, 2 * self.kept())?;
        match &self.transfers {
            Transfers::Closed(_) => out.fill(0),
            Transfers::Listed(listed) => listed.kept.pieces_into(out),
        }
        Ok(())
    }

    /// Fills `out`, of ([`Self::transfers`], dims, 2), or of ([`Self::kept`], dims, 2) if `kept`, with the bounds of each box
    /// in what the pieces of one end are seen in. `places` are those of that end, if they are known: for a few of many
    /// holders it takes less time to look at these.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not as many elements; what `poll` returns.
    #[inline(never)]
    pub fn local_boxes_into(
        &self,
        end: End,
        kept: bool,
        places: Option<&Places>,
        out: &mut [i64],
        poll: Poll<'_>,
    ) -> Result<()> {
        let row = 2 * self.destination.shape().len();
        check_length(out, row * if kept { self.kept() } else { self.transfers() })?;
        let tiling = self.end(end);
        let mut rows = out.chunks_exact_mut(row.max(1));
        let mut write = |transfer: Transfer<'_>| {
            let (holder, piece) = match end {
                End::Source => (transfer.source, transfer.source_piece),
                End::Destination => (transfer.destination, transfer.destination_piece),
            };
            let Some(row) = rows.next() else { return Ok(()) }; // boxes of no dims
            match places {
                Some(places) => transfer.region.bounds_into(places.origin(holder, piece), row),
                None => transfer.region.bounds_into(&Seen::new(&**tiling, holder, piece)?.origin, row),
            }
            Ok(())
        };
        let all = 0..self.destination.holders() as usize;
        if kept { self.visit_kept(all, &mut write) } else { self.visit_transfers(all, poll, &mut write) }
    }
}

fn check_length(out: &[i64], expected: usize) -> Result<()> {
    if out.len() != expected {
        return Err(Error::Length { left: "out", left_len: out.len(), right: "rows", right_len: expected });
    }
    Ok(())
}
