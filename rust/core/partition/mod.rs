//! A partition: a layout applied to a shape, so that every shard has its box (rule 2.3).

use std::sync::Arc;

use crate::{
    error::{Error, Result},
    index::linear::Linear,
    layout::{AxisRole, Layout},
    mesh::Mesh,
    parallel::{self, Poll},
    radix, room,
    uneven::{Cut, Uneven},
};

/// Start and stop for each dim, half open.
pub type Bounds = Vec<(i64, i64)>;

/// A layout applied to a shape. Making one, and asking it for one device, costs O(rank), whatever the mesh's size.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Partition {
    layout: Arc<Layout>,
    shape: Vec<i64>,
    uneven: Uneven,
    cuts: Vec<Cut>,
    size: i64,
    strides: Vec<i64>,
}

impl Partition {
    /// The partition of a tensor of `shape`.
    ///
    /// # Errors
    /// [`Error::Rank`] if the shape has another rank than the layout, [`Error::NegativeDim`], [`Error::Overflow`] if
    /// it has more than 2^63 - 1 elements, [`Error::Indivisible`] under [`Uneven::Even`], [`Error::PackedLayout`].
    pub fn new(layout: Arc<Layout>, shape: &[i64], uneven: Uneven) -> Result<Self> {
        if shape.len() != layout.rank() {
            return Err(Error::Rank { given: shape.len(), rank: layout.rank() });
        }
        if layout.is_packed() {
            return Err(Error::PackedLayout);
        }
        Self::unpacked(layout, shape, uneven)
    }

    /// The tensor of one element for each shard of a layout, packed dims taken for plain ones: who holds which shard.
    pub(crate) fn of_shards(layout: Arc<Layout>) -> Result<Self> {
        let shape = layout.num_shards().to_vec();
        Self::unpacked(layout, &shape, Uneven::Even)
    }

    /// The partition of which dim `i` is cut by `cuts[i]`, into as many shards as the layout says.
    pub(crate) fn of_cuts(layout: Arc<Layout>, shape: &[i64], cuts: Vec<Cut>) -> Result<Self> {
        debug_assert!(cuts.iter().map(Cut::shards).eq(layout.num_shards().iter().copied()));
        Ok(Self { cuts, ..Self::unpacked(layout, shape, Uneven::Ceil)? })
    }

    fn unpacked(layout: Arc<Layout>, shape: &[i64], uneven: Uneven) -> Result<Self> {
        if let Some((dim, &size)) = shape.iter().enumerate().find(|&(_, &size)| size < 0) {
            return Err(Error::NegativeDim { dim, size });
        }
        let size = radix::product("shape", shape)?;
        let cuts = (shape.iter().zip(layout.axis_sizes()).enumerate())
            .map(|(dim, (&n, axes))| Cut::new(dim, n, axes, uneven))
            .collect::<Result<_>>()?;
        Ok(Self { shape: shape.to_vec(), uneven, cuts, size, strides: radix::strides(shape), layout })
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

    /// The rule by which dims that do not divide are cut.
    #[must_use]
    pub fn uneven(&self) -> Uneven {
        self.uneven
    }

    /// How each dim is cut.
    #[must_use]
    pub fn cuts(&self) -> &[Cut] {
        &self.cuts
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

    /// The row-major strides of the shard id.
    #[must_use]
    pub fn shard_strides(&self) -> &[i64] {
        self.layout.shard_strides()
    }

    /// The number of different shards.
    #[must_use]
    pub fn total_shards(&self) -> i64 {
        self.layout.total_shards()
    }

    /// The number of devices that hold each shard.
    #[must_use]
    pub fn replicas(&self) -> i64 {
        self.mesh().size() / self.total_shards()
    }

    /// The box of the tensor that the device holds.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device.
    pub fn box_of(&self, device: i64) -> Result<Bounds> {
        let index = self.shard_index(device)?;
        Ok(self.cuts.iter().zip(index).map(|(cut, i)| cut.bounds(i)).collect())
    }

    /// The box of the shard `shard_id`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there is no such shard.
    pub fn box_of_shard(&self, shard_id: i64) -> Result<Bounds> {
        let index = radix::unravel(self.check_shard("shard_id", shard_id)?, self.layout.num_shards());
        Ok(self.cuts.iter().zip(index).map(|(cut, i)| cut.bounds(i)).collect())
    }

    /// The shard index of the device: one index per dim.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device.
    pub fn shard_index(&self, device: i64) -> Result<Vec<i64>> {
        let mesh = self.mesh();
        mesh.check(device)?;
        let mut index = vec![0; self.shape.len()];
        for (axis, role) in self.layout.roles().iter().enumerate() {
            if let AxisRole::Cuts { dim, weight } = *role {
                index[dim] += device / mesh.strides()[axis] % mesh.sizes()[axis] * weight;
            }
        }
        Ok(index)
    }

    /// The row-major number of the device's shard.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device.
    pub fn shard_id(&self, device: i64) -> Result<i64> {
        Ok(self.shard_id_function().at(self.mesh().check(device)?))
    }

    /// Which of the devices that hold the same shard this one is, in the order of their device indices.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device.
    pub fn replica_id(&self, device: i64) -> Result<i64> {
        Ok(self.replica_id_function().at(self.mesh().check(device)?))
    }

    /// The devices that hold `shard_id`, in increasing order: the canonical owner first.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there is no such shard, [`Error::TooMany`] if the devices are too many to list.
    pub fn devices_holding(&self, shard_id: i64) -> Result<Vec<i64>> {
        let index = radix::unravel(self.check_shard("shard_id", shard_id)?, self.layout.num_shards());
        let mesh = self.mesh();
        let mut devices = vec![0];
        // Axis by axis from the major one, so that the device indices come out in order.
        for (axis, role) in self.layout.roles().iter().enumerate() {
            let (size, stride) = (mesh.sizes()[axis], mesh.strides()[axis]);
            if let AxisRole::Cuts { dim, weight } = *role {
                let step = index[dim] / weight % size * stride;
                devices.iter_mut().for_each(|device| *device += step);
            } else {
                let more = usize::try_from(size).unwrap_or(usize::MAX).saturating_mul(devices.len());
                let mut all: Vec<i64> = room::list(more, format_args!("the {} replicas", self.replicas()))?;
                all.extend(devices.iter().flat_map(|device| (0..size).map(move |c| device + c * stride)));
                devices = all;
            }
        }
        Ok(devices)
    }

    /// The first of the devices that hold `shard_id`: its canonical owner.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there is no such shard.
    pub fn canonical_device(&self, shard_id: i64) -> Result<i64> {
        let index = radix::unravel(self.check_shard("shard_id", shard_id)?, self.layout.num_shards());
        let mesh = self.mesh();
        Ok((self.layout.roles().iter().enumerate())
            .map(|(axis, role)| match *role {
                AxisRole::Cuts { dim, weight } => index[dim] / weight % mesh.sizes()[axis] * mesh.strides()[axis],
                AxisRole::Replicates | AxisRole::Unreduced => 0,
            })
            .sum())
    }

    /// Fills `out` with the shard id of every device.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not one slot per device; what `poll` returns.
    #[inline(never)]
    pub fn shard_ids_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        self.fill(&self.shard_id_function(), out, poll)
    }

    /// Fills `out` with the replica id of every device.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not one slot per device; what `poll` returns.
    #[inline(never)]
    pub fn replica_ids_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        self.fill(&self.replica_id_function(), out, poll)
    }

    /// Fills `out`, of (devices, dims, 2) in C order, with start and stop of every device's box.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not as many elements; [`Error::TooMany`] if there is no memory for the bounds of
    /// the shards along each dim; what `poll` returns.
    #[inline(never)]
    pub fn boxes_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        let row = 2 * self.shape.len();
        self.check_out(out.len(), row)?;
        if row == 0 {
            return Ok(());
        }
        let columns: Vec<(Linear, Vec<(i64, i64)>)> = (0..self.shape.len())
            .map(|dim| {
                let cut = &self.cuts[dim];
                let mut bounds = room::list(cut.shards(), format_args!("the {} shards along dim {dim}", cut.shards()))?;
                bounds.extend((0..cut.shards()).map(|i| cut.bounds(i)));
                Ok((self.shard_index_function(dim), bounds))
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

    /// `shard_id`, the argument `what`, if there is such a shard.
    pub(crate) fn check_shard(&self, what: &'static str, shard_id: i64) -> Result<i64> {
        if shard_id < 0 || shard_id >= self.total_shards() {
            return Err(Error::OutOfRange { what, position: None, value: shard_id, limit: self.total_shards() });
        }
        Ok(shard_id)
    }

    fn check_out(&self, given: usize, row: usize) -> Result<()> {
        let expected = usize::try_from(self.mesh().size()).ok().and_then(|n| n.checked_mul(row));
        if expected == Some(given) {
            return Ok(());
        }
        let right_len = expected.unwrap_or(usize::MAX);
        Err(Error::Length { left: "out", left_len: given, right: "the values of all devices", right_len })
    }

    fn fill(&self, value: &Linear, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        self.check_out(out.len(), 1)?;
        let pieces = out.chunks_mut(parallel::PIECE).enumerate();
        parallel::for_each(self.mesh().size() as usize, pieces, poll, |(number, piece)| {
            value.fill((number * parallel::PIECE) as i64, piece, 0, 1);
            Ok(())
        })
    }

    /// The shard index along `dim`, as a function of the device.
    pub(crate) fn shard_index_function(&self, dim: usize) -> Linear {
        Linear::new(self.mesh().sizes(), |axis| match self.layout.roles()[axis] {
            AxisRole::Cuts { dim: cut, weight } if cut == dim => weight,
            _ => 0,
        })
    }

    pub(crate) fn shard_id_function(&self) -> Linear {
        Linear::new(self.mesh().sizes(), |axis| match self.layout.roles()[axis] {
            AxisRole::Cuts { dim, weight } => weight * self.shard_strides()[dim],
            AxisRole::Replicates | AxisRole::Unreduced => 0,
        })
    }

    /// Devices with one shard index differ only along the axes that cut nothing, so their order by device index is the
    /// order of the number that their coordinates over those axes spell.
    fn replica_id_function(&self) -> Linear {
        let sizes = self.mesh().sizes();
        let roles = self.layout.roles();
        let mut weights = vec![0; sizes.len()];
        let mut weight = 1;
        for axis in (0..sizes.len()).rev() {
            if !matches!(roles[axis], AxisRole::Cuts { .. }) {
                weights[axis] = weight;
                weight *= sizes[axis];
            }
        }
        Linear::new(self.mesh().sizes(), |axis| weights[axis])
    }
}

#[cfg(test)]
mod tests;
