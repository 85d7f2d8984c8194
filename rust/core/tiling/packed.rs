//! A partition with packed dims is a tiling whose holders have several pieces each.

use crate::{
    error::Result,
    packed::{Packed, for_each_product},
    region::Region,
    tiling::{Piece, Place, Poll, Tiling},
};

impl Tiling for Packed {
    fn shape(&self) -> &[i64] {
        self.shape()
    }

    fn holders(&self) -> i64 {
        self.mesh().size()
    }

    fn array_shape(&self, holder: i64) -> Result<Vec<i64>> {
        self.array_shape(holder)
    }

    /// Two devices that hold the same shard of a part hold the identical pieces of it, because pieces of different parts are
    /// not put together even where they meet.
    fn visit_pieces(&self, holder: i64, visit: &mut dyn FnMut(Piece<'_>) -> Result<()>) -> Result<()> {
        let dims = self.intervals(holder)?;
        let lists: Vec<_> = dims.iter().map(Vec::as_slice).collect();
        let (mut start, mut stop, mut local) = (Vec::new(), Vec::new(), Vec::new());
        for_each_product(&lists, |pieces| {
            for list in [&mut start, &mut stop, &mut local] {
                list.clear();
            }
            for piece in pieces {
                start.push(piece.start);
                stop.push(piece.stop);
                local.push(piece.local);
            }
            visit(Piece { region: Region::new(&start, &stop), place: Place::At(&local) })
        })
    }

    fn has_replicas(&self) -> bool {
        true
    }

    fn array_sizes_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        self.elements_into(out, poll)
    }

    fn held_sizes_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        self.held_into(out, poll)
    }

    /// The parts tile their dims, and holders of the same elements hold the same piece.
    fn check(&self, _: Poll<'_>) -> Result<()> {
        Ok(())
    }
}
