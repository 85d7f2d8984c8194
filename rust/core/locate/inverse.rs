//! Shard id and local offset → global offset, for many. Narrow tensors of up to four dims that are cut uniformly have a
//! kernel of their own; the rest takes a general one.

use multiversion::multiversion;

use super::kernel::{Element, Unrolled, any_outside, is_narrow, last_and_tail, take_all};
use crate::{
    partition::Partition,
    radix::{Divide, Divider, NarrowDivider},
    uneven::{Cut, CutKind},
};

/// The most shards along a dim of whose bounds the general kernel keeps a table; beyond, it computes each.
const TABLE_LIMIT: i64 = 1 << 16;

/// The kernel for one partition.
pub(super) enum Inverse<'a> {
    Narrow(Box<Unrolled<UniformDim>>),
    General(Vec<InverseDim<'a>>),
}

/// A dim that is cut uniformly.
#[derive(Clone, Copy)]
pub(super) struct UniformDim {
    shards: NarrowDivider,
    step: i64,
    by_step: NarrowDivider,
    /// The last shard that is not empty, and its length.
    last: i64,
    tail: i64,
    by_tail: NarrowDivider,
    stride: i64,
}

impl<'a> Inverse<'a> {
    pub(super) fn new(partition: &'a Partition) -> Self {
        let dims = || partition.dims().iter().zip(partition.strides().iter().copied());
        let uniform = dims().map(|(cut, stride)| UniformDim::new(cut, stride));
        match is_narrow(partition).then(|| Unrolled::new(uniform)).flatten() {
            Some(uniform) => Self::Narrow(Box::new(uniform)),
            None => Self::General(dims().map(|(cut, stride)| InverseDim::new(cut, stride)).collect()),
        }
    }

    /// [`Inverse::global`] as it is on any processor, for the tests; none if there is only one way.
    #[cfg(test)]
    pub(super) fn portable(&self, shard_ids: &[i64], locals: &[i64], offsets: &mut [i64]) -> Option<bool> {
        match self {
            Self::Narrow(dims) => Some(uniform(dims, shard_ids, locals, offsets)),
            Self::General(_) => None,
        }
    }

    /// Fills `offsets` for shard ids that are known to exist, in a tensor of `size` elements. Whether every local offset
    /// lies inside its shard; those that do not get an unspecified value.
    pub(super) fn global(&self, size: i64, shard_ids: &[i64], locals: &[i64], offsets: &mut [i64]) -> bool {
        match self {
            Self::Narrow(dims) => !any_outside(locals, size) && narrow(dims, shard_ids, locals, offsets),
            Self::General(dims) => general(dims, shard_ids, locals, offsets),
        }
    }
}

impl UniformDim {
    fn new(cut: &Cut, stride: i64) -> Option<Self> {
        let &CutKind::Uniform { step } = cut.kind() else { return None };
        let (last, tail) = last_and_tail(cut.elements(), step);
        let (shards, by_step, by_tail) = (cut.shards(), step, tail);
        let [shards, by_step, by_tail] = [shards, by_step, by_tail].map(NarrowDivider::new);
        Some(Self { shards, step, by_step, last, tail, by_tail, stride })
    }
}

#[multiversion(targets("x86_64+avx2+bmi2"))]
fn narrow(dims: &Unrolled<UniformDim>, shard_ids: &[i64], locals: &[i64], offsets: &mut [i64]) -> bool {
    uniform(dims, shard_ids, locals, offsets)
}

#[inline(always)]
fn uniform(dims: &Unrolled<UniformDim>, shard_ids: &[i64], locals: &[i64], offsets: &mut [i64]) -> bool {
    match dims {
        Unrolled::One(dims) => unrolled(*dims, shard_ids, locals, offsets),
        Unrolled::Two(dims) => unrolled(*dims, shard_ids, locals, offsets),
        Unrolled::Three(dims) => unrolled(*dims, shard_ids, locals, offsets),
        Unrolled::Four(dims) => unrolled(*dims, shard_ids, locals, offsets),
    }
}

/// The rests of a shard id and of a local offset, and the offset by the dims that were taken.
struct Global {
    shard: i64,
    rest: i64,
    offset: i64,
    /// Negative as soon as one element is wrong.
    signs: i64,
}

/// Values stay within the tensor's size, which is known to fit, except those that are found to be wrong.
impl Element<UniformDim> for Global {
    #[inline(always)]
    fn take(&mut self, dim: &UniformDim, major: bool) {
        let (shard, index) = if major { (0, self.shard) } else { dim.shards.div_rem(self.shard) };
        self.shard = shard;
        let at_end = index == dim.last;
        let position = if major {
            let len = if at_end { dim.tail } else { dim.step };
            self.signs |= len.wrapping_sub(1).wrapping_sub(self.rest);
            self.rest
        } else {
            let (whole, in_whole) = dim.by_step.div_rem(self.rest);
            let (part, in_part) = dim.by_tail.div_rem(self.rest);
            self.rest = if at_end { part } else { whole };
            if at_end { in_part } else { in_whole }
        };
        // Beyond the last, the shards are empty.
        self.signs |= dim.last.wrapping_sub(index);
        let start = NarrowDivider::times(index, dim.step);
        self.offset = self.offset.wrapping_add(NarrowDivider::times(start.wrapping_add(position), dim.stride));
    }
}

#[inline(always)]
fn unrolled<const R: usize>(dims: [UniformDim; R], shard_ids: &[i64], locals: &[i64], offsets: &mut [i64]) -> bool {
    let mut signs = 0_i64;
    for ((&shard, &rest), offset) in shard_ids.iter().zip(locals).zip(offsets) {
        let mut global = Global { shard, rest, offset: 0, signs: 0 };
        take_all(&mut global, &dims);
        *offset = global.offset;
        signs |= global.signs;
    }
    signs >= 0
}

/// A dim that is cut in any way.
pub(super) struct InverseDim<'a> {
    shards: Divider,
    stride: i64,
    cut: &'a Cut,
    /// Start, length and the divider by it, for each shard along the dim; empty if there are too many.
    table: Vec<(i64, i64, Divider)>,
}

impl<'a> InverseDim<'a> {
    fn new(cut: &'a Cut, stride: i64) -> Self {
        let entry = |index| {
            let (start, stop) = cut.bounds(index);
            (start, stop - start, Divider::new(stop - start))
        };
        let mut table = Vec::new();
        // Without memory for the table, each is computed.
        if cut.shards() <= TABLE_LIMIT && table.try_reserve_exact(cut.shards() as usize).is_ok() {
            table.extend((0..cut.shards()).map(entry));
        }
        Self { shards: Divider::new(cut.shards()), stride, cut, table }
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

/// As [`unrolled`], for dims of any number and kind.
fn general(dims: &[InverseDim], shard_ids: &[i64], locals: &[i64], offsets: &mut [i64]) -> bool {
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
