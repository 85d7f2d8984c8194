//! The boxes, the pieces and their numbers of all devices, in arrays.

use super::{Packed, for_each_product};
use crate::{
    error::{Error, Result},
    index::linear::Linear,
    parallel::Poll,
    room,
    sections::{dim::Sections, part::Interval},
    uneven::Dim as _,
};

/// The numbers of a row of [`Packed::pieces_into`] for each dim: start, stop, and start in the holder's array.
pub const PER_DIM: usize = 3;

/// The number of devices in one turn.
const DEVICES: usize = 1 << 10;

impl Packed {
    /// Fills `out`, of (devices, dims, 2) in C order, with every device's one box.
    ///
    /// # Errors
    /// [`Error::ManyPieces`] if a device holds several, [`Error::Length`] if `out` has not one row per device; what `poll`
    /// returns.
    #[inline(never)]
    pub fn boxes_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        let row = 2 * self.dims().len();
        self.layout().check_out(out.len(), row)?;
        for (device, row) in out.chunks_exact_mut(row).enumerate() {
            if device % DEVICES == 0 {
                poll()?;
            }
            for (slot, bound) in row.iter_mut().zip(self.box_of(device as i64)?.into_iter().flat_map(<[i64; 2]>::from))
            {
                *slot = bound;
            }
        }
        Ok(())
    }

    /// Fills `out` with where the pieces of every device begin in the list of all, and where it ends: one more entry than
    /// there are devices.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` is of another length, [`Error::Overflow`] if they are over 2^63 - 1; what `poll` returns.
    #[inline(never)]
    pub fn begins_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        let devices = self.mesh().size() as usize;
        if out.len() != devices.saturating_add(1) {
            return Err(Error::Length {
                left: "out",
                left_len: out.len(),
                right: "the devices",
                right_len: devices + 1,
            });
        }
        out[0] = 0;
        self.products_into(&mut out[1..], poll, |dim, index| dim.count(index))?;
        let mut sum = 0_i64;
        for slot in &mut out[1..] {
            sum = sum
                .checked_add(*slot)
                .ok_or_else(|| Error::Overflow { what: "the number of all pieces".to_owned() })?;
            *slot = sum;
        }
        Ok(())
    }

    /// Fills `out` with the number of elements of every device's own array, padding included.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not one slot per device; what `poll` returns.
    #[inline(never)]
    pub fn elements_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        self.products_into(out, poll, Sections::extent)
    }

    /// Fills `out` with the number of elements of every device's pieces, without padding.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not one slot per device; what `poll` returns.
    #[inline(never)]
    pub fn held_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        self.products_into(out, poll, Sections::held)
    }

    /// Fills `out` with the product over the dims of what `of` says of each device's shard index there.
    fn products_into(&self, out: &mut [i64], poll: Poll<'_>, of: impl Fn(&Sections, i64) -> i64) -> Result<()> {
        self.layout().check_out(out.len(), 1)?;
        let tables = self.tables(of)?;
        let indices: Vec<Linear> = (0..self.dims().len()).map(|dim| self.layout().shard_index_function(dim)).collect();
        let any_zero = tables.iter().any(|table| table.contains(&0));
        let mut index = [0; DEVICES];
        for (turn, some) in out.chunks_mut(DEVICES).enumerate() {
            poll()?;
            some.fill(1);
            for (table, function) in tables.iter().zip(&indices) {
                if let [only] = table[..] {
                    some.iter_mut().for_each(|slot| *slot = times(*slot, only, any_zero));
                    continue;
                }
                let index = &mut index[..some.len()];
                function.fill((turn * DEVICES) as i64, index, 0, 1);
                for (slot, &at) in some.iter_mut().zip(&*index) {
                    *slot = times(*slot, table[at as usize], any_zero);
                }
            }
        }
        Ok(())
    }

    /// A table of `of` for every shard index of every dim.
    fn tables<T>(&self, of: impl Fn(&Sections, i64) -> T) -> Result<Vec<Vec<T>>> {
        (self.dims().iter())
            .map(|dim| {
                let mut table = room::list(dim.shards(), format_args!("{} shards along one dim", dim.shards()))?;
                table.extend((0..dim.shards()).map(|index| of(dim, index)));
                Ok(table)
            })
            .collect()
    }

    /// Fills `out`, of (pieces, dims, `columns`) in C order, with the pieces of all devices, in device-index order: start
    /// and stop along each dim, and, if `columns` is 3, the start in the device's own array.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not as many slots, [`Error::TooMany`] for more than there is memory for; what `poll`
    /// returns.
    #[inline(never)]
    pub fn pieces_into(&self, out: &mut [i64], columns: usize, poll: Poll<'_>) -> Result<()> {
        match columns {
            2 => self.rows_into::<2>(out, poll),
            PER_DIM => self.rows_into::<PER_DIM>(out, poll),
            given => Err(Error::OutOfRange { what: "columns", position: None, value: given as i64, limit: 4 }),
        }
    }

    fn rows_into<const C: usize>(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        let rank = self.dims().len();
        let devices = self.mesh().size();
        let tables = self.dims().iter().map(Table::new).collect::<Result<Vec<_>>>()?;
        let indices: Vec<Linear> = (0..rank).map(|dim| self.layout().shard_index_function(dim)).collect();
        let length = out.len();
        let wrong = || Error::Length { left: "out", left_len: length, right: "the pieces", right_len: 0 };
        let mut rest = out;
        let mut index = vec![[0; DEVICES]; rank];
        let mut first = 0;
        while first < devices {
            poll()?;
            let some = usize::try_from(devices - first).unwrap_or(DEVICES).min(DEVICES);
            for (index, function) in index.iter_mut().zip(&indices) {
                function.fill(first, &mut index[..some], 0, 1);
            }
            #[expect(clippy::needless_range_loop, reason = "it is a position in the index of every dim")]
            for device in 0..some {
                let lists = |dim: usize| tables[dim].of(index[dim][device] as usize);
                let count: usize = (0..rank).map(|dim| lists(dim).len()).product();
                let (rows, others) =
                    std::mem::take(&mut rest).split_at_mut_checked(count * rank * C).ok_or_else(wrong)?;
                rest = others;
                match rank {
                    1 => {
                        for (row, piece) in rows.chunks_exact_mut(C).zip(lists(0)) {
                            row.copy_from_slice(&piece.numbers()[..C]);
                        }
                    }
                    2 => {
                        let across = lists(1);
                        for (rows, down) in rows.chunks_exact_mut(2 * C * across.len().max(1)).zip(lists(0)) {
                            let down = down.numbers();
                            for (row, piece) in rows.chunks_exact_mut(2 * C).zip(across) {
                                row[..C].copy_from_slice(&down[..C]);
                                row[C..].copy_from_slice(&piece.numbers()[..C]);
                            }
                        }
                    }
                    _ => {
                        let lists: Vec<&[Interval]> = (0..rank).map(lists).collect();
                        let mut rows = rows.chunks_exact_mut((rank * C).max(1));
                        for_each_product(&lists, |pieces| {
                            let row = rows.next().ok_or_else(wrong)?;
                            for (slots, piece) in row.chunks_exact_mut(C).zip(pieces) {
                                slots.copy_from_slice(&piece.numbers()[..C]);
                            }
                            Ok(())
                        })?;
                    }
                }
            }
            first += some as i64;
        }
        if rest.is_empty() { Ok(()) } else { Err(wrong()) }
    }
}

/// The product of two sizes of which the one may be that of an array over all limits, of which another dim is empty.
#[inline]
fn times(product: i64, factor: i64, any_zero: bool) -> i64 {
    product.checked_mul(factor).unwrap_or(if any_zero { 0 } else { i64::MAX })
}

/// The intervals of all shards of a dim.
struct Table {
    begins: Vec<usize>,
    all: Vec<Interval>,
}

impl Table {
    fn new(dim: &Sections) -> Result<Self> {
        let count = (0..dim.shards()).fold(0_i64, |sum, index| sum.saturating_add(dim.count(index)));
        let what = format_args!("{count} pieces along one dim");
        let (mut begins, mut all) = (room::list(dim.shards().saturating_add(1), what)?, room::list(count, what)?);
        begins.push(0);
        for index in 0..dim.shards() {
            dim.visit(index, &mut |interval| all.push(interval));
            begins.push(all.len());
        }
        Ok(Self { begins, all })
    }

    fn of(&self, index: usize) -> &[Interval] {
        &self.all[self.begins[index]..self.begins[index + 1]]
    }
}
