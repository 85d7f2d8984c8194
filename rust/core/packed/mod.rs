//! A layout with packed dims, applied to a shape.
//!
//! | module | answers |
//! |---|---|
//! | `locate` | global offset ↔ shard id and local offset |
//! | [`runs`] | the contiguous runs of a device |

mod locate;
pub mod runs;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::{
    error::{Error, Result},
    index::linear::Linear,
    layout::Layout,
    parallel::Poll,
    partition::{Applied, Bounds},
    radix, room,
    sections::{
        dim::Sections,
        part::{Digit, Interval, Part},
        spec::resolved,
    },
    uneven::{Dim as _, Uneven},
};

/// The numbers of a row of [`Packed::pieces_into`] for each dim: start, stop, and start in the holder's array.
pub const PER_DIM: usize = 3;

/// A partition whose shards may have several pieces.
///
/// ```
/// use shardwise_core::{
///     layout::Layout, mesh::Mesh, packed::Packed, uneven::Uneven,
///     sections::{DimSpec, Factor, PartSpec},
/// };
/// use std::sync::Arc;
/// // Three matrices of 4 heads of 2 rows, one after the other; each device is to have its heads of all three.
/// let mesh = Arc::new(Mesh::new(&["tp"], &[2])?);
/// let part = PartSpec {
///     factors: [3, 4, 2].map(Factor::Known).to_vec(),
///     cut: Some(1), axes: vec!["tp"], uneven: None, at_most: None, split: false, unit: None, pad: None,
/// };
/// let layout = Arc::new(Layout::packed(mesh, &[DimSpec::Parts(vec![part])], &[])?);
/// let packed = Packed::new(layout, &[24], Uneven::Even)?;
/// let rows: Vec<_> = packed.intervals(1)?[0].iter().map(|piece| (piece.start, piece.stop)).collect();
/// assert_eq!(rows, [(4, 8), (12, 16), (20, 24)]);
/// assert_eq!(packed.locate_one(13)?, (1, 5));
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
pub type Packed = Applied<Sections>;

impl Packed {
    /// The partition of a tensor of `shape`; dims that are not packed are cut as those of a [`Partition`].
    ///
    /// # Errors
    /// As [`Partition::new`]; [`Error::PartsSum`], [`Error::FreeFactor`], [`Error::PartIndivisible`] or [`Error::Part`]
    /// for parts that do not fit their dim; [`Error::Overflow`] if an array may have more than 2^63 - 1 elements.
    ///
    /// [`Partition`]: crate::partition::Partition
    /// [`Partition::new`]: crate::partition::Partition::new
    pub fn new(layout: Arc<Layout>, shape: &[i64], uneven: Uneven) -> Result<Self> {
        let packed = Self::of_dims(layout, shape, uneven, |layout, dim, n| sections(layout, dim, n, uneven))?;
        let longest: Vec<i64> = packed.dims().iter().map(Sections::longest).collect();
        radix::product("the largest shard", &longest)?;
        Ok(packed)
    }

    /// A device's intervals along each dim; its pieces are their products, in C order.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device, [`Error::TooMany`] if they are too many to list.
    pub fn intervals(&self, device: i64) -> Result<Vec<Vec<Interval>>> {
        let index = self.layout().shard_index(device)?;
        self.dims().iter().zip(index).map(|(dim, i)| dim.intervals(i)).collect()
    }

    /// The one box of a device, which starts and stops at the end of the tensor if the device holds nothing.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device, [`Error::ManyPieces`] if the device holds several.
    pub fn box_of(&self, device: i64) -> Result<Bounds> {
        let count = self.count(device)?;
        if count > 1 {
            return Err(Error::ManyPieces { device, count });
        }
        let dims = self.intervals(device)?;
        let side = |(dim, &n): (&Vec<Interval>, &i64)| dim.first().map_or((n, n), |piece| (piece.start, piece.stop));
        Ok(dims.iter().zip(self.shape()).map(side).collect())
    }

    /// The one box of a shard.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there is no such shard, [`Error::ManyPieces`] if its devices hold several.
    pub fn box_of_shard(&self, shard_id: i64) -> Result<Bounds> {
        self.box_of(self.layout().canonical_device(shard_id)?)
    }

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

    /// The number of pieces of a device.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device, [`Error::Overflow`].
    pub fn count(&self, device: i64) -> Result<i64> {
        let index = self.layout().shard_index(device)?;
        let counts: Vec<i64> = self.dims().iter().zip(index).map(|(dim, i)| dim.count(i)).collect();
        radix::product("the pieces of a device", &counts)
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

    /// Shows `visit` the products of a device's intervals, which are its pieces, in C order.
    pub fn visit(&self, dims: &[Vec<Interval>], mut visit: impl FnMut(&[Interval])) {
        let lists: Vec<_> = dims.iter().map(Vec::as_slice).collect();
        // The visit cannot fail.
        let _ = for_each_product(&lists, |pieces| {
            visit(pieces);
            Ok(())
        });
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

/// The number of devices in one turn.
const DEVICES: usize = 1 << 10;

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

/// Shows `visit` one entry of each list, in C order.
pub(crate) fn for_each_product(lists: &[&[Interval]], mut visit: impl FnMut(&[Interval]) -> Result<()>) -> Result<()> {
    if lists.iter().any(|list| list.is_empty()) {
        return Ok(());
    }
    let mut at = vec![0; lists.len()];
    let mut now: Vec<Interval> = lists.iter().map(|list| list[0]).collect();
    loop {
        visit(&now)?;
        let mut dim = lists.len();
        loop {
            if dim == 0 {
                return Ok(());
            }
            dim -= 1;
            at[dim] += 1;
            if at[dim] < lists[dim].len() {
                now[dim] = lists[dim][at[dim]];
                break;
            }
            at[dim] = 0;
            now[dim] = lists[dim][0];
        }
    }
}

/// The factors with the cut one and those after it multiplied out, if there are more shards than units and as many as a
/// multiple of them; else none.
fn units_split(dim: usize, part: usize, factors: &[i64], cut: Option<usize>, axes: &[i64]) -> Result<Option<Vec<i64>>> {
    let Some(cut) = cut else { return Ok(None) };
    let (units, shards) = (factors[cut], axes.iter().product::<i64>());
    if units == 0 || shards <= units || shards % units != 0 {
        return Ok(None);
    }
    let mut finer = factors[..cut].to_vec();
    finer.push(radix::product(&format!("dim {dim}: part {part}"), &factors[cut..])?);
    Ok(Some(finer))
}

/// Dim `dim` of the layout, of `n` elements.
fn sections(layout: &Layout, dim: usize, n: i64, uneven: Uneven) -> Result<Sections> {
    let sizes = layout.mesh().sizes();
    let shards = layout.num_shards()[dim];
    // What each axis counts in the dim's shard index.
    let spec = &layout.specs()[dim];
    let mut weights = vec![1; spec.len()];
    for i in (1..spec.len()).rev() {
        weights[i - 1] = weights[i] * sizes[spec[i]];
    }
    let digits = |axes: &[usize]| -> Vec<Digit> {
        let mut of_part = 1;
        let mut digits: Vec<Digit> = (axes.iter().rev())
            .map(|axis| {
                let of_dim = spec.iter().position(|other| other == axis).map_or(1, |i| weights[i]);
                let digit = Digit { of_dim, size: sizes[*axis], of_part };
                of_part *= sizes[*axis];
                digit
            })
            .collect();
        digits.reverse();
        digits
    };
    let Some(parts) = layout.parts(dim) else {
        let axes: Vec<i64> = spec.iter().map(|&axis| sizes[axis]).collect();
        let part =
            Part::new((dim, 0), 0, &[n], Some(0), &axes, digits(spec), uneven, (1, None)).map_err(
                |error| match error {
                    Error::PartIndivisible { dim, n, k, .. } => Error::Indivisible { dim, n, k },
                    other => other,
                },
            )?;
        return Sections::new(dim, n, shards, vec![part]);
    };
    let factors = resolved(dim, n, parts.iter().map(|part| part.factors.as_slice()))?;
    let mut base = 0;
    let mut all = Vec::with_capacity(parts.len());
    for (number, (part, factors)) in parts.iter().zip(&factors).enumerate() {
        let rule = part.uneven.unwrap_or(uneven);
        let finer = if part.split { units_split(dim, number, factors, part.cut, &part.sizes)? } else { None };
        let factors = finer.as_ref().unwrap_or(factors);
        let extras = (part.unit, part.pad);
        let made = Part::new((dim, number), base, factors, part.cut, &part.sizes, digits(&part.axes), rule, extras)?;
        base += made.elements();
        all.push(made);
    }
    Sections::new(dim, n, shards, all)
}
