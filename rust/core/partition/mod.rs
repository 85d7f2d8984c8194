//! A partition: a layout applied to a shape, so that every shard has its box (rule 2.3).

use std::sync::Arc;

use crate::{
    error::{Error, Result},
    index::linear::Linear,
    layout::Layout,
    mesh::Mesh,
    parallel::{self, Poll},
    radix, room,
    uneven::{Cut, Dim, Uneven},
};

/// Start and stop for each dim, half open.
pub type Bounds = Vec<(i64, i64)>;

/// A layout applied to a shape, with a `D` for each dim that says how it is cut: a [`Partition`], or a
/// [`Packed`](crate::packed::Packed) one. Making one, and asking it for one device, costs O(rank), whatever the mesh's size.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Applied<D> {
    layout: Arc<Layout>,
    shape: Vec<i64>,
    uneven: Uneven,
    dims: Vec<D>,
    size: i64,
    strides: Vec<i64>,
}

/// A layout without packed dims, applied to a shape: every shard is one box.
pub type Partition = Applied<Cut>;

impl<D> Applied<D> {
    /// A tensor of `shape` whose dims are cut as `dim` says, given the number of each and its elements.
    ///
    /// # Errors
    /// [`Error::Rank`] if the shape has another rank than the layout, [`Error::NegativeDim`], [`Error::Overflow`] if
    /// it has more than 2^63 - 1 elements; what `dim` returns.
    pub(crate) fn of_dims(
        layout: Arc<Layout>,
        shape: &[i64],
        uneven: Uneven,
        mut dim: impl FnMut(&Layout, usize, i64) -> Result<D>,
    ) -> Result<Self> {
        if shape.len() != layout.rank() {
            return Err(Error::Rank { given: shape.len(), rank: layout.rank() });
        }
        if let Some((dim, &size)) = shape.iter().enumerate().find(|&(_, &size)| size < 0) {
            return Err(Error::NegativeDim { dim, size });
        }
        let size = radix::product("shape", shape)?;
        let dims = shape.iter().enumerate().map(|(i, &n)| dim(&layout, i, n)).collect::<Result<_>>()?;
        Ok(Self { shape: shape.to_vec(), uneven, dims, size, strides: radix::strides(shape), layout })
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The mesh of the layout.
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        self.layout.mesh()
    }

    /// The tensor's shape.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// The rule by which dims that do not divide are cut, and parts that do not say one.
    #[must_use]
    pub fn uneven(&self) -> Uneven {
        self.uneven
    }

    /// The cut of each dim.
    #[must_use]
    pub fn dims(&self) -> &[D] {
        &self.dims
    }

    /// The number of elements of the tensor.
    #[must_use]
    pub fn size(&self) -> i64 {
        self.size
    }

    /// The tensor's row-major strides, in elements.
    #[must_use]
    pub fn strides(&self) -> &[i64] {
        &self.strides
    }
}

impl<D: Dim> Applied<D> {
    /// The shape of a device's own array: of its shard, with the padding of packed dims.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device.
    pub fn array_shape(&self, device: i64) -> Result<Vec<i64>> {
        let index = self.layout.shard_index(device)?;
        Ok(self.dims.iter().zip(index).map(|(dim, i)| dim.extent(i)).collect())
    }

    /// The largest extent of an array along each dim.
    #[must_use]
    pub fn largest_shape(&self) -> Vec<i64> {
        self.dims.iter().map(Dim::largest).collect()
    }
}

impl Partition {
    /// The partition of a tensor of `shape`.
    ///
    /// # Errors
    /// [`Error::Rank`] if the shape has another rank than the layout, [`Error::NegativeDim`], [`Error::Overflow`] if
    /// it has more than 2^63 - 1 elements, [`Error::Indivisible`] under [`Uneven::Even`], [`Error::PackedLayout`].
    pub fn new(layout: Arc<Layout>, shape: &[i64], uneven: Uneven) -> Result<Self> {
        Self::of_dims(layout, shape, uneven, |layout, dim, n| match layout.parts(dim) {
            Some(_) => Err(Error::PackedLayout),
            None => Cut::new(dim, n, &layout.axis_sizes()[dim], uneven),
        })
    }

    /// The partition of which dim `i` is cut by `cuts[i]`, into as many shards as the layout says.
    pub(crate) fn of_cuts(layout: Arc<Layout>, shape: &[i64], cuts: &[Cut]) -> Result<Self> {
        debug_assert!(cuts.iter().map(Cut::shards).eq(layout.num_shards().iter().copied()));
        Self::of_dims(layout, shape, Uneven::Ceil, |_, dim, _| Ok(cuts[dim].clone()))
    }

    /// The box of the tensor that the device holds.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device.
    pub fn box_of(&self, device: i64) -> Result<Bounds> {
        let index = self.layout.shard_index(device)?;
        Ok(self.dims.iter().zip(index).map(|(cut, i)| cut.bounds(i)).collect())
    }

    /// The box of the shard `shard_id`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there is no such shard.
    pub fn box_of_shard(&self, shard_id: i64) -> Result<Bounds> {
        let index = radix::unravel(self.layout.check_shard("shard_id", shard_id)?, self.layout.num_shards());
        Ok(self.dims.iter().zip(index).map(|(cut, i)| cut.bounds(i)).collect())
    }

    /// Fills `out`, of (devices, dims, 2) in C order, with start and stop of every device's box.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not as many elements; [`Error::TooMany`] if there is no memory for the bounds of
    /// the shards along each dim; what `poll` returns.
    #[inline(never)]
    pub fn boxes_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        let row = 2 * self.shape.len();
        self.layout.check_out(out.len(), row)?;
        if row == 0 {
            return Ok(());
        }
        let columns: Vec<(Linear, Vec<(i64, i64)>)> = (0..self.shape.len())
            .map(|dim| {
                let cut = &self.dims[dim];
                let mut bounds = room::list(cut.shards(), format_args!("the {} shards along dim {dim}", cut.shards()))?;
                bounds.extend((0..cut.shards()).map(|i| cut.bounds(i)));
                Ok((self.layout.shard_index_function(dim), bounds))
            })
            .collect::<Result<_>>()?;
        let devices_per_piece = (parallel::PIECE / row).max(1);
        let pieces = out.chunks_mut(devices_per_piece * row).enumerate();
        let elements = self.mesh().size() as usize * row;
        parallel::for_each(elements, pieces, poll, |(number, piece)| {
            let start = (number * devices_per_piece) as i64;
            for (dim, (index, bounds)) in columns.iter().enumerate() {
                index.fill(start, piece, 2 * dim, row);
                for device in piece.chunks_exact_mut(row) {
                    let (from, to) = bounds[device[2 * dim] as usize];
                    (device[2 * dim], device[2 * dim + 1]) = (from, to);
                }
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests;
