//! Copies between buffers, and between buffers and arrays. What is `unsafe` in this crate is here, in `job.rs`, which takes
//! the memory, and in `unit/` and `slot.rs`, which ask for it.
//!
//! Bytes of arrays are reached through raw pointers: an array's rows may lie between those of another that someone else
//! is writing, so there is no slice that holds it alone. Each row is one, though.

use shardwise_core::short;

/// One dim of a copy: positions, and the bytes from one to the next in both memories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dim {
    pub(crate) extent: i64,
    pub(crate) from: i64,
    pub(crate) to: i64,
}

/// The dims of a copy in order of `from`, largest first, merged where they follow one another in both memories, and the
/// bytes of the run that is left at the end.
pub(crate) fn collapsed(dims: impl Iterator<Item = Dim>) -> (Vec<Dim>, i64) {
    let mut sorted: Vec<Dim> = dims.filter(|dim| dim.extent != 1).collect();
    short::sort_by_key(&mut sorted, |dim| std::cmp::Reverse((dim.from.abs(), dim.to.abs())));
    let mut merged: Vec<Dim> = Vec::with_capacity(sorted.len());
    for inner in sorted {
        match merged.last_mut() {
            Some(outer) if outer.from == inner.extent * inner.from && outer.to == inner.extent * inner.to => {
                *outer = Dim { extent: outer.extent * inner.extent, ..inner };
            }
            _ => merged.push(inner),
        }
    }
    match merged.iter().rposition(|dim| (dim.from, dim.to) == (1, 1)) {
        Some(last) => {
            let run = merged.remove(last).extent;
            (merged, run)
        }
        None => (merged, 1),
    }
}

/// Calls `each` with the offsets of every position of `dims` in both memories, in order.
pub(crate) fn positions(dims: &[Dim], mut each: impl FnMut(i64, i64)) {
    if dims.iter().any(|dim| dim.extent <= 0) {
        return;
    }
    let mut at = vec![0_i64; dims.len()];
    let (mut from, mut to) = (0, 0);
    loop {
        each(from, to);
        let mut dim = dims.len();
        loop {
            if dim == 0 {
                return;
            }
            dim -= 1;
            at[dim] += 1;
            from += dims[dim].from;
            to += dims[dim].to;
            if at[dim] < dims[dim].extent {
                break;
            }
            from -= dims[dim].from * dims[dim].extent;
            to -= dims[dim].to * dims[dim].extent;
            at[dim] = 0;
        }
    }
}

/// A place in memory that is read or written through a pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pointer(*mut u8);

// SAFETY: a pointer is only a number here; every access says why it is sound.
unsafe impl Send for Pointer {}

impl Pointer {
    pub(crate) fn new(address: *mut u8) -> Self {
        Self(address)
    }

    /// `bytes` further on. The address is only used if it lies within the memory that the pointer was made for.
    pub(crate) fn offset(self, bytes: i64) -> Self {
        Self(self.0.wrapping_offset(bytes as isize))
    }

    /// The bytes from here to another place of the same memory.
    pub(crate) fn distance(self, other: Self) -> i64 {
        (other.0 as usize).wrapping_sub(self.0 as usize) as i64
    }

    /// A run as a slice to read.
    ///
    /// # Safety
    /// The `length` bytes must be valid, and nobody may write them while the slice lives.
    pub(crate) unsafe fn slice<'a>(self, length: i64) -> &'a [u8] {
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts(self.0, length as usize) }
    }

    /// A run as a slice to write.
    ///
    /// # Safety
    /// The `length` bytes must be valid and initialised, and nobody else may read or write them while the slice lives.
    pub(crate) unsafe fn slice_mut<'a>(self, length: i64) -> &'a mut [u8] {
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.0, length as usize) }
    }
}

/// Copies a run of `run` bytes for every position of `dims`.
///
/// # Safety
/// All positions must lie in memory that is valid for reads (`from`) and for writes (`to`); nobody else may access the
/// bytes that are written, nor write those that are read; and the two must not overlap.
pub(crate) unsafe fn copy(from: Pointer, to: Pointer, dims: &[Dim], run: i64) {
    let (outer, inner) = match dims.split_last() {
        Some((inner, outer)) => (outer, *inner),
        None => (dims, Dim { extent: 1, from: 0, to: 0 }),
    };
    positions(outer, |a, b| {
        let (from, to) = (from.offset(a).0, to.offset(b).0);
        // SAFETY: these are positions of `dims`, which the caller vouches for.
        unsafe {
            match run {
                1 => items::<1>(from, to, inner),
                2 => items::<2>(from, to, inner),
                4 => items::<4>(from, to, inner),
                8 => items::<8>(from, to, inner),
                16 => items::<16>(from, to, inner),
                32 => items::<32>(from, to, inner),
                64 => items::<64>(from, to, inner),
                128 => items::<128>(from, to, inner),
                _ => {
                    for i in 0..inner.extent as isize {
                        let from = from.wrapping_offset(i * inner.from as isize);
                        let to = to.wrapping_offset(i * inner.to as isize);
                        std::ptr::copy_nonoverlapping(from, to, run as usize);
                    }
                }
            }
        }
    });
}

/// Copies items of `N` bytes along one dim.
///
/// # Safety
/// As for [`copy`].
#[inline(always)]
unsafe fn items<const N: usize>(from: *const u8, to: *mut u8, dim: Dim) {
    for i in 0..dim.extent as isize {
        let from = from.wrapping_offset(i * dim.from as isize).cast::<[u8; N]>();
        let to = to.wrapping_offset(i * dim.to as isize).cast::<[u8; N]>();
        // SAFETY: the caller's; arrays of bytes have no alignment.
        unsafe { to.write_unaligned(from.read_unaligned()) };
    }
}
