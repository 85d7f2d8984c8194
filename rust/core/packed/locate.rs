//! The places of many elements of a packed partition: global offset ↔ shard id and local offset.
//!
//! The answers for each position along a packed dim are listed first where the dim is not too long for that: then an
//! element costs one division and one look-up per dim, as it does where the dim is plain.

use crate::{
    locate::{ForwardKernel, InverseKernel, Kernels},
    packed::Packed,
    radix::Divider,
    sections::dim::Sections,
    uneven::Dim as _,
};

/// The most positions along a dim that are listed: 2 MB of answers.
const LISTED: i64 = 1 << 18;

/// The answers for one dim.
enum Finder<'a> {
    /// Index and place for each position.
    Listed(Vec<(u32, u32)>),
    /// One shard that holds all as it is.
    Whole,
    Computed(&'a Sections),
}

/// One dim, minor first.
struct Along<'a> {
    elements: Divider,
    finder: Finder<'a>,
    dim: &'a Sections,
    /// The length of all arrays, if it is one.
    extent: Option<i64>,
    shard_stride: i64,
}

impl<'a> Along<'a> {
    fn new(dim: &'a Sections, shard_stride: i64, offsets: usize) -> Self {
        let n = dim.elements();
        let worth = n <= LISTED && n / 4 <= offsets as i64 && dim.longest() < 1 << 32 && dim.shards() < 1 << 32;
        let finder = if dim.shards() == 1 && dim.longest() == n {
            Finder::Whole
        } else if worth {
            let answer = |position| {
                let (index, local) = dim.locate(position);
                (index as u32, local as u32)
            };
            Finder::Listed((0..n).map(answer).collect())
        } else {
            Finder::Computed(dim)
        };
        let extent = dim.is_uniform().then(|| dim.extent(0));
        Self { elements: Divider::new(n), finder, dim, extent, shard_stride }
    }

    #[inline(always)]
    fn find(&self, position: i64) -> (i64, i64) {
        match &self.finder {
            Finder::Listed(answers) => {
                let (index, local) = answers[position as usize];
                (i64::from(index), i64::from(local))
            }
            Finder::Whole => (0, position),
            Finder::Computed(dim) => dim.locate(position),
        }
    }
}

/// The way from positions in a dim's arrays to positions in the dim.
enum Inverse {
    /// The position of each element of the arrays of all shards, one array after the other; `PADDING` for padding.
    Listed(Vec<u32>),
    /// One shard that holds all as it is.
    Whole,
    Computed,
}

const PADDING: u32 = u32::MAX;

/// One dim on the way back, minor first.
struct Back<'a> {
    dim: &'a Sections,
    shards: Divider,
    /// For each shard where its array begins among all, how long it is, and the divider by that; one entry if all arrays
    /// are alike, none if there are too many.
    arrays: Vec<(i64, i64, Divider)>,
    inverse: Inverse,
    stride: i64,
}

impl<'a> Back<'a> {
    fn new(dim: &'a Sections, stride: i64, offsets: usize) -> Self {
        let shards = dim.shards();
        let kept = if dim.is_uniform() { 1 } else { shards };
        let worth = |count: i64| count <= LISTED && count / 4 <= offsets as i64;
        let mut arrays = Vec::new();
        let mut begin = 0_i64;
        if worth(kept) {
            for index in 0..kept {
                let extent = dim.extent(index);
                arrays.push((begin, extent, Divider::new(extent)));
                // Arrays that are together over the limit are not listed.
                begin = begin.saturating_add(extent);
            }
        }
        let total = if dim.is_uniform() { begin.saturating_mul(shards) } else { begin };
        let inverse = if shards == 1 && dim.longest() == dim.elements() {
            Inverse::Whole
        } else if !arrays.is_empty() && worth(total) && dim.elements() < i64::from(PADDING) {
            let mut listed = Vec::with_capacity(total as usize);
            for index in 0..shards {
                let extent = dim.extent(index);
                listed.extend((0..extent).map(|place| dim.position(index, place).map_or(PADDING, |at| at as u32)));
            }
            Inverse::Listed(listed)
        } else {
            Inverse::Computed
        };
        Self { dim, shards: Divider::new(shards), arrays, inverse, stride }
    }

    /// For shard `index`, where its array begins among all; and `rest` divided by its length, with the remainder. None if
    /// the array is empty.
    #[inline(always)]
    fn array(&self, index: i64, rest: i64) -> Option<(i64, i64, i64)> {
        let (begin, extent, divided) = match *self.arrays.as_slice() {
            [(_, extent, divider)] => (index.wrapping_mul(extent), extent, divider.div_rem(rest)),
            [] => {
                let extent = self.dim.extent(index);
                (0, extent, (rest / extent.max(1), rest % extent.max(1)))
            }
            ref all => {
                let (begin, extent, divider) = all[index as usize];
                (begin, extent, divider.div_rem(rest))
            }
        };
        (extent > 0).then_some((begin, divided.0, divided.1))
    }

    /// The position of element `place` of the array of shard `index`, which begins at `begin` among all.
    #[inline(always)]
    fn position(&self, index: i64, begin: i64, place: i64) -> Option<i64> {
        match &self.inverse {
            Inverse::Listed(positions) => {
                let position = positions[(begin + place) as usize];
                (position != PADDING).then_some(i64::from(position))
            }
            Inverse::Whole => Some(place),
            Inverse::Computed => self.dim.position(index, place),
        }
    }
}

/// The global offset of an element of the array of a shard that there is; none if there is no such element, or it is
/// padding.
#[inline(always)]
fn back_of<'a>(along: impl ExactSizeIterator<Item = &'a Back<'a>>, shard_id: i64, local_offset: i64) -> Option<i64> {
    if local_offset < 0 {
        return None;
    }
    let (mut id, mut rest, mut offset) = (shard_id, local_offset, 0_i64);
    for dim in along {
        let (others, index) = dim.shards.div_rem(id);
        id = others;
        let (begin, above, place) = dim.array(index, rest)?;
        rest = above;
        offset = offset.wrapping_add(dim.position(index, begin, place)?.wrapping_mul(dim.stride));
    }
    (rest == 0).then_some(offset)
}

/// [`back_of`] for many, with a number of dims that is known; whether all are there.
#[inline(always)]
fn many_back<const R: usize>(along: [&Back; R], shards: &[i64], locals: &[i64], out: &mut [i64]) -> bool {
    for ((&shard, &local), offset) in shards.iter().zip(locals).zip(out) {
        match back_of(along.into_iter(), shard, local) {
            Some(found) => *offset = found,
            None => return false,
        }
    }
    true
}

impl Kernels for Sections {
    fn forward(packed: &Packed, count: usize) -> ForwardKernel<'_> {
        let strides = packed.layout().shard_strides();
        let along: Vec<Along> = (packed.dims().iter().zip(strides).rev())
            .map(|(dim, &shard_stride)| Along::new(dim, shard_stride, count))
            .collect();
        Box::new(move |offsets, shard_ids, local_offsets| match along.as_slice() {
            [only] => many([only], offsets, shard_ids, local_offsets),
            [minor, major] => many([minor, major], offsets, shard_ids, local_offsets),
            [minor, middle, major] => many([minor, middle, major], offsets, shard_ids, local_offsets),
            all => many_of(all.iter(), offsets, shard_ids, local_offsets),
        })
    }

    fn inverse(packed: &Packed, count: usize) -> InverseKernel<'_> {
        let along: Vec<Back> = (packed.dims().iter().zip(packed.strides()).rev())
            .map(|(dim, &stride)| Back::new(dim, stride, count))
            .collect();
        Box::new(move |shards, locals, offsets| match along.as_slice() {
            [only] => many_back([only], shards, locals, offsets),
            [minor, major] => many_back([minor, major], shards, locals, offsets),
            [minor, middle, major] => many_back([minor, middle, major], shards, locals, offsets),
            all => shards.iter().zip(locals).zip(offsets).all(|((&shard, &local), offset)| {
                back_of(all.iter(), shard, local).is_some_and(|found| {
                    *offset = found;
                    true
                })
            }),
        })
    }
}

/// For a number of dims that is known, so that the loop over them is unrolled.
#[inline(always)]
fn many<const R: usize>(along: [&Along; R], offsets: &[i64], shard_ids: &mut [i64], locals: &mut [i64]) {
    many_of(along.into_iter(), offsets, shard_ids, locals);
}

/// Every value stays within the sizes of the tensor and of the shards, which are known to fit.
#[inline(always)]
fn many_of<'a>(
    along: impl ExactSizeIterator<Item = &'a Along<'a>> + Clone,
    offsets: &[i64],
    shard_ids: &mut [i64],
    locals: &mut [i64],
) {
    let dims = along.len();
    for ((&offset, shard_id), local_offset) in offsets.iter().zip(shard_ids).zip(locals) {
        let (mut rest, mut shard, mut local, mut stride) = (offset, 0_i64, 0_i64, 1_i64);
        for (turn, dim) in along.clone().enumerate() {
            // What is left for the major dim is its position.
            let position = if turn + 1 == dims {
                rest
            } else {
                let (quotient, position) = dim.elements.div_rem(rest);
                rest = quotient;
                position
            };
            let (index, place) = dim.find(position);
            shard = shard.wrapping_add(index.wrapping_mul(dim.shard_stride));
            local = local.wrapping_add(place.wrapping_mul(stride));
            stride = stride.wrapping_mul(match dim.extent {
                Some(extent) => extent,
                None => dim.dim.extent(index),
            });
        }
        (*shard_id, *local_offset) = (shard, local);
    }
}
