//! Strided copies of raw bytes, blocked: the one module of the core with `unsafe` of its own.
//!
//! A box of one array is copied to a box of another, whatever their dtype and strides, as *rows*: runs of bytes that are
//! contiguous in both. The order of the rows decides the speed. Cut 16,384 columns among 512 devices and a row is 128
//! bytes; copied device by device, every row opens another page of the source, and the memory delivers a fifth of what
//! it could. So the copies that read (or write) one wide array go side by side, a block of at most 16 rows of each in
//! turn: then both arrays are walked nearly in order. Good:
//!
//! ```text
//! for each block of 16 rows of the wide array: for each narrow array: copy the block's rows
//! ```
//!
//! Bad: a Rust slice `&[T]` of such an array. It may be misaligned, have any strides, and another thread may look at it.
//! Here no reference to the data exists, only raw pointers, and bytes are moved as bytes.
//!
//! # Why it is sound
//!
//! 1. *Every address is valid.* Whoever makes a [`Region`] vouches that all elements that its extents and strides span
//!    are there for as long as it lives, and writeable if it is used as a destination (`Region::new` is `unsafe`).
//!    [`Copies::push`] takes only boxes within the extents, checked, so the copies touch elements of the regions only.
//! 2. *No two writes meet, and no write meets a read.* [`Copies`] are made of [`Disjoint`] regions, which share no byte
//!    with one another, and within one destination the boxes are those of a plan, which tile the shard: each element is
//!    received once.
//! 3. *Threads.* The pointers are used by scoped threads that end before the call returns. That other code may write to
//!    the arrays meanwhile is the caller's affair, as it is in numpy.

use std::{cmp::Reverse, ops::Range, ptr};

use crate::{
    error::{Error, Result},
    reshard::memory::Disjoint,
};

/// The longest row that is copied at once, so that long ones are shared among threads.
const LONGEST_ROW: i64 = 1 << 16;
/// How many rows of one copy are done before the next has its turn.
const ROWS_PER_BLOCK: i64 = 16;
/// The bytes of a block that make it large enough, whatever its number of rows.
const BYTES_PER_BLOCK: i64 = 1 << 14;
/// From how many bytes between rows on the processor does not see by itself which comes next.
const PREFETCHED_FROM: usize = 1 << 12;
/// Up to how many bytes the rows are so short that it cannot catch up while one is copied.
const LONGEST_PREFETCHED: i64 = 512;
/// How many copies ahead the rows are fetched; measured: 1 is too late, and 8 push out what is still to be used.
const PREFETCH_AHEAD: usize = 2;
/// The bytes of all copies of a group in one turn, from which on they are shared among workers.
const LARGEST_TURN: i64 = 1 << 22;

/// A strided array of items in memory.
#[derive(Debug, Clone)]
pub struct Region {
    data: *mut u8,
    itemsize: usize,
    /// Extent, and stride in bytes.
    dims: Vec<(i64, isize)>,
}

// SAFETY: a region is an address with a shape; what is done with it is argued in the module's documentation.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// The items of `itemsize` bytes at `data`, with an extent and a stride in bytes for each dim.
    ///
    /// # Safety
    /// Every item that the extents and strides span must be valid for reads, and for writes if the region is used as a
    /// destination, as long as the region is used.
    #[must_use]
    pub unsafe fn new(data: *mut u8, itemsize: usize, dims: Vec<(i64, isize)>) -> Self {
        Self { data, itemsize, dims }
    }

    /// The bytes of all items.
    #[must_use]
    pub fn bytes(&self) -> i64 {
        let extents = self.dims.iter().map(|dim| dim.0);
        extents.fold(self.itemsize as i64, i64::saturating_mul)
    }

    /// The address of the first item.
    #[must_use]
    pub fn address(&self) -> usize {
        self.data.addr()
    }

    /// The bytes of an item.
    #[must_use]
    pub fn itemsize(&self) -> usize {
        self.itemsize
    }

    /// Extent, and stride in bytes, of each dim.
    #[must_use]
    pub fn dims(&self) -> &[(i64, isize)] {
        &self.dims
    }

    /// The address of the item at `start`, if the box of `extent` there lies within the region.
    #[inline]
    fn item(&self, start: &[i64], extent: &[i64]) -> Option<*mut u8> {
        if self.dims.len() != start.len() || self.dims.len() != extent.len() {
            return None;
        }
        let mut offset = 0_isize;
        for ((&(size, stride), &start), &n) in self.dims.iter().zip(start).zip(extent) {
            if start < 0 || n < 0 || start > size || n > size - start {
                return None;
            }
            // Wrapping: strides of opposite signs may leave the array and come back; the sum is an item's offset.
            offset = offset.wrapping_add((start as isize).wrapping_mul(stride));
        }
        Some(self.data.wrapping_offset(offset))
    }
}

/// How the boxes of a copy lie in their arrays.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Form {
    /// (extent, source stride, destination stride) of the dims over the row, outermost first.
    dims: Vec<(i64, isize, isize)>,
    /// The bytes of a row.
    row: i64,
    /// The number of rows: the product of the extents.
    rows: i64,
    /// Rows per block.
    block: i64,
    /// Whether the rows lie further apart in the source than in the destination.
    wide_source: bool,
    /// Whether rows that are copied soon are worth being fetched into the cache: they are short, and far apart.
    prefetched: bool,
}

impl Form {
    fn new(mut dims: Vec<(i64, isize, isize)>, itemsize: i64) -> Self {
        dims.retain(|&(extent, ..)| extent != 1);
        // The order of the dims is free; the destination's own order makes long rows of it.
        dims.sort_by_key(|&(_, _, stride)| std::cmp::Reverse(stride.unsigned_abs()));
        let mut merged: Vec<(i64, isize, isize)> = Vec::with_capacity(dims.len());
        for (extent, from, to) in dims {
            match merged.last_mut() {
                Some(outer) if outer.1 == from * extent as isize && outer.2 == to * extent as isize => {
                    *outer = (outer.0 * extent, from, to);
                }
                _ => merged.push((extent, from, to)),
            }
        }
        let mut row = itemsize;
        if let Some(&(extent, from, to)) = merged.last()
            && (from as i64, to as i64) == (itemsize, itemsize)
        {
            row = extent * itemsize;
            merged.pop();
        }
        Self::of_rows(merged, row)
    }

    fn of_rows(dims: Vec<(i64, isize, isize)>, row: i64) -> Self {
        let rows = dims.iter().map(|dim| dim.0).product();
        let block = (BYTES_PER_BLOCK / row.max(1)).clamp(1, ROWS_PER_BLOCK.max(256 / row.max(1)));
        let wide_source = dims.last().is_some_and(|&(_, from, to)| from.unsigned_abs() > to.unsigned_abs());
        let apart = dims.last().is_some_and(|&(_, from, _)| from.unsigned_abs() >= PREFETCHED_FROM);
        Self { dims, row, rows, block, wide_source, prefetched: apart && row <= LONGEST_PREFETCHED }
    }

    /// The form with its rows cut into pieces of [`LONGEST_ROW`], and what is left of each row, with its offset.
    fn shortened(&self) -> (Self, Option<(Self, isize)>) {
        let (pieces, rest) = (self.row / LONGEST_ROW, self.row % LONGEST_ROW);
        let mut dims = self.dims.clone();
        dims.push((pieces, LONGEST_ROW as isize, LONGEST_ROW as isize));
        let tail = (rest > 0).then(|| (Self::of_rows(self.dims.clone(), rest), (pieces * LONGEST_ROW) as isize));
        (Self::of_rows(dims, LONGEST_ROW), tail)
    }

    fn blocks(&self) -> i64 {
        crate::radix::ceil_div(self.rows, self.block)
    }

    /// First row, and number of rows, of a block; none past the last block.
    fn rows_of(&self, block: i64) -> (i64, i64) {
        let first = block * self.block;
        (first, (self.rows - first).min(self.block))
    }

    /// Shows `visit` the `count` rows from `first` on, in runs that are evenly spaced along the last dim: the offsets of
    /// the run's first row in source and destination, and the number of its rows.
    #[inline(always)]
    fn each_run(&self, first: i64, count: i64, mut visit: impl FnMut(isize, isize, i64)) {
        let Some((&(inner, inner_from, inner_to), outer)) = self.dims.split_last() else {
            return visit(0, 0, 1);
        };
        let (mut row, end) = (first, first + count);
        while row < end {
            let (mut rest, at) = (row / inner, row % inner);
            let (mut from, mut to) = (at as isize * inner_from, at as isize * inner_to);
            for &(extent, stride_from, stride_to) in outer.iter().rev() {
                let digit = (rest % extent) as isize;
                rest /= extent;
                from += digit * stride_from;
                to += digit * stride_to;
            }
            let length = (inner - at).min(end - row);
            visit(from, to, length);
            row += length;
        }
    }
}

/// One box to be copied.
#[derive(Debug, Clone, Copy)]
struct Job {
    from: *const u8,
    to: *mut u8,
    form: u32,
    /// Which source and destination, for the order.
    arrays: (u32, u32),
}

// SAFETY: see the module's documentation, points 2 and 3.
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

/// Boxes to be copied between regions, collected and put in order.
#[derive(Debug)]
pub(super) struct Copies<'a> {
    regions: Disjoint<'a>,
    forms: Vec<Form>,
    /// The item size, extents and strides that gave the newest form: neighbouring boxes mostly have the same.
    newest: (usize, Vec<(i64, isize, isize)>),
    jobs: Vec<Job>,
    /// The jobs' positions, group by group.
    order: Vec<u32>,
    /// How many of the jobs have a wide source.
    wide_sources: usize,
}

/// Copies that share their wide array, and are done in turns.
#[derive(Debug, Clone, Default)]
pub(super) struct Group {
    /// Which ones, as a range of the order.
    jobs: Range<usize>,
    /// The blocks of the copy that has the most; those that have more come first.
    pub(super) turns: i64,
    /// The blocks of the copy that has the fewest.
    least_turns: i64,
    pub(super) bytes: i64,
}

impl Group {
    /// The group in parts that are small enough for a worker in each turn; none if it is empty.
    fn split(&self) -> impl Iterator<Item = Self> {
        let parts = crate::radix::ceil_div(self.bytes / self.turns.max(1), LARGEST_TURN).max(1);
        let step = self.jobs.len().div_ceil(parts as usize).max(1);
        let bytes = self.bytes / parts;
        self.jobs.clone().step_by(step).map(move |start| {
            let jobs = start..(start + step).min(self.jobs.end);
            Self { jobs, bytes, ..self.clone() }
        })
    }
}

impl<'a> Copies<'a> {
    /// Room for `boxes` boxes.
    ///
    /// # Errors
    /// [`Error::TooMany`] if the memory has no room for them.
    pub(super) fn new(regions: Disjoint<'a>, boxes: usize) -> Result<Self> {
        let mut jobs = Vec::new();
        // They are numbered with 32 bits, and each may become two when long rows are cut.
        if boxes > (u32::MAX / 2) as usize || jobs.try_reserve_exact(boxes).is_err() {
            return Err(Error::TooMany { what: format!("{boxes} copies") });
        }
        Ok(Self { regions, forms: Vec::new(), newest: (0, Vec::new()), jobs, order: Vec::new(), wide_sources: 0 })
    }

    /// Adds the box of `extent` at `from` in source `source`, to go to `to` in destination `destination`. The boxes
    /// added for one destination must not share an element.
    pub(super) fn push(
        &mut self,
        source: usize,
        from: &[i64],
        destination: usize,
        to: &[i64],
        extent: &[i64],
    ) -> Result<()> {
        let (a, b) = (&self.regions.sources()[source], &self.regions.destinations()[destination]);
        if a.itemsize != b.itemsize {
            let (left, right) = ("an item of the source", "an item of the destination");
            return Err(Error::Length { left, left_len: a.itemsize, right, right_len: b.itemsize });
        }
        let first = a.item(from, extent).ok_or_else(|| outside(source))?;
        let target = b.item(to, extent).ok_or_else(|| outside(destination))?;
        if extent.contains(&0) || a.itemsize == 0 {
            return Ok(());
        }
        let dims = extent.iter().zip(&a.dims).zip(&b.dims).map(|((&n, a), b)| (n, a.1, b.1));
        if self.newest.0 != a.itemsize || !self.newest.1.iter().copied().eq(dims.clone()) {
            self.newest = (a.itemsize, dims.collect());
            self.forms.push(Form::new(self.newest.1.clone(), a.itemsize as i64));
        }
        let form = &self.forms[self.forms.len() - 1];
        self.wide_sources += usize::from(form.wide_source);
        let number = self.forms.len() as u32 - 1;
        let arrays = (source as u32, destination as u32);
        self.jobs.push(Job { from: first, to: target, form: number, arrays });
        Ok(())
    }

    /// Cuts long rows and puts side by side what shares its wide array; gives the groups.
    pub(super) fn arrange(&mut self) -> Vec<Group> {
        self.shorten();
        let by_source = 2 * self.wide_sources > self.jobs.len();
        let key = |job: &Job| (if by_source { job.arrays.0 } else { job.arrays.1 }) as usize;
        let mut groups = vec![Group::default(); self.jobs.iter().map(|job| key(job) + 1).max().unwrap_or(0)];
        for job in &self.jobs {
            let (group, form) = (&mut groups[key(job)], &self.forms[job.form as usize]);
            let blocks = form.blocks();
            group.least_turns = if group.jobs.end == 0 { blocks } else { group.least_turns.min(blocks) };
            group.turns = group.turns.max(blocks);
            group.jobs.end += 1;
            group.bytes += form.rows * form.row;
        }
        let mut start = 0;
        for group in &mut groups {
            let count = group.jobs.end;
            // Its end moves on below, with each job that is put into its place.
            group.jobs = start..start;
            start += count;
        }
        self.order = vec![0; self.jobs.len()];
        for (i, job) in self.jobs.iter().enumerate() {
            let end = &mut groups[key(job)].jobs.end;
            self.order[*end] = i as u32;
            *end += 1;
        }
        for group in groups.iter().filter(|group| group.least_turns < group.turns) {
            let blocks = |&i: &u32| Reverse(self.forms[self.jobs[i as usize].form as usize].blocks());
            self.order[group.jobs.clone()].sort_by_key(blocks);
        }
        groups.iter().flat_map(Group::split).collect()
    }

    /// Cuts the rows that are too long for one thread at a time.
    fn shorten(&mut self) {
        let cut: Vec<_> = self.forms.iter().map(|f| (f.row > LONGEST_ROW).then(|| f.shortened())).collect();
        if cut.iter().all(Option::is_none) {
            return;
        }
        let mut tails = Vec::new();
        for (form, tail) in cut.into_iter().enumerate() {
            let Some((main, rest)) = tail else {
                tails.push(None);
                continue;
            };
            self.forms[form] = main;
            tails.push(rest.map(|(rest, offset)| {
                self.forms.push(rest);
                (self.forms.len() as u32 - 1, offset)
            }));
        }
        for i in 0..self.jobs.len() {
            let job = self.jobs[i];
            if let Some((form, offset)) = tails[job.form as usize] {
                let (from, to) = (job.from.wrapping_offset(offset), job.to.wrapping_offset(offset));
                self.jobs.push(Job { from, to, form, ..job });
            }
        }
    }

    /// Copies the blocks of the given turns of a group's copies, and gives their bytes.
    pub(super) fn copy(&self, group: &Group, turns: Range<i64>) -> i64 {
        let mut bytes = 0;
        // Side by side, for they are used once in each turn.
        let jobs: Vec<Job> = (self.order[group.jobs.clone()].iter().map(|&i| self.jobs[i as usize]))
            .take_while(|job| self.forms[job.form as usize].blocks() > turns.start)
            .collect();
        for turn in turns {
            for (i, job) in jobs.iter().enumerate() {
                let form = &self.forms[job.form as usize];
                let (first, count) = form.rows_of(turn);
                if count <= 0 {
                    break;
                }
                if form.prefetched
                    && let Some(next) = jobs.get(i + PREFETCH_AHEAD)
                    && next.form == job.form
                {
                    form.each_run(first, count, |from, _, length| {
                        let (inner, row) = (form.dims[form.dims.len() - 1].1, form.row as usize);
                        for at in 0..length as isize {
                            prefetch(next.from.wrapping_offset(from + at * inner), row);
                        }
                    });
                }
                // SAFETY: rows `first..first + count` are rows of the box that `push` checked (point 1); no other thread
                // has them, for each turn of each group is handed out once, and nothing else overlaps them (point 2).
                unsafe { copy_rows(form, job.from, job.to, first, count) };
                bytes += count * form.row;
            }
        }
        bytes
    }
}

/// A plan's boxes always lie in the arrays that it is run on.
fn outside(position: usize) -> Error {
    Error::OutOfRange { what: "box of array", position: Some(position), value: -1, limit: 0 }
}

/// Copies `count` rows of a box from row `first` on.
///
/// # Safety
/// `from` and `to` must be the first items of boxes of this form, valid for reads and writes; the boxes must not overlap
/// each other nor be written by anyone else meanwhile.
unsafe fn copy_rows(form: &Form, from: *const u8, to: *mut u8, first: i64, count: i64) {
    let (stride_from, stride_to) = form.dims.last().map_or((0, 0), |&(_, from, to)| (from, to));
    form.each_run(first, count, |a, b, length| {
        let (from, to) = (from.wrapping_offset(a), to.wrapping_offset(b));
        // SAFETY: `a` and `b` are the offsets of a row of the boxes, and the `length` rows from it on are the last dim's
        // strides apart.
        unsafe {
            match form.row {
                1 => copy_items::<1>(from, to, stride_from, stride_to, length),
                2 => copy_items::<2>(from, to, stride_from, stride_to, length),
                4 => copy_items::<4>(from, to, stride_from, stride_to, length),
                8 => copy_items::<8>(from, to, stride_from, stride_to, length),
                16 => copy_items::<16>(from, to, stride_from, stride_to, length),
                bytes => {
                    for i in 0..length as isize {
                        let (from, to) = (from.wrapping_offset(i * stride_from), to.wrapping_offset(i * stride_to));
                        ptr::copy_nonoverlapping(from, to, bytes as usize);
                    }
                }
            }
        }
    });
}

/// Asks for the lines of `bytes` bytes; a hint, which does nothing to memory and may be given for any address.
#[inline(always)]
fn prefetch(from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        /// The bytes that come into the cache at once.
        const LINE: usize = 64;
        for line in (0..bytes + LINE - 1).step_by(LINE) {
            // SAFETY: a prefetch does not access memory; SSE is part of x86-64.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, bytes);
}

/// Copies `count` items of `N` bytes, for which the length known in advance saves the call.
///
/// # Safety
/// As [`copy_rows`], for items the given strides apart.
#[inline(always)]
unsafe fn copy_items<const N: usize>(from: *const u8, to: *mut u8, stride_from: isize, stride_to: isize, count: i64) {
    for i in 0..count as isize {
        let (from, to) = (from.wrapping_offset(i * stride_from), to.wrapping_offset(i * stride_to));
        // SAFETY: the caller's; arrays of bytes have no alignment.
        unsafe { to.cast::<[u8; N]>().write_unaligned(from.cast::<[u8; N]>().read_unaligned()) };
    }
}
