//! Where an element of a packed partition lives: global offset ↔ shard id and local offset, for one and for many.
//!
//! The functions for one follow the definitions. For many, the answers for each position along a packed dim are listed
//! first where the dim is not too long for that: then an element costs one division and one look-up per dim, as it does
//! where the dim is plain.

use crate::{
    error::{Error, Result},
    locate::{all_below, first_outside, outside, same_length},
    packed::Packed,
    parallel::{self, PIECE, Poll},
    radix::{Divider, product},
    sections::dim::Sections,
};

/// Up to how many positions along a dim are listed: 2 MB of answers.
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

/// Where the elements of a dim's arrays are in the dim.
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

/// The global offset of an element of a shard's array; none if there is no such element, or it is padding.
#[inline(always)]
fn back_of<'a>(
    along: impl ExactSizeIterator<Item = &'a Back<'a>>,
    total_shards: i64,
    shard_id: i64,
    local_offset: i64,
) -> Option<i64> {
    if shard_id < 0 || shard_id >= total_shards || local_offset < 0 {
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
fn many_back<const R: usize>(along: [&Back; R], total: i64, shards: &[i64], locals: &[i64], out: &mut [i64]) -> bool {
    for ((&shard, &local), offset) in shards.iter().zip(locals).zip(out) {
        match back_of(along.into_iter(), total, shard, local) {
            Some(found) => *offset = found,
            None => return false,
        }
    }
    true
}

impl Packed {
    /// The canonical shard of the element at the global offset, and the element's offset in that shard's array.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the tensor has no such element.
    pub fn locate_one(&self, offset: i64) -> Result<(i64, i64)> {
        if offset < 0 || offset >= self.size() {
            return Err(Error::OutOfRange { what: "offsets", position: None, value: offset, limit: self.size() });
        }
        let (mut rest, mut shard, mut local, mut stride) = (offset, 0, 0, 1);
        for (dim, shard_stride) in self.dims().iter().zip(self.shards().shard_strides()).rev() {
            let (index, place) = dim.locate(rest % dim.elements());
            rest /= dim.elements();
            shard += index * shard_stride;
            local += place * stride;
            stride *= dim.extent(index);
        }
        Ok((shard, local))
    }

    /// The global offset of the element at `local_offset` of the array of shard `shard_id`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there is no such shard or no such element in it, [`Error::Padding`] if it is padding.
    pub fn global_offset_one(&self, shard_id: i64, local_offset: i64) -> Result<i64> {
        let mut rest_id = self.shards().check_shard("shard_ids", shard_id)?;
        let mut index = vec![0; self.dims().len()];
        for (slot, dim) in index.iter_mut().zip(self.dims()).rev() {
            *slot = rest_id % dim.shards();
            rest_id /= dim.shards();
        }
        let extents: Vec<i64> = index.iter().zip(self.dims()).map(|(&i, dim)| dim.extent(i)).collect();
        let elements = product("shard", &extents)?;
        if local_offset < 0 || local_offset >= elements {
            let what = "local_offsets";
            return Err(Error::OutOfRange { what, position: None, value: local_offset, limit: elements });
        }
        let (mut rest, mut offset) = (local_offset, 0);
        for (dim, (&i, stride)) in self.dims().iter().zip(index.iter().zip(self.strides())).rev() {
            let extent = dim.extent(i);
            let position = dim.position(i, rest % extent);
            let position = position.ok_or(Error::Padding { position: None, shard: shard_id, local: local_offset })?;
            offset += position * stride;
            rest /= extent;
        }
        Ok(offset)
    }

    /// [`Packed::locate_one`] for many: fills `shard_ids` and `local_offsets`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] with the first bad position; [`Error::Length`] if the slices are not equally long; what
    /// `poll` returns. What the outputs hold after an error is unspecified.
    #[inline(never)]
    pub fn locate_into(
        &self,
        offsets: &[i64],
        shard_ids: &mut [i64],
        local_offsets: &mut [i64],
        poll: Poll<'_>,
    ) -> Result<()> {
        same_length(("offsets", offsets.len()), ("shard_ids", shard_ids.len()))?;
        same_length(("offsets", offsets.len()), ("local_offsets", local_offsets.len()))?;
        let strides = self.shards().shard_strides();
        let along: Vec<Along> = (self.dims().iter().zip(strides).rev())
            .map(|(dim, &shard_stride)| Along::new(dim, shard_stride, offsets.len()))
            .collect();
        let pieces = offsets.chunks(PIECE).zip(shard_ids.chunks_mut(PIECE)).zip(local_offsets.chunks_mut(PIECE));
        let done = parallel::for_each(offsets.len(), pieces, poll, |((offsets, shard_ids), local_offsets)| {
            all_below("offsets", offsets, self.size())?;
            match along.as_slice() {
                [only] => many([only], offsets, shard_ids, local_offsets),
                [minor, major] => many([minor, major], offsets, shard_ids, local_offsets),
                [minor, middle, major] => many([minor, middle, major], offsets, shard_ids, local_offsets),
                all => many_of(all.iter(), offsets, shard_ids, local_offsets),
            }
            Ok(())
        });
        done.map_err(|error| first_outside(error, "offsets", offsets, self.size()))
    }

    /// [`Packed::global_offset_one`] for many: fills `offsets`.
    ///
    /// # Errors
    /// As [`Packed::global_offset_one`], with the first bad position; [`Error::Length`] if the slices are not equally
    /// long; what `poll` returns. What `offsets` holds after an error is unspecified.
    #[inline(never)]
    pub fn global_offset_into(
        &self,
        shard_ids: &[i64],
        local_offsets: &[i64],
        offsets: &mut [i64],
        poll: Poll<'_>,
    ) -> Result<()> {
        same_length(("shard_ids", shard_ids.len()), ("local_offsets", local_offsets.len()))?;
        same_length(("shard_ids", shard_ids.len()), ("offsets", offsets.len()))?;
        let along: Vec<Back> = (self.dims().iter().zip(self.strides()).rev())
            .map(|(dim, &stride)| Back::new(dim, stride, shard_ids.len()))
            .collect();
        let total = self.shards().total_shards();
        let pieces = shard_ids.chunks(PIECE).zip(local_offsets.chunks(PIECE)).zip(offsets.chunks_mut(PIECE));
        let done = parallel::for_each(shard_ids.len(), pieces, poll, |((shard_ids, local_offsets), offsets)| {
            let all_there = match along.as_slice() {
                [only] => many_back([only], total, shard_ids, local_offsets, offsets),
                [minor, major] => many_back([minor, major], total, shard_ids, local_offsets, offsets),
                [minor, middle, major] => many_back([minor, middle, major], total, shard_ids, local_offsets, offsets),
                all => shard_ids.iter().zip(local_offsets).zip(offsets).all(|((&shard, &local), offset)| {
                    back_of(all.iter(), total, shard, local).is_some_and(|found| {
                        *offset = found;
                        true
                    })
                }),
            };
            if all_there { Ok(()) } else { Err(outside("local_offsets")) }
        });
        match done {
            Err(Error::OutOfRange { .. }) => {}
            other => return other,
        }
        // Which one it is, and why, is found in order.
        for (at, (&shard_id, &local)) in shard_ids.iter().zip(local_offsets).enumerate() {
            match self.global_offset_one(shard_id, local) {
                Err(Error::OutOfRange { what, value, limit, .. }) => {
                    return Err(Error::OutOfRange { what, position: Some(at), value, limit });
                }
                Err(Error::Padding { shard, local, .. }) => {
                    return Err(Error::Padding { position: Some(at), shard, local });
                }
                _ => {}
            }
        }
        done
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
