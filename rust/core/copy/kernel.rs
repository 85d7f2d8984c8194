//! Copies of rows of raw bytes: with `strided`, the one place of the core that has `unsafe` of its own.
//!
//! No Rust slice `&[T]` of such an array is ever made. It may be misaligned, have any strides, and another thread
//! may look at it. No reference to the data exists, only raw pointers, and bytes are moved as bytes.
//!
//! # Why it is sound
//!
//! 1. *Every address is valid.* The maker of a [`Strided`] vouches that all elements that its extents and strides span
//!    are there for as long as it lives, and writeable if it is used as a destination (`Strided::new` is `unsafe`).
//!    `Copies::push` takes only boxes within the extents, checked, so the copies touch elements of the arrays only.
//! 2. *No two writes meet, and no write meets a read.* `Copies` are made of `Disjoint` arrays, which share no byte
//!    with one another, and within one destination the boxes are those of a plan, which tile the shard: each element is
//!    received once.
//! 3. *Threads.* The pointers are used by scoped threads that end before the call returns. That other code may write to
//!    the arrays meanwhile is the caller's affair, as it is in numpy.

use std::{ops::Range, ptr};

use crate::copy::{form::Form, strided::Strided, tuning::FETCHED_ROW};

/// Where a box begins in its source and in its destination.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    from: *const u8,
    to: *mut u8,
}

// SAFETY: two addresses; what is done with them is argued in the module's documentation, points 2 and 3.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl Place {
    /// No box at all.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn nowhere() -> Self {
        Self { from: ptr::null(), to: ptr::null_mut() }
    }

    /// The first items of two arrays.
    pub(super) fn of(source: &Strided, destination: &Strided) -> Self {
        Self { from: source.data().cast_const(), to: destination.data() }
    }

    /// The beginnings of two slices.
    #[cfg(test)]
    pub(super) fn new(source: &[u8], destination: &mut [u8]) -> Self {
        Self { from: source.as_ptr(), to: destination.as_mut_ptr() }
    }

    /// Further by so many bytes in the source and in the destination.
    pub(super) fn moved(self, from: isize, to: isize) -> Self {
        Self { from: self.from.wrapping_offset(from), to: self.to.wrapping_offset(to) }
    }

    /// The same destination, and so many bytes behind the first item of a source.
    pub(super) fn with_source(self, source: &Strided, offset: isize) -> Self {
        Self { from: source.data().cast_const().wrapping_offset(offset), ..self }
    }

    /// An address of the source.
    pub(super) fn source(self, offset: isize) -> *const u8 {
        self.from.wrapping_offset(offset)
    }

    /// An address of the destination.
    pub(super) fn destination(self, offset: isize) -> *mut u8 {
        self.to.wrapping_offset(offset)
    }
}

/// One box to be copied.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job {
    pub(super) place: Place,
    /// The number of its form.
    pub(super) form: u32,
    /// Which source and destination, for the order.
    pub(super) arrays: (u32, u32),
    /// The number of its destination among those that are streamed to together.
    pub(super) stream: u32,
}

/// Copies some rows of a box.
///
/// # Safety
/// `place` must be where boxes of this form begin, valid for reads and writes, which do not overlap each other and which
/// nobody else writes meanwhile; `rows` must be among those of the form.
pub(super) unsafe fn copy_rows(form: &Form, place: Place, rows: Range<i64>) {
    let (stride_from, stride_to) = form.row_strides();
    form.each_run(rows.start, rows.end - rows.start, |a, b, length| {
        let (from, to) = (place.source(a), place.destination(b));
        // SAFETY: `a` and `b` are the offsets of a row of the boxes, and the `length` rows from it on are the last dim's
        // strides apart.
        unsafe { copy_run(from, stride_from, to, stride_to, form.row as usize, length as usize) };
    });
}

/// Copies `count` rows of `row` bytes, which lie so far apart.
///
/// # Safety
/// The rows must be valid for reads from `from` on and for writes from `to` on, and not overlap.
#[inline(always)]
pub(super) unsafe fn copy_run(
    from: *const u8,
    stride_from: isize,
    to: *mut u8,
    stride_to: isize,
    row: usize,
    count: usize,
) {
    let rows = (0..count as isize).map(|i| (from.wrapping_offset(i * stride_from), to.wrapping_offset(i * stride_to)));
    // SAFETY: the caller's.
    unsafe {
        match row {
            1 => rows.for_each(|(from, to)| copy_item::<1>(from, to)),
            2 => rows.for_each(|(from, to)| copy_item::<2>(from, to)),
            4 => rows.for_each(|(from, to)| copy_item::<4>(from, to)),
            8 => rows.for_each(|(from, to)| copy_item::<8>(from, to)),
            16 => rows.for_each(|(from, to)| copy_item::<16>(from, to)),
            32 => rows.for_each(|(from, to)| copy_short(from, to, 32)),
            64 => rows.for_each(|(from, to)| copy_short(from, to, 64)),
            128 => rows.for_each(|(from, to)| copy_short(from, to, 128)),
            256 => rows.for_each(|(from, to)| copy_short(from, to, 256)),
            17..256 => rows.for_each(|(from, to)| copy_short(from, to, row)),
            ..=FETCHED_ROW => rows.for_each(|(from, to)| {
                prefetch(to.wrapping_offset(stride_to), row as i64);
                ptr::copy_nonoverlapping(from, to, row);
            }),
            _ => rows.for_each(|(from, to)| ptr::copy_nonoverlapping(from, to, row)),
        }
    }
}

/// Copies one item of `N` bytes; arrays of bytes have no alignment.
///
/// # Safety
/// As for [`ptr::copy_nonoverlapping`].
#[inline(always)]
pub(super) unsafe fn copy_item<const N: usize>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller's.
    unsafe { to.cast::<[u8; N]>().write_unaligned(from.cast::<[u8; N]>().read_unaligned()) };
}

/// Copies 16 bytes or more, but not many: saves the call of a function, and writes in the order of memory, which
/// what the compiler makes of a larger array does not.
///
/// # Safety
/// As for [`ptr::copy_nonoverlapping`].
#[inline(always)]
pub(super) unsafe fn copy_short(from: *const u8, to: *mut u8, bytes: usize) {
    const STEP: usize = 16;
    let mut at = 0;
    // SAFETY: the caller's; no step goes past the end.
    unsafe {
        while at + STEP <= bytes {
            copy_item::<STEP>(from.wrapping_add(at), to.wrapping_add(at));
            at += STEP;
        }
        if at < bytes {
            copy_item::<STEP>(from.wrapping_add(bytes - STEP), to.wrapping_add(bytes - STEP));
        }
    }
}

/// Asks for the lines of `bytes` bytes; a hint, which does nothing to memory and may be given for any address.
#[inline(always)]
pub(super) fn prefetch(from: *const u8, bytes: i64) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        /// The bytes that come into the cache at once.
        const LINE: usize = 64;
        for line in (0..bytes as usize).step_by(LINE) {
            // SAFETY: a prefetch does not access memory; SSE is part of x86-64.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, bytes);
}
