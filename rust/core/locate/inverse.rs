//! Shard id and local offset → global offset, for many.

use crate::{radix::Divider, uneven::Cut};

/// Up to how many shards along a dim the inverse keeps a table of their bounds; beyond, it computes each.
const TABLE_LIMIT: i64 = 1 << 16;

/// One dim of the inverse kernel.
pub(super) struct InverseDim<'a> {
    shards: Divider,
    stride: i64,
    cut: &'a Cut,
    /// Start, length and the divider by it, for each shard along the dim; empty if there are too many.
    table: Vec<(i64, i64, Divider)>,
}

impl<'a> InverseDim<'a> {
    pub(super) fn new(cut: &'a Cut, stride: i64) -> Self {
        let entry = |index| {
            let (start, stop) = cut.bounds(index);
            (start, stop - start, Divider::new(stop - start))
        };
        let entries = if cut.shards() <= TABLE_LIMIT { cut.shards() } else { 0 };
        Self { shards: Divider::new(cut.shards()), stride, cut, table: (0..entries).map(entry).collect() }
    }

    /// Shard index → start, then the local offset cut by the shard's length into quotient and position.
    #[inline(always)]
    fn split(&self, index: i64, rest: i64) -> (i64, i64, i64, i64) {
        if let Some(&(start, len, by)) = self.table.get(index as usize) {
            let (quotient, position) = by.div_rem(rest);
            return (start, len, quotient, position);
        }
        let (start, stop) = self.cut.bounds(index);
        let len = stop - start;
        (start, len, rest / len.max(1), rest % len.max(1))
    }
}

/// Whether every local offset lies inside its shard; those that do not get an unspecified value.
pub(super) fn global_offsets(dims: &[InverseDim], shard_ids: &[i64], locals: &[i64], offsets: &mut [i64]) -> bool {
    let mut all_inside = true;
    for ((&shard_id, &local), offset) in shard_ids.iter().zip(locals).zip(offsets) {
        let (mut shard, mut rest, mut global, mut least) = (shard_id, local.wrapping_abs(), 0_i64, i64::MAX);
        for dim in dims.iter().rev() {
            let (major, index) = dim.shards.div_rem(shard);
            let (start, len, quotient, position) = dim.split(index, rest);
            global = global.wrapping_add(start.wrapping_add(position).wrapping_mul(dim.stride));
            shard = major;
            rest = quotient;
            least = least.min(len);
        }
        // Something left over, an empty shard, or a negative offset: outside.
        all_inside &= rest == 0 && least > 0 && local >= 0;
        *offset = global;
    }
    all_inside
}
