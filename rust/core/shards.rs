//! The shards of each device: answers that follow from a layout alone, whatever the shape that it
//! is applied to (rule 2.3).

use crate::{
    error::{Error, Result},
    index::linear::Linear,
    layout::{AxisRole, Layout},
    parallel::{self, Poll},
    radix, room,
};

impl Layout {
    /// The number of devices that hold each shard.
    #[must_use]
    pub fn replicas(&self) -> i64 {
        self.mesh().size() / self.total_shards()
    }

    /// The shard index of the device: one index per dim.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device.
    pub fn shard_index(&self, device: i64) -> Result<Vec<i64>> {
        let mesh = self.mesh();
        mesh.check(device)?;
        let mut index = vec![0; self.rank()];
        for (axis, role) in self.roles().iter().enumerate() {
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

    /// The position of a device among those that hold the same shard, in the order of their device indices.
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
        let index = radix::unravel(self.check_shard("shard_id", shard_id)?, self.num_shards());
        let mesh = self.mesh();
        let mut devices = vec![0];
        // Axis by axis from the major one, so that the device indices come out in order.
        for (axis, role) in self.roles().iter().enumerate() {
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
        let index = radix::unravel(self.check_shard("shard_id", shard_id)?, self.num_shards());
        let mesh = self.mesh();
        Ok((self.roles().iter().enumerate())
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

    /// `shard_id`, the argument `what`, if there is such a shard.
    pub(crate) fn check_shard(&self, what: &'static str, shard_id: i64) -> Result<i64> {
        if shard_id < 0 || shard_id >= self.total_shards() {
            return Err(Error::OutOfRange { what, position: None, value: shard_id, limit: self.total_shards() });
        }
        Ok(shard_id)
    }

    pub(crate) fn check_out(&self, given: usize, row: usize) -> Result<()> {
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
        Linear::new(self.mesh().sizes(), |axis| match self.roles()[axis] {
            AxisRole::Cuts { dim: cut, weight } if cut == dim => weight,
            _ => 0,
        })
    }

    pub(crate) fn shard_id_function(&self) -> Linear {
        Linear::new(self.mesh().sizes(), |axis| match self.roles()[axis] {
            AxisRole::Cuts { dim, weight } => weight * self.shard_strides()[dim],
            AxisRole::Replicates | AxisRole::Unreduced => 0,
        })
    }

    /// Devices with one shard index differ only along the axes that cut nothing, so their order by device index is the
    /// order of the number that their coordinates over those axes spell.
    fn replica_id_function(&self) -> Linear {
        let sizes = self.mesh().sizes();
        let roles = self.roles();
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
