//! A partition is a tiling in closed form.

use std::sync::Arc;

use crate::{
    error::Result,
    partition::Partition,
    region::{Region, Regions},
    room,
    tiling::{Piece, Pieces, Place, Poll, Tiling, shards::Shards, tiles::Tiles},
};

impl Tiling for Partition {
    fn shape(&self) -> &[i64] {
        self.shape()
    }

    fn holders(&self) -> i64 {
        self.mesh().size()
    }

    fn array_shape(&self, holder: i64) -> Result<Vec<i64>> {
        self.array_shape(holder)
    }

    fn visit_pieces(&self, holder: i64, visit: &mut dyn FnMut(Piece<'_>) -> Result<()>) -> Result<()> {
        let (start, stop): (Vec<i64>, Vec<i64>) = self.box_of(holder)?.into_iter().unzip();
        let origin = vec![0; start.len()];
        visit(Piece { region: Region::new(&start, &stop), place: Place::At(&origin) })
    }

    fn has_replicas(&self) -> bool {
        true
    }

    /// The shards of a partition tile the tensor, and devices that hold the same shard are replicas.
    fn check(&self, _: Poll<'_>) -> Result<()> {
        Ok(())
    }

    fn tiles(&self, _: Poll<'_>) -> Result<Box<dyn Tiles + '_>> {
        Ok(Box::new(Shards::new(self)?))
    }

    fn pieces(&self, poll: Poll<'_>) -> Result<Arc<Pieces>> {
        let (rank, devices) = (self.shape().len(), usize::try_from(self.mesh().size()).unwrap_or(usize::MAX));
        let len = devices.saturating_mul(2 * rank);
        let mut bounds = room::filled(0, len, format_args!("the boxes of {devices} devices"))?;
        self.boxes_into(&mut bounds, poll)?;
        Ok(Arc::new(Pieces::one_each(Regions::of_bounds(rank, devices, &bounds)?)?))
    }

    fn as_partition(self: Arc<Self>) -> Option<Arc<Partition>> {
        Some(self)
    }
}
