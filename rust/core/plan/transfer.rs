//! One box on its way from a holder to another.

use crate::{error::Result, region::Region, room};

/// A box of the tensor that goes from a piece of one holder to a piece of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer<'a> {
    /// The source's holder.
    pub source: i64,
    /// The number of the piece among the source holder's.
    pub source_piece: i64,
    /// The destination's holder.
    pub destination: i64,
    /// The number of the piece among the destination holder's.
    pub destination_piece: i64,
    /// The box, in the tensor.
    pub region: Region<'a>,
}

impl<'a> Transfer<'a> {
    /// The numbers of a transfer of boxes of `rank` dims in a list.
    #[must_use]
    pub fn row_length(rank: usize) -> usize {
        2 + 2 * rank
    }

    /// The transfer of a row of a list: source holder, destination holder, starts, stops. Lists have the numbers of the
    /// pieces beside them, or none if they are all 0.
    #[must_use]
    pub fn of_row(row: &'a [i64]) -> Self {
        Self {
            source: row[0],
            source_piece: 0,
            destination: row[1],
            destination_piece: 0,
            region: Region::of_row(&row[2..]),
        }
    }

    /// Writes the row of a list.
    pub fn write(&self, row: &mut [i64]) {
        let rank = self.region.rank();
        (row[0], row[1]) = (self.source, self.destination);
        row[2..2 + rank].copy_from_slice(self.region.start());
        row[2 + rank..].copy_from_slice(self.region.stop());
    }
}

/// Rows of zeros.
pub(super) fn zeros(rows: usize, row: usize) -> Result<Vec<i64>> {
    room::filled(0, rows.saturating_mul(row), format_args!("{rows} times {row} numbers"))
}
