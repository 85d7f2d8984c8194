//! Copies with stores that pass the cache by (x86-64's streaming or non-temporal stores).
//!
//! An ordinary store to a line that is not in the cache reads the line first, to keep the bytes around what is stored:
//! for a large copy, a third of all traffic. A streaming store of a *whole* line needs no such reading; one of a part of
//! a line is worse than an ordinary one. So [`Stream`] stores whole lines, wherever rows begin and end: where one row
//! follows another in the destination, the line that has the end of the one and the beginning of the other is put
//! together from both in a register. Only the parts of lines at the ends of a stretch are stored the ordinary way. No line
//! is stored both ways, for the line that a stretch ends in is never whole.
//!
//! Rows are taken a few at a time, a short stretch of each in turn, and what comes next in each is fetched meanwhile: one
//! row after the other, memory would be read in one place only and be waited for at every page.
//!
//! Whether that is faster depends on the machine, on whether the destination is in a cache and on whether its pages are
//! there: see `contest`. On other architectures, and for rows shorter than a line, nothing streams.

use std::ops::Range;

use crate::copy::{
    form::Form,
    kernel::{Place, copy_part, prefetch},
    tuning::{FETCHED_AHEAD, STRETCH},
};

/// The bytes of a line of the cache, at an address that is a multiple of it.
pub(super) const LINE: usize = 64;

/// The instructions that lines are stored with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    /// One for a line.
    Avx512,
    /// Two.
    Avx,
    /// Four, which every x86-64 has.
    Sse2,
}

/// Rows on their way to the destination.
#[derive(Debug)]
pub(super) struct Stream {
    width: Width,
    /// Where the row that was taken last ends in its source and in the destination. What it has of an unfinished line,
    /// behind a multiple of [`LINE`], is not stored yet; `owed` bytes of it must be.
    end: Place,
    owed: usize,
}

impl Stream {
    /// Nothing on its way yet; none where there are no such stores.
    pub(super) fn new() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        let width = if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
            Some(Width::Avx512)
        } else if is_x86_feature_detected!("avx") {
            Some(Width::Avx)
        } else {
            Some(Width::Sse2)
        };
        #[cfg(not(target_arch = "x86_64"))]
        let width = None;
        width.map(|width| Self { width, end: Place::nowhere(), owed: 0 })
    }

    /// Copies `rows` of a box, none shorter than a line, which are some of `all` that are copied this way; what
    /// [`Stream::finish`] has not seen may still be under way.
    ///
    /// If the box is one stretch of the destination, what its rows have of a line that later ones of `all` end is left to
    /// those: so the calls for all of them, in any order, store whole lines but at the two ends of the stretch.
    ///
    /// # Safety
    /// As for [`copy_rows`](super::kernel::copy_rows), for `all` rows, until `finish` has returned.
    pub(super) unsafe fn copy_rows(&mut self, form: &Form, place: Place, rows: Range<i64>, all: Range<i64>) {
        let (stride_from, stride_to) = form.row_strides();
        let row = form.row as usize;
        let is_stretch = form.is_stretch();
        // SAFETY: rows of the caller's: `from` and `to` are the offsets of one, and those from it on are the last dim's
        // strides apart. The row before them ends where the first of them begins if the box is a stretch.
        unsafe {
            if is_stretch && rows.start > all.start {
                form.each_run(rows.start - 1, 1, |from, to, _| {
                    self.pay();
                    self.end = place.moved(from + row as isize, to + row as isize);
                });
            }
            form.each_run(rows.start, rows.end - rows.start, |from, to, count| {
                let run = Run { place: place.moved(from, to), stride_from, stride_to, row, count: count as usize };
                #[cfg(target_arch = "x86_64")]
                match self.width {
                    Width::Avx512 => x86_64::take_512(self, run),
                    Width::Avx => x86_64::take_256(self, run),
                    Width::Sse2 => x86_64::take_128(self, run),
                }
                #[cfg(not(target_arch = "x86_64"))]
                let _ = run;
            });
            if is_stretch && rows.end < all.end {
                self.owed = 0;
            }
        }
    }

    /// Asks for the lines at the ends of `all` rows of a box, of which only parts are stored, if `rows` has them.
    pub(super) fn expect(form: &Form, place: Place, rows: Range<i64>, all: Range<i64>) {
        for row in [(rows.start == all.start).then_some(rows.start), (rows.end == all.end).then_some(rows.end)] {
            row.into_iter().for_each(|row| prefetch(place.destination((row * form.row) as isize), 1));
        }
    }

    /// Stores what is still to be stored of an unfinished line.
    ///
    /// # Safety
    /// The row that was taken last must still be valid.
    #[inline(always)]
    unsafe fn pay(&mut self) {
        let owed = -(self.owed as isize);
        // SAFETY: the last bytes of the row, at most a line.
        unsafe { copy_part(self.end.source(owed), self.end.destination(owed), self.owed) };
        self.owed = 0;
    }

    /// Stores what is still to be stored, and lets no later store overtake those before.
    ///
    /// # Safety
    /// As for [`Stream::copy_rows`].
    pub(super) unsafe fn finish(&mut self) {
        // SAFETY: the caller's.
        unsafe { self.pay() };
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE is part of x86-64.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

/// Rows that are evenly spaced.
#[derive(Debug, Clone, Copy)]
struct Run {
    place: Place,
    stride_from: isize,
    stride_to: isize,
    row: usize,
    count: usize,
}

/// How lines are stored past the cache.
trait Lines {
    /// Stores one line.
    ///
    /// # Safety
    /// The instructions must be there, `from` be valid for reads and `to`, a multiple of [`LINE`], for writes.
    unsafe fn store(from: *const u8, to: *mut u8);

    /// Stores a line of the `tail` bytes, less than a line, that end at `end`, and those from `start` on.
    ///
    /// # Safety
    /// As for `store`.
    #[inline(always)]
    unsafe fn join(end: *const u8, tail: usize, start: *const u8, to: *mut u8) {
        let mut line = [0; LINE];
        // SAFETY: the caller's; together they are a line.
        unsafe {
            copy_part(end.wrapping_sub(tail), line.as_mut_ptr(), tail);
            copy_part(start, line.as_mut_ptr().wrapping_add(tail), LINE - tail);
            Self::store(line.as_ptr(), to);
        }
    }
}

/// Takes the rows of a run, a stretch of each in turn.
///
/// # Safety
/// As for [`Stream::copy_rows`] and [`Lines::store`].
#[inline(always)]
unsafe fn take<L: Lines>(stream: &mut Stream, run: Run) {
    let Run { place, stride_from, stride_to, row, count } = run;
    let mut at = 0;
    while at < row {
        for i in 0..count as isize {
            let (from, to) = (place.source(i * stride_from), place.destination(i * stride_to));
            let tail = to.addr() % LINE;
            let head = (LINE - tail) % LINE;
            // SAFETY: `head` and the whole lines are within the row; the end that came last is that of a row, which is
            // no shorter than a line.
            unsafe {
                if at == 0 {
                    if to == stream.end.destination(0) && tail > 0 {
                        L::join(stream.end.source(0), tail, from, to.wrapping_sub(tail));
                    } else {
                        stream.pay();
                        copy_part(from, to, head);
                    }
                    stream.owed = (row - head) % LINE;
                    stream.end = place.moved(i * stride_from + row as isize, i * stride_to + row as isize);
                }
                let end = if at + STRETCH >= row { row } else { head + at + STRETCH };
                let mut offset = head + at;
                while offset + LINE <= end.min(row) {
                    prefetch(from.wrapping_add(offset + FETCHED_AHEAD), 1);
                    L::store(from.wrapping_add(offset), to.wrapping_add(offset));
                    offset += LINE;
                }
            }
        }
        at += STRETCH;
    }
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use super::{LINE, Lines, Run, Stream, take};
    use std::arch::x86_64::{
        _mm_loadu_si128, _mm_stream_si128, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512,
        _mm512_mask_loadu_epi8, _mm512_maskz_loadu_epi8, _mm512_stream_si512,
    };

    struct Avx512;
    struct Avx;
    struct Sse2;

    impl Lines for Avx512 {
        #[inline(always)]
        unsafe fn store(from: *const u8, to: *mut u8) {
            // SAFETY: the caller's.
            unsafe { _mm512_stream_si512(to.cast(), _mm512_loadu_si512(from.cast())) };
        }

        #[inline(always)]
        unsafe fn join(end: *const u8, tail: usize, start: *const u8, to: *mut u8) {
            let first = (1_u64 << tail) - 1;
            // SAFETY: the caller's; of what a masked load leaves out nothing is accessed.
            unsafe {
                let line = _mm512_maskz_loadu_epi8(first, end.wrapping_sub(tail).cast());
                let line = _mm512_mask_loadu_epi8(line, !first, start.wrapping_sub(tail).cast());
                _mm512_stream_si512(to.cast(), line);
            }
        }
    }

    impl Lines for Avx {
        #[inline(always)]
        unsafe fn store(from: *const u8, to: *mut u8) {
            for half in [0, LINE / 2] {
                let (from, to) = (from.wrapping_add(half), to.wrapping_add(half));
                // SAFETY: the caller's.
                unsafe { _mm256_stream_si256(to.cast(), _mm256_loadu_si256(from.cast())) };
            }
        }
    }

    impl Lines for Sse2 {
        #[inline(always)]
        unsafe fn store(from: *const u8, to: *mut u8) {
            for quarter in [0, LINE / 4, LINE / 2, LINE / 4 * 3] {
                let (from, to) = (from.wrapping_add(quarter), to.wrapping_add(quarter));
                // SAFETY: the caller's.
                unsafe { _mm_stream_si128(to.cast(), _mm_loadu_si128(from.cast())) };
            }
        }
    }

    /// # Safety
    /// As for [`take`].
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn take_512(stream: &mut Stream, run: Run) {
        // SAFETY: the caller's.
        unsafe { take::<Avx512>(stream, run) }
    }

    /// # Safety
    /// As for [`take`].
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn take_256(stream: &mut Stream, run: Run) {
        // SAFETY: the caller's.
        unsafe { take::<Avx>(stream, run) }
    }

    /// # Safety
    /// As for [`take`].
    pub(super) unsafe fn take_128(stream: &mut Stream, run: Run) {
        // SAFETY: the caller's.
        unsafe { take::<Sse2>(stream, run) }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The instructions that this processor has.
    fn widths() -> Vec<Width> {
        let has_512 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
        let has_256 = is_x86_feature_detected!("avx");
        let all = [(Width::Sse2, true), (Width::Avx, has_256), (Width::Avx512, has_512)];
        all.into_iter().filter(|(_, is_there)| *is_there).map(|(width, _)| width).collect()
    }

    proptest! {
        #[test]
        fn every_width_stores_the_rows_and_nothing_else(
            row in 64..1200_usize,
            gaps in prop::collection::vec(prop::sample::select(vec![0_usize, 0, 1, 40, 64]), 2),
            extents in (1..4_i64, 1..12_i64),
            shifts in prop::collection::vec(0..64_usize, 2),
            cuts in prop::collection::vec(0..36_i64, 3),
            order in Just([0_usize, 1, 2, 3]).prop_shuffle(),
        ) {
            // Planes of rows: in the source with gaps between the rows, in the destination between the planes.
            let (planes, rows) = extents;
            let (stride_from, stride_to) = ((row + gaps[0]) as isize, row as isize);
            let plane_to = rows as isize * stride_to + gaps[1] as isize;
            let form = Form::new(
                vec![(planes, rows as isize * stride_from, plane_to), (rows, stride_from, stride_to), (row as i64, 1, 1)],
                1,
            );
            let source: Vec<u8> = (0..shifts[0] + 36 * 1300).map(|i| (i * 37 % 251) as u8 | 1).collect();
            let length = shifts[1] + planes as usize * plane_to as usize + 100;
            let mut want = vec![0; length];
            for (plane, i) in (0..planes as usize).flat_map(|plane| (0..rows as usize).map(move |i| (plane, i))) {
                let from = shifts[0] + (plane * rows as usize + i) * stride_from as usize;
                let to = shifts[1] + plane * plane_to as usize + i * row;
                want[to..to + row].copy_from_slice(&source[from..from + row]);
            }
            // All rows, in up to four parts that come in any order.
            let mut ends: Vec<i64> = cuts.iter().map(|&cut| cut.min(form.rows)).chain([0, form.rows]).collect();
            ends.sort_unstable();
            for width in widths() {
                let mut got = vec![0; length];
                let mut stream = Stream { width, end: Place::nowhere(), owed: 0 };
                let place = Place::new(&source[shifts[0]..], &mut got[shifts[1]..]);
                for &part in &order {
                    let rows = ends[part]..ends[part + 1];
                    if !rows.is_empty() {
                        Stream::expect(&form, place, rows.clone(), 0..form.rows);
                        // SAFETY: the rows lie in the vectors, which nobody looks at meanwhile.
                        unsafe { stream.copy_rows(&form, place, rows, 0..form.rows) };
                    }
                }
                // SAFETY: as above.
                unsafe { stream.finish() };
                prop_assert!(got == want, "{width:?}");
            }
        }
    }
}
