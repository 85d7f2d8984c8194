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

    /// Copies rows of a box, none shorter than a line; what [`Stream::finish`] has not seen may still be under way.
    ///
    /// If the box is one stretch of the destination, what the rows have of a line that later ones of all end is left to
    /// those: so the calls for all of them, in any order, store whole lines but at the two ends of the stretch.
    ///
    /// # Safety
    /// As for [`copy_rows`](super::kernel::copy_rows), for all of the rows that these are some of, until `finish` has
    /// returned.
    #[inline]
    pub(super) unsafe fn copy_rows(&mut self, some: &Rows, place: Place) {
        let (stride_from, stride_to) = some.form.row_strides();
        let row = some.form.row as usize;
        // SAFETY: rows of the caller's: `from` and `to` are the offsets of one, and those from it on are the last dim's
        // strides apart. The row before them ends where the first of them begins if the box is a stretch.
        unsafe {
            if let Some((from, to)) = some.before {
                self.pay();
                self.end = place.moved(from, to);
            }
            some.form.each_run(some.rows.start, some.rows.end - some.rows.start, |from, to, count| {
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
            if some.go_on {
                self.owed = 0;
            }
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

/// Rows of a form that are streamed together: some of all that are copied this way.
#[derive(Debug)]
pub(super) struct Rows<'f> {
    form: &'f Form,
    pub(super) rows: Range<i64>,
    /// Where the row before them ends in the source and in the destination, if their first line begins with it.
    before: Option<(isize, isize)>,
    /// Whether their last line is ended by the row behind them.
    go_on: bool,
    /// Where the lines lie in the destination of which they store a part only.
    parts: [Option<isize>; 2],
}

impl<'f> Rows<'f> {
    pub(super) fn new(form: &'f Form, rows: Range<i64>, all: &Range<i64>) -> Self {
        let row = form.row as isize;
        let mut before = None;
        if form.is_stretch() && rows.start > all.start {
            form.each_run(rows.start - 1, 1, |from, to, _| before = Some((from + row, to + row)));
        }
        let parts = [(rows.start == all.start).then_some(rows.start), (rows.end == all.end).then_some(rows.end)];
        let parts = parts.map(|part| part.map(|at| at as isize * row));
        Self { form, before, go_on: form.is_stretch() && rows.end < all.end, parts, rows }
    }

    /// Asks for the lines of which only parts are stored; `place` is where the box begins.
    pub(super) fn expect(&self, place: Place) {
        self.parts.iter().flatten().for_each(|&at| prefetch(place.destination(at), 1));
    }

    /// Whether the lines of a row can be streamed: if it has a whole one.
    pub(super) fn have_lines(&self) -> bool {
        self.form.row >= LINE as i64
    }

    pub(super) fn bytes(&self) -> i64 {
        (self.rows.end - self.rows.start).max(0) * self.form.row
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
    if run.row <= STRETCH && run.row.is_multiple_of(LINE) && run.stride_to == run.row as isize {
        // SAFETY: the caller's.
        return unsafe { take_short::<L>(stream, run) };
    }
    let Run { place, stride_from, stride_to, row, count } = run;
    let mut at = 0;
    while at < row {
        let mut place = place;
        for _ in 0..count {
            // SAFETY: `head` and the whole lines are within the row.
            unsafe {
                let head = if at == 0 { begin::<L>(stream, place, row) } else { head_of(place) };
                let start = head + at;
                let stop = if row - at <= STRETCH { row } else { row.min(start + STRETCH) };
                store_lines::<L>(place.moved(start as isize, start as isize), stop.saturating_sub(start) / LINE);
            }
            place = place.moved(stride_from, stride_to);
        }
        at += STRETCH;
    }
}

/// How many bytes a row has before its first whole line.
#[inline(always)]
fn head_of(place: Place) -> usize {
    place.destination(0).addr().wrapping_neg() % LINE
}

/// Stores what a row has of its first line, if that is not a whole one, and gives how many bytes these are.
///
/// # Safety
/// As for [`take`].
#[inline(always)]
unsafe fn begin<L: Lines>(stream: &mut Stream, place: Place, row: usize) -> usize {
    let (from, to) = (place.source(0), place.destination(0));
    let (head, tail) = (head_of(place), to.addr() % LINE);
    prefetch(from.wrapping_add(FETCHED_AHEAD), 1);
    // SAFETY: `head` bytes are within the row; the end that came last is that of a row, which is no shorter than a line.
    unsafe {
        if to == stream.end.destination(0) && tail > 0 {
            L::join(stream.end.source(0), tail, from, to.wrapping_sub(tail));
        } else {
            stream.pay();
            copy_part(from, to, head);
        }
    }
    stream.owed = (row - head) % LINE;
    stream.end = place.moved(row as isize, row as isize);
    head
}

/// Stores `count` whole lines.
///
/// # Safety
/// As for [`take`]: `place` is within a row, at the beginning of a line of the destination.
#[inline(always)]
unsafe fn store_lines<L: Lines>(place: Place, count: usize) {
    let (mut from, mut to) = (place.source(0), place.destination(0));
    for _ in 0..count {
        prefetch(from.wrapping_add(FETCHED_AHEAD), 1);
        // SAFETY: the caller's.
        unsafe { L::store(from, to) };
        (from, to) = (from.wrapping_add(LINE), to.wrapping_add(LINE));
    }
}

/// [`take`] for rows that follow one another in the destination and are so short, and of so many bytes, that each begins
/// in a line as the one before: with as few instructions as can be, since the processor waits for several rows at once
/// only if it sees that far. 512 shards of 1 GiB took 70 ms instead of 75.
///
/// # Safety
/// As for [`take`].
#[inline(always)]
unsafe fn take_short<L: Lines>(stream: &mut Stream, run: Run) {
    let Run { mut place, stride_from, stride_to, row, count } = run;
    if count == 0 {
        return;
    }
    // SAFETY: the caller's; `head`, the lines and the tail are the row, and the tail of the one before, which ends where
    // this one begins, is no longer than a line.
    unsafe {
        let head = begin::<L>(stream, place, row);
        store_lines::<L>(place.moved(head as isize, head as isize), (row - head) / LINE);
        let tail = (row - head) % LINE;
        let head = LINE - tail;
        for _ in 1..count {
            let end = place.source(row as isize);
            place = place.moved(stride_from, stride_to);
            if tail > 0 {
                prefetch(place.source(0).wrapping_add(FETCHED_AHEAD), 1);
                L::join(end, tail, place.source(0), place.destination(-(tail as isize)));
                store_lines::<L>(place.moved(head as isize, head as isize), row / LINE - 1);
            } else {
                store_lines::<L>(place, row / LINE);
            }
        }
    }
    stream.end = place.moved(row as isize, row as isize);
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
            row in prop_oneof![64..1200_usize, (1..9_usize).prop_map(|lines| lines * LINE)],
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
                        let some = Rows::new(&form, rows, &(0..form.rows));
                        some.expect(place);
                        // SAFETY: the rows lie in the vectors, which nobody looks at meanwhile.
                        unsafe { stream.copy_rows(&some, place) };
                    }
                }
                // SAFETY: as above.
                unsafe { stream.finish() };
                prop_assert!(got == want, "{width:?}");
            }
        }
    }
}
