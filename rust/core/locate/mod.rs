//! The place of an element: global offset ↔ shard id and local offset, for one and for many.
//!
//! The functions for one use plain division and follow the definitions; the bulk kernels replace each division by a
//! [`Divider`](crate::radix::Divider), and the tests compare the two. Each block of the input is validated while it is on
//! its way through the cache, just before it is used.

mod forward;
pub mod held;
mod inverse;
mod kernel;

use crate::{
    error::{Error, Result},
    parallel::{self, PIECE, Poll},
    partition::Applied,
    radix::{product, unravel},
    uneven::{Cut, Dim},
};
use forward::Forward;
use inverse::Inverse;
use kernel::any_outside;

/// The number of elements that are looked at twice, once for their range, while they are in the innermost cache.
const BLOCK: usize = 1 << 11;

/// Fills shard ids and local offsets of offsets, all of which are in the tensor.
pub(crate) type ForwardKernel<'a> = Box<dyn Fn(&[i64], &mut [i64], &mut [i64]) + Sync + 'a>;

/// Fills the offsets of shard ids, which are in range, and local offsets; false if a local offset is not an element.
pub(crate) type InverseKernel<'a> = Box<dyn Fn(&[i64], &[i64], &mut [i64]) -> bool + Sync + 'a>;

/// The kernels by which partitions with dims of a kind answer for many elements at once.
pub trait Kernels: Dim + Sized + Sync {
    /// The kernel that locates some `count` offsets.
    #[doc(hidden)]
    fn forward(partition: &Applied<Self>, count: usize) -> ForwardKernel<'_>;

    /// The kernel that finds the offsets of some `count` elements.
    #[doc(hidden)]
    fn inverse(partition: &Applied<Self>, count: usize) -> InverseKernel<'_>;
}

impl Kernels for Cut {
    fn forward(partition: &Applied<Self>, _: usize) -> ForwardKernel<'_> {
        let forward = Forward::new(partition);
        Box::new(move |offsets, shard_ids, local_offsets| forward.locate(offsets, shard_ids, local_offsets))
    }

    fn inverse(partition: &Applied<Self>, _: usize) -> InverseKernel<'_> {
        let inverse = Inverse::new(partition);
        Box::new(move |shard_ids, local_offsets, offsets| {
            inverse.global(partition.size(), shard_ids, local_offsets, offsets)
        })
    }
}

impl<D: Kernels> Applied<D> {
    /// The canonical shard of the element at the global offset, and the element's offset in that shard's array.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the tensor has no such element.
    pub fn locate_one(&self, offset: i64) -> Result<(i64, i64)> {
        if offset < 0 || offset >= self.size() {
            return Err(Error::OutOfRange { what: "offsets", position: None, value: offset, limit: self.size() });
        }
        let (mut rest, mut shard, mut local, mut stride) = (offset, 0, 0, 1);
        for (dim, shard_stride) in self.dims().iter().zip(self.layout().shard_strides()).rev() {
            let (index, place) = dim.locate(rest % dim.elements());
            rest /= dim.elements();
            shard += index * shard_stride;
            local += place * stride;
            stride *= dim.extent(index);
        }
        Ok((shard, local))
    }

    /// The global offset of the element at `local_offset` of the array of shard `shard_id`: the inverse of
    /// [`Applied::locate_one`].
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there is no such shard or no such element in it, [`Error::Padding`] if it is padding.
    pub fn global_offset_one(&self, shard_id: i64, local_offset: i64) -> Result<i64> {
        let index = unravel(self.layout().check_shard("shard_ids", shard_id)?, self.layout().num_shards());
        let extents: Vec<i64> = self.dims().iter().zip(&index).map(|(dim, &i)| dim.extent(i)).collect();
        // Checked, because an empty shard may have other extents whose product alone would not fit.
        let elements = product("shard", &extents)?;
        if local_offset < 0 || local_offset >= elements {
            let what = "local_offsets";
            return Err(Error::OutOfRange { what, position: None, value: local_offset, limit: elements });
        }
        let (mut rest, mut offset) = (local_offset, 0);
        for (at, dim) in self.dims().iter().enumerate().rev() {
            let position = dim.position(index[at], rest % extents[at]);
            let position = position.ok_or(Error::Padding { position: None, shard: shard_id, local: local_offset })?;
            offset += position * self.strides()[at];
            rest /= extents[at];
        }
        Ok(offset)
    }

    /// [`Applied::locate_one`] for many: fills `shard_ids` and `local_offsets`.
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
        let kernel = D::forward(self, offsets.len());
        let pieces = offsets.chunks(PIECE).zip(shard_ids.chunks_mut(PIECE)).zip(local_offsets.chunks_mut(PIECE));
        let done = parallel::for_each(offsets.len(), pieces, poll, |((offsets, shard_ids), local_offsets)| {
            let blocks = offsets.chunks(BLOCK).zip(shard_ids.chunks_mut(BLOCK)).zip(local_offsets.chunks_mut(BLOCK));
            for ((offsets, shard_ids), local_offsets) in blocks {
                all_below("offsets", offsets, self.size())?;
                kernel(offsets, shard_ids, local_offsets);
            }
            Ok(())
        });
        done.map_err(|error| first_outside(error, "offsets", offsets, self.size()))
    }

    /// [`Applied::global_offset_one`] for many: fills `offsets`.
    ///
    /// # Errors
    /// As [`Applied::global_offset_one`], with the first bad position; [`Error::Length`] if the slices are not equally
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
        let kernel = D::inverse(self, shard_ids.len());
        let total = self.layout().total_shards();
        let pieces = shard_ids.chunks(PIECE).zip(local_offsets.chunks(PIECE)).zip(offsets.chunks_mut(PIECE));
        let done = parallel::for_each(shard_ids.len(), pieces, poll, |((shard_ids, local_offsets), offsets)| {
            let blocks = shard_ids.chunks(BLOCK).zip(local_offsets.chunks(BLOCK)).zip(offsets.chunks_mut(BLOCK));
            for ((shard_ids, local_offsets), offsets) in blocks {
                all_below("shard_ids", shard_ids, total)?;
                // Which one it is, and why, is found below, in order.
                if !kernel(shard_ids, local_offsets, offsets) {
                    return Err(outside("local_offsets"));
                }
            }
            Ok(())
        });
        match done {
            Err(Error::OutOfRange { .. }) => {}
            other => return other,
        }
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

/// The error of a worker whose piece holds a number outside the range; the caller finds in order
/// which one.
fn outside(what: &'static str) -> Error {
    Error::OutOfRange { what, position: None, value: -1, limit: 0 }
}

fn same_length((left, left_len): (&'static str, usize), (right, right_len): (&'static str, usize)) -> Result<()> {
    if left_len == right_len { Ok(()) } else { Err(Error::Length { left, left_len, right, right_len }) }
}

fn all_below(what: &'static str, values: &[i64], limit: i64) -> Result<()> {
    if any_outside(values, limit) { Err(outside(what)) } else { Ok(()) }
}

/// The same error about the first of `values` outside `0..limit`.
fn first_outside(error: Error, what: &'static str, values: &[i64], limit: i64) -> Error {
    let first = values.iter().position(|value| !(0..limit).contains(value));
    match (error, first) {
        (Error::OutOfRange { .. }, Some(i)) => Error::OutOfRange { what, position: Some(i), value: values[i], limit },
        (error, _) => error,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{layout::Layout, mesh::Mesh, parallel::never, partition::Partition, uneven::Uneven};
    use proptest::prelude::*;
    use std::sync::Arc;

    /// Partitions of up to three dims, cut by up to four axes in any order, under any rule but `"even"`.
    pub(crate) fn partitions() -> impl Strategy<Value = Partition> {
        let names = ["a", "b", "c", "d"];
        (
            prop::collection::vec(1..4_i64, 4),
            prop::collection::vec(0..9_i64, 1..6),
            Just(names.to_vec()).prop_shuffle(),
            prop::collection::vec(0..6_usize, 4),
            prop::sample::select(&Uneven::ALL[1..]),
        )
            .prop_map(move |(sizes, shape, order, dims, rule)| {
                let mesh = Arc::new(Mesh::new(&names, &sizes).unwrap());
                let mut specs = vec![Vec::new(); shape.len()];
                for (name, dim) in order.into_iter().zip(dims) {
                    if let Some(spec) = specs.get_mut(dim) {
                        spec.push(name);
                    }
                }
                let layout = Arc::new(Layout::new(mesh, &specs, &[]).unwrap());
                Partition::new(layout, &shape, rule).unwrap()
            })
    }

    proptest! {
        #[test]
        fn bulk_and_single_agree_and_invert(p in partitions()) {
            let offsets: Vec<i64> = (0..p.size()).collect();
            let (mut shards, mut locals) = (vec![0; offsets.len()], vec![0; offsets.len()]);
            p.locate_into(&offsets, &mut shards, &mut locals, &mut never).unwrap();
            for (&offset, (&shard, &local)) in offsets.iter().zip(shards.iter().zip(&locals)) {
                prop_assert_eq!(p.locate_one(offset).unwrap(), (shard, local));
                prop_assert_eq!(p.global_offset_one(shard, local).unwrap(), offset);
            }
            let mut back = vec![0; offsets.len()];
            p.global_offset_into(&shards, &locals, &mut back, &mut never).unwrap();
            prop_assert_eq!(&back, &offsets);
            // What other processors do.
            let (mut plain_shards, mut plain_locals) = (vec![0; offsets.len()], vec![0; offsets.len()]);
            if Forward::new(&p).portable(&offsets, &mut plain_shards, &mut plain_locals) {
                prop_assert_eq!((&plain_shards, &plain_locals), (&shards, &locals));
            }
            if let Some(inside) = Inverse::new(&p).portable(&shards, &locals, &mut back) {
                prop_assert!(inside);
                prop_assert_eq!(back, offsets);
            }
        }

        #[test]
        fn large_dims_locate_exactly(
            // Either side of where the numbers are narrow.
            n in prop_oneof![1..=i64::MAX / 8, (1_i64 << 28)..=(1 << 29), 1..=(1_i64 << 28)],
            axes in prop::collection::vec(1..2000_i64, 1..4),
            rule in prop::sample::select(&Uneven::ALL[1..]),
            seeds in prop::collection::vec(0..i64::MAX, 8),
        ) {
            let names: Vec<String> = (0..axes.len()).map(|i| format!("a{i}")).collect();
            let mesh = Arc::new(Mesh::new(&names, &axes).unwrap());
            let layout = Arc::new(Layout::new(mesh, &[vec![], names], &[]).unwrap());
            let p = Partition::new(layout, &[7, n], rule).unwrap();
            let offsets: Vec<i64> = seeds.iter().map(|s| s % p.size()).collect();
            let (mut shards, mut locals) = (vec![0; 8], vec![0; 8]);
            p.locate_into(&offsets, &mut shards, &mut locals, &mut never).unwrap();
            for i in 0..8 {
                prop_assert_eq!(p.locate_one(offsets[i]).unwrap(), (shards[i], locals[i]));
            }
            let mut back = vec![0; 8];
            p.global_offset_into(&shards, &locals, &mut back, &mut never).unwrap();
            prop_assert_eq!(back, offsets);
        }

        #[test]
        fn what_is_outside_is_refused(p in partitions(), shard in 0..100_i64, local in -3..3_i64) {
            for offset in [-1, i64::MIN, p.size(), i64::MAX] {
                prop_assert!(p.locate_one(offset).is_err());
            }
            let shard = shard % p.layout().total_shards();
            let held: i64 = p.box_of_shard(shard).unwrap().iter().map(|(a, b)| b - a).product();
            for local in [local, held + local, i64::MIN, i64::MAX, -held] {
                let one = p.global_offset_one(shard, local).ok();
                prop_assert_eq!(one.is_some(), (0..held).contains(&local));
                let mut out = [0];
                let many = p.global_offset_into(&[shard], &[local], &mut out, &mut never);
                prop_assert_eq!(many.is_ok().then_some(out[0]), one);
            }
        }
    }

    #[test]
    fn the_first_bad_offset_is_named() {
        let mesh = Arc::new(Mesh::new(&["x"], &[2]).unwrap());
        let layout = Arc::new(Layout::new(mesh, &[["x"]], &[]).unwrap());
        let p = Partition::new(layout, &[1 << 20], Uneven::Even).unwrap();
        let mut offsets: Vec<i64> = (0..1 << 20).collect();
        (offsets[700_000], offsets[900_000]) = (-5, 1 << 20);
        let (mut shards, mut locals) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        let error = p.locate_into(&offsets, &mut shards, &mut locals, &mut never).unwrap_err();
        let expected = Error::OutOfRange { what: "offsets", position: Some(700_000), value: -5, limit: 1 << 20 };
        assert_eq!(error, expected);
        let bad = p.global_offset_into(&[0, 1, 2], &[0, 0, 0], &mut [0; 3], &mut never).unwrap_err();
        assert_eq!(bad, Error::OutOfRange { what: "shard_ids", position: Some(2), value: 2, limit: 2 });
        let bad = p.global_offset_into(&[0, 1], &[0, 1 << 19], &mut [0; 2], &mut never).unwrap_err();
        assert_eq!(bad, Error::OutOfRange { what: "local_offsets", position: Some(1), value: 1 << 19, limit: 1 << 19 });
    }

    #[test]
    fn arrays_of_other_lengths_are_refused() {
        let mesh = Arc::new(Mesh::new(&["x"], &[2]).unwrap());
        let layout = Arc::new(Layout::new(mesh, &[["x"]], &[]).unwrap());
        let p = Partition::new(layout, &[4], Uneven::Even).unwrap();
        assert!(matches!(p.locate_into(&[0], &mut [0; 2], &mut [0], &mut never), Err(Error::Length { .. })));
        assert!(matches!(p.locate_into(&[0], &mut [0], &mut [0; 2], &mut never), Err(Error::Length { .. })));
        assert!(matches!(p.global_offset_into(&[0], &[0; 2], &mut [0], &mut never), Err(Error::Length { .. })));
    }
}
