//! A layout with packed dims, applied to a shape.
//!
//! | module | answers |
//! |---|---|
//! | `locate` | global offset ↔ shard id and local offset |
//! | [`runs`] | the contiguous runs of a device |
//! | `tables` | the boxes, the pieces and their numbers of all devices, in arrays |

mod locate;
pub mod runs;
mod tables;

#[cfg(test)]
mod tests;

pub use tables::PER_DIM;

use std::sync::Arc;

use crate::{
    error::{Error, Result},
    layout::Layout,
    partition::{Applied, Bounds},
    radix,
    sections::{
        dim::Sections,
        part::{Digit, Interval, Part},
        spec::resolved,
    },
    uneven::Uneven,
};

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

    /// The number of pieces of a device.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device, [`Error::Overflow`].
    pub fn count(&self, device: i64) -> Result<i64> {
        let index = self.layout().shard_index(device)?;
        let counts: Vec<i64> = self.dims().iter().zip(index).map(|(dim, i)| dim.count(i)).collect();
        radix::product("the pieces of a device", &counts)
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
