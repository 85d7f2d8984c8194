//! Global offset → shard id and local offset, for many.
//!
//! Narrow tensors of up to four dims that are cut uniformly have a kernel of their own, and wide ones the same with
//! 128-bit products; other ranks and rules take a general one.

use multiversion::multiversion;

use super::kernel::{Element, Unrolled, is_narrow, last_and_tail, take_all};
use crate::{
    partition::Partition,
    radix::{Divide, Divider, NarrowDivider, ceil_div},
    uneven::{Cut, CutKind},
};

/// The kernel for one partition.
pub(super) enum Forward {
    Narrow(Unrolled<UniformDim<NarrowDivider>>),
    Wide(Unrolled<UniformDim<Divider>>),
    General(Vec<FastDim>),
}

/// A dim that is cut uniformly.
#[derive(Clone, Copy)]
pub(super) struct UniformDim<D> {
    elements: D,
    owner: D,
    step: i64,
    /// The last shard that is not empty, and its length.
    last: i64,
    tail: i64,
    shard_stride: i64,
}

/// A dim that is cut in any way.
pub(super) struct FastDim {
    elements: Divider,
    owner: FastOwner,
    shard_stride: i64,
}

impl Forward {
    pub(super) fn new(partition: &Partition) -> Self {
        let dims = || partition.dims().iter().zip(partition.layout().shard_strides().iter().copied());
        let uniform = if is_narrow(partition) {
            Unrolled::new(dims().map(|(cut, stride)| UniformDim::new(cut, stride, NarrowDivider::new)))
                .map(Self::Narrow)
        } else {
            Unrolled::new(dims().map(|(cut, stride)| UniformDim::new(cut, stride, Divider::new))).map(Self::Wide)
        };
        uniform.unwrap_or_else(|| Self::General(dims().map(|(cut, stride)| FastDim::new(cut, stride)).collect()))
    }

    /// [`Forward::locate`] as it is on any processor, for the tests; false if there is only one way.
    #[cfg(test)]
    pub(super) fn portable(&self, offsets: &[i64], shard_ids: &mut [i64], locals: &mut [i64]) -> bool {
        if let Self::Narrow(dims) = self {
            uniform(dims, offsets, shard_ids, locals);
        }
        matches!(self, Self::Narrow(_))
    }

    /// Fills `shard_ids` and `locals` for offsets that are known to lie in the tensor.
    pub(super) fn locate(&self, offsets: &[i64], shard_ids: &mut [i64], locals: &mut [i64]) {
        match self {
            Self::Narrow(dims) => narrow(dims, offsets, shard_ids, locals),
            Self::Wide(dims) => uniform(dims, offsets, shard_ids, locals),
            Self::General(dims) => general(dims, offsets, shard_ids, locals),
        }
    }
}

/// [`uniform`] for the processor at hand.
#[multiversion(targets("x86_64+avx2+bmi2"))]
fn narrow(dims: &Unrolled<UniformDim<NarrowDivider>>, offsets: &[i64], shard_ids: &mut [i64], locals: &mut [i64]) {
    uniform(dims, offsets, shard_ids, locals);
}

#[inline(always)]
fn uniform<D: Divide>(dims: &Unrolled<UniformDim<D>>, offsets: &[i64], shard_ids: &mut [i64], locals: &mut [i64]) {
    match dims {
        Unrolled::One(dims) => unrolled(*dims, offsets, shard_ids, locals),
        Unrolled::Two(dims) => unrolled(*dims, offsets, shard_ids, locals),
        Unrolled::Three(dims) => unrolled(*dims, offsets, shard_ids, locals),
        Unrolled::Four(dims) => unrolled(*dims, offsets, shard_ids, locals),
    }
}

impl<D: Divide> UniformDim<D> {
    fn new(cut: &Cut, shard_stride: i64, divider: impl Fn(i64) -> D) -> Option<Self> {
        let &CutKind::Uniform { step } = cut.kind() else { return None };
        let (n, (last, tail)) = (cut.elements(), last_and_tail(cut.elements(), step));
        let (elements, owner) = (divider(n), divider(step));
        Some(Self { elements, owner, step, last, tail, shard_stride })
    }
}

/// The rest of an offset, and the shard and the place in it by the dims that were taken.
struct Located {
    rest: i64,
    shard: i64,
    local: i64,
    stride: i64,
}

/// Every value stays within the tensor's size, which is known to fit, so the arithmetic need not be checked again.
impl<D: Divide> Element<UniformDim<D>> for Located {
    #[inline(always)]
    fn take(&mut self, dim: &UniformDim<D>, major: bool) {
        let (rest, position) = if major { (0, self.rest) } else { dim.elements.div_rem(self.rest) };
        let (index, within) = dim.owner.div_rem(position);
        let len = if index == dim.last { dim.tail } else { dim.step };
        self.rest = rest;
        self.shard = self.shard.wrapping_add(D::times(index, dim.shard_stride));
        self.local = self.local.wrapping_add(D::times(within, self.stride));
        self.stride = D::times(self.stride, len);
    }
}

#[inline(always)]
fn unrolled<D: Divide, const R: usize>(
    dims: [UniformDim<D>; R],
    offsets: &[i64],
    shard_ids: &mut [i64],
    locals: &mut [i64],
) {
    for ((&offset, shard_id), local) in offsets.iter().zip(shard_ids).zip(locals) {
        let mut located = Located { rest: offset, shard: 0, local: 0, stride: 1 };
        take_all(&mut located, &dims);
        (*shard_id, *local) = (located.shard, located.local);
    }
}

/// A [`Cut`] that finds the owner of a position without hardware division.
enum FastOwner {
    Uniform {
        n: i64,
        step: i64,
        by: Divider,
    },
    Balanced {
        base: i64,
        extra: i64,
        large: i64,
        by_large: Divider,
        by_base: Divider,
    },
    /// `"floor"`, where the products fit in 63 bits.
    Floor {
        n: i64,
        k: i64,
        by_n: Divider,
        by_k: Divider,
    },
    /// One axis of `"chunk"`: pieces of `step`, all cut further as `full` except the last, `tail`.
    Nested {
        n: i64,
        step: i64,
        by: Divider,
        below: i64,
        full: Box<FastOwner>,
        tail: Box<FastOwner>,
    },
    /// `"chunk"` over so many axes that the tree of pieces would be larger than it is worth, or products that are too large.
    Deep(Cut),
}

/// The number of axes in one spec from which `"chunk"` is computed by plain division: the tree doubles with each.
const DEEP: usize = 8;

impl FastOwner {
    fn new(cut: &Cut) -> Self {
        match cut.kind() {
            CutKind::Uniform { step } => Self::uniform(cut.elements(), *step),
            &CutKind::Balanced { base, extra } => Self::Balanced {
                base,
                extra,
                large: extra * (base + 1),
                by_large: Divider::new(base + 1),
                by_base: Divider::new(base),
            },
            CutKind::Floor if cut.elements().checked_mul(cut.shards()).is_some() => Self::Floor {
                n: cut.elements(),
                k: cut.shards(),
                by_n: Divider::new(cut.elements()),
                by_k: Divider::new(cut.shards()),
            },
            CutKind::Nested { axes } if axes.len() < DEEP => Self::nested(cut.elements(), axes),
            CutKind::Nested { .. } | CutKind::Floor => Self::Deep(cut.clone()),
        }
    }

    fn uniform(n: i64, step: i64) -> Self {
        Self::Uniform { n, step, by: Divider::new(step) }
    }

    fn nested(n: i64, axes: &[i64]) -> Self {
        let step = ceil_div(n, axes[0]);
        if axes.len() == 1 {
            return Self::uniform(n, step);
        }
        let last = if step == 0 { 0 } else { (n - 1) % step + 1 };
        Self::Nested {
            n,
            step,
            by: Divider::new(step),
            below: axes[1..].iter().product(),
            full: Box::new(Self::nested(step, &axes[1..])),
            tail: Box::new(Self::nested(last, &axes[1..])),
        }
    }

    /// The owner of `position`, the position in its shard, and the shard's length.
    #[inline(always)]
    fn find(&self, position: i64) -> (i64, i64, i64) {
        match self {
            Self::Uniform { n, step, by } => uniform_owner(position, *n, *step, *by),
            Self::Balanced { base, extra, large, by_large, by_base } => {
                if position < *large {
                    let (owner, within) = by_large.div_rem(position);
                    (owner, within, base + 1)
                } else {
                    let (owner, within) = by_base.div_rem(position - large);
                    (extra + owner, within, *base)
                }
            }
            Self::Floor { n, k, by_n, by_k } => {
                // As `floor_owner` and `floor_start`; a position is below n, so all products are at most n·k.
                let (owner, _) = by_n.div_rem((position + 1).wrapping_mul(*k).wrapping_sub(1));
                let (start, _) = by_k.div_rem(owner.wrapping_mul(*n));
                let (stop, _) = by_k.div_rem((owner + 1).wrapping_mul(*n));
                (owner, position - start, stop - start)
            }
            Self::Nested { .. } => self.find_nested(position),
            Self::Deep(cut) => {
                let owner = cut.owner(position);
                let (start, stop) = cut.bounds(owner);
                (owner, position - start, stop - start)
            }
        }
    }

    fn find_nested(&self, position: i64) -> (i64, i64, i64) {
        let (mut node, mut owner, mut rest) = (self, 0, position);
        while let Self::Nested { n, step, by, below, full, tail } = node {
            let (digit, within) = by.div_rem(rest);
            // The piece is whole unless it reaches the end of what the previous axis left.
            node = if n - (rest - within) >= *step { full } else { tail };
            owner += digit * below;
            rest = within;
        }
        let (index, within, len) = node.find_leaf(rest);
        (owner + index, within, len)
    }

    /// The uniform cut at the end of a descent.
    fn find_leaf(&self, position: i64) -> (i64, i64, i64) {
        match self {
            Self::Uniform { n, step, by } => uniform_owner(position, *n, *step, *by),
            other => other.find(position),
        }
    }
}

/// The owner, the position in its shard, and the shard's length.
#[inline(always)]
fn uniform_owner(position: i64, n: i64, step: i64, by: Divider) -> (i64, i64, i64) {
    let (owner, within) = by.div_rem(position);
    // start = position - within; in range because position is.
    (owner, within, step.min(n.wrapping_sub(position.wrapping_sub(within))))
}

impl FastDim {
    fn new(cut: &Cut, shard_stride: i64) -> Self {
        Self { elements: Divider::new(cut.elements()), owner: FastOwner::new(cut), shard_stride }
    }
}

/// As [`unrolled`], for dims of any number and kind.
fn general(dims: &[FastDim], offsets: &[i64], shard_ids: &mut [i64], locals: &mut [i64]) {
    for ((&offset, shard_id), local_offset) in offsets.iter().zip(shard_ids).zip(locals) {
        let (mut rest, mut shard, mut local, mut stride) = (offset, 0_i64, 0_i64, 1_i64);
        for dim in dims.iter().rev() {
            let (quotient, position) = dim.elements.div_rem(rest);
            let (index, within, len) = dim.owner.find(position);
            rest = quotient;
            shard = shard.wrapping_add(index.wrapping_mul(dim.shard_stride));
            local = local.wrapping_add(within.wrapping_mul(stride));
            stride = stride.wrapping_mul(len);
        }
        (*shard_id, *local_offset) = (shard, local);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uneven::Uneven;

    #[test]
    fn the_owner_without_division_is_the_owner_by_definition() {
        // Of the lists of axes the last is too long for a tree of pieces.
        let axes: [&[i64]; 7] = [&[3], &[2, 2], &[2, 3], &[3, 2], &[4, 3], &[2, 2, 2], &[2; DEEP]];
        for rule in [Uneven::Ceil, Uneven::Chunk, Uneven::Balanced, Uneven::Floor] {
            for axes in axes {
                for n in 0..=40 {
                    let cut = Cut::new(0, n, axes, rule).unwrap();
                    let owner = FastOwner::new(&cut);
                    let deep = rule == Uneven::Chunk && axes.len() == DEEP;
                    assert_eq!(matches!(owner, FastOwner::Deep(_)), deep);
                    for position in 0..n {
                        let index = cut.owner(position);
                        let (start, stop) = cut.bounds(index);
                        let found = owner.find(position);
                        assert_eq!(
                            found,
                            (index, position - start, stop - start),
                            "{position} of {n} over {axes:?}, {rule:?}"
                        );
                    }
                }
            }
        }
    }
}
