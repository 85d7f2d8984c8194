//! The questions that every partition answers, with packed dims or without.

use std::sync::Arc;

use crate::{
    error::Result,
    layout::Layout,
    packed::{Packed, runs::PackedRuns},
    partition::{Bounds, Partition},
    runs::Runs,
    tiling::{Poll, Tiling},
};

/// A layout applied to a shape. Who holds which shard follows from the layout alone: see [`Layout::shard_id`] and what is
/// beside it. Each method is that of [`Partition`] or of [`Packed`].
pub trait Divided: Tiling {
    /// The layout.
    fn layout(&self) -> &Arc<Layout>;

    /// The number of elements of the tensor.
    fn size(&self) -> i64;

    /// The largest extent of an array along each dim.
    fn largest_shape(&self) -> Vec<i64>;

    /// The one box of a device.
    ///
    /// # Errors
    /// As [`Packed::box_of`].
    fn box_of(&self, device: i64) -> Result<Bounds>;

    /// The one box of a shard.
    ///
    /// # Errors
    /// As [`Packed::box_of_shard`].
    fn box_of_shard(&self, shard_id: i64) -> Result<Bounds>;

    /// Fills `out`, of (devices, dims, 2) in C order, with every device's one box.
    ///
    /// # Errors
    /// As [`Packed::boxes_into`].
    fn boxes_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()>;

    /// The canonical shard of the element at the global offset, and the element's offset in that shard's array.
    ///
    /// # Errors
    /// As [`Partition::locate_one`].
    fn locate_one(&self, offset: i64) -> Result<(i64, i64)>;

    /// The same for many.
    ///
    /// # Errors
    /// As [`Partition::locate_into`].
    fn locate_into(&self, offsets: &[i64], ids: &mut [i64], locals: &mut [i64], poll: Poll<'_>) -> Result<()>;

    /// The global offset of an element of a shard's array.
    ///
    /// # Errors
    /// As [`Partition::global_offset_one`].
    fn global_offset_one(&self, id: i64, local: i64) -> Result<i64>;

    /// The same for many.
    ///
    /// # Errors
    /// As [`Partition::global_offset_into`].
    fn global_offset_into(&self, ids: &[i64], locals: &[i64], offsets: &mut [i64], poll: Poll<'_>) -> Result<()>;

    /// The contiguous runs of a device in the global array.
    ///
    /// # Errors
    /// As [`PackedRuns::of`].
    fn runs(&self, device: i64) -> Result<Box<dyn RunList>>;
}

/// Contiguous runs, in increasing order.
pub trait RunList: Send + Sync {
    /// The number of runs.
    fn count(&self) -> i64;

    /// Fills `out`, of (runs, 2) in C order, with offset and length of each run.
    ///
    /// # Errors
    /// [`Error::Length`](crate::error::Error::Length) if `out` has not two slots per run; what `poll` returns.
    fn fill_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()>;
}

/// Passes each question on to the method of that name.
macro_rules! divided {
    ($type:ty, $runs:ty) => {
        impl Divided for $type {
            fn layout(&self) -> &Arc<Layout> {
                self.layout()
            }

            fn size(&self) -> i64 {
                self.size()
            }

            fn largest_shape(&self) -> Vec<i64> {
                self.largest_shape()
            }

            fn box_of(&self, device: i64) -> Result<Bounds> {
                self.box_of(device)
            }

            fn box_of_shard(&self, shard_id: i64) -> Result<Bounds> {
                self.box_of_shard(shard_id)
            }

            fn boxes_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
                self.boxes_into(out, poll)
            }

            fn locate_one(&self, offset: i64) -> Result<(i64, i64)> {
                self.locate_one(offset)
            }

            fn locate_into(&self, offsets: &[i64], ids: &mut [i64], locals: &mut [i64], poll: Poll<'_>) -> Result<()> {
                self.locate_into(offsets, ids, locals, poll)
            }

            fn global_offset_one(&self, id: i64, local: i64) -> Result<i64> {
                self.global_offset_one(id, local)
            }

            fn global_offset_into(
                &self,
                ids: &[i64],
                locals: &[i64],
                offsets: &mut [i64],
                poll: Poll<'_>,
            ) -> Result<()> {
                self.global_offset_into(ids, locals, offsets, poll)
            }

            fn runs(&self, device: i64) -> Result<Box<dyn RunList>> {
                Ok(Box::new(<$runs>::of(self, device)?))
            }
        }

        impl RunList for $runs {
            fn count(&self) -> i64 {
                self.count()
            }

            fn fill_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
                self.fill_into(out, poll)
            }
        }
    };
}

divided!(Partition, Runs);
divided!(Packed, PackedRuns);
