//! Whole lines, stored past the cache with the instructions of x86-64.

use std::{
    arch::x86_64::{
        _mm_loadu_si128, _mm_sfence, _mm_stream_si128, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512,
        _mm512_mask_loadu_epi8, _mm512_maskz_loadu_epi8, _mm512_stream_si512,
    },
    ops::Range,
};

use crate::copy::{
    form::Form,
    kernel::{Job, Place, copy_item, copy_short, prefetch},
    stream::LINE,
    tuning::{FETCHED_AHEAD, STRETCH},
};

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

/// Rows on their way to some destinations.
#[derive(Debug)]
pub(in crate::copy) struct Streams {
    width: Width,
    /// For each destination, where the row that was taken last ends.
    ends: Vec<End>,
}

/// Where a row ends in its source and in the destination. What it has of an unfinished line, behind a multiple of
/// [`LINE`], is not stored yet; `owed` bytes of it must be.
#[derive(Debug, Clone, Copy)]
struct End {
    place: Place,
    owed: usize,
}

impl Streams {
    /// Nothing on its way yet to any of so many destinations.
    pub(in crate::copy) fn new(destinations: usize) -> Self {
        let width = if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
            Width::Avx512
        } else if is_x86_feature_detected!("avx") {
            Width::Avx
        } else {
            Width::Sse2
        };
        Self { width, ends: vec![End { place: Place::nowhere(), owed: 0 }; destinations] }
    }

    /// Copies the same rows of each of some boxes, none shorter than a line; what [`Streams::finish`] has not seen may
    /// still be under way. A job's `stream` is one of the destinations.
    ///
    /// What a row has of a line that the next row of its destination ends is left to that one: so rows that are taken in
    /// the order of the destination's memory are stored in whole lines, whatever boxes they are of.
    ///
    /// # Safety
    /// As for [`copy_rows`](crate::copy::kernel::copy_rows), until `finish` has returned.
    #[inline]
    pub(in crate::copy) unsafe fn copy_rows(&mut self, form: &Form, rows: &Range<i64>, jobs: &[Job]) {
        let (stride_from, stride_to) = form.row_strides();
        let row = form.row as usize;
        form.each_run(rows.start, rows.end - rows.start, |from, to, count| {
            let run = Run { from, to, stride_from, stride_to, row, count: count as usize };
            // SAFETY: rows of the caller's: `from` and `to` are the offsets of one, and those from it on are the last
            // dim's strides apart. The instructions are there.
            unsafe {
                match self.width {
                    Width::Avx512 => take_512(&mut self.ends, run, jobs),
                    Width::Avx => take_256(&mut self.ends, run, jobs),
                    Width::Sse2 => take_128(&mut self.ends, run, jobs),
                }
            }
        });
    }

    /// [`Self::copy_rows`] for boxes that lie side by side in one destination: box by box, so that the rows of each source
    /// are read one after the other. The lines in which two boxes meet are whole, row by row.
    ///
    /// # Safety
    /// As for [`Self::copy_rows`].
    #[inline]
    pub(in crate::copy) unsafe fn copy_across(&mut self, form: &Form, rows: &Range<i64>, jobs: &[Job]) {
        let (stride_from, stride_to) = form.row_strides();
        let row = form.row as usize;
        let count = (rows.end - rows.start).max(0) as usize;
        if self.ends.len() < count {
            self.ends.resize(count, End { place: Place::nowhere(), owed: 0 });
        }
        let mut first = 0;
        form.each_run(rows.start, rows.end - rows.start, |from, to, count| {
            let run = Run { from, to, stride_from, stride_to, row, count: count as usize };
            let ends = &mut self.ends[first..first + run.count];
            first += run.count;
            // SAFETY: as in `copy_rows`.
            unsafe {
                match self.width {
                    Width::Avx512 => across_512(ends, run, jobs),
                    Width::Avx => across_256(ends, run, jobs),
                    Width::Sse2 => across_128(ends, run, jobs),
                }
            }
        });
    }

    /// Stores what is still to be stored, and lets no later store overtake those before.
    ///
    /// # Safety
    /// As for [`Streams::copy_rows`].
    pub(in crate::copy) unsafe fn finish(&mut self) {
        for end in &mut self.ends {
            // SAFETY: the caller's.
            unsafe { end.pay() };
        }
        // SAFETY: SSE is part of x86-64.
        unsafe { _mm_sfence() };
    }
}

impl End {
    /// Stores what is still to be stored of an unfinished line.
    ///
    /// # Safety
    /// The row must still be valid.
    #[inline(always)]
    unsafe fn pay(&mut self) {
        let owed = -(self.owed as isize);
        // SAFETY: the last bytes of the row, at most a line.
        unsafe { copy_part(self.place.source(owed), self.place.destination(owed), self.owed) };
        self.owed = 0;
    }
}

/// Rows that are evenly spaced: where the first one lies in a box, and how far the next.
#[derive(Debug, Clone, Copy)]
struct Run {
    from: isize,
    to: isize,
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

/// Takes the rows of a run in each of the boxes.
///
/// # Safety
/// As for [`Streams::copy_rows`] and [`Lines::store`].
#[inline(always)]
unsafe fn take<L: Lines>(ends: &mut [End], run: Run, jobs: &[Job]) {
    let is_short = run.row <= STRETCH && run.row.is_multiple_of(LINE) && run.stride_to == run.row as isize;
    for job in jobs {
        let (end, place) = (&mut ends[job.stream as usize], job.place.moved(run.from, run.to));
        // SAFETY: the caller's.
        unsafe {
            match run.row / LINE {
                _ if !is_short => take_long::<L>(end, run, place),
                1 => take_short::<L, 1>(end, run, place),
                2 => take_short::<L, 2>(end, run, place),
                4 => take_short::<L, 4>(end, run, place),
                lines => take_lines::<L>(end, run, place, lines),
            }
        }
    }
}

/// Takes rows, a stretch of each in turn; the first is at `place`.
///
/// # Safety
/// As for [`take`].
#[inline(always)]
unsafe fn take_long<L: Lines>(end: &mut End, run: Run, place: Place) {
    let Run { stride_from, stride_to, row, count, .. } = run;
    let mut at = 0;
    while at < row {
        let mut place = place;
        for _ in 0..count {
            // SAFETY: `head` and the whole lines are within the row.
            unsafe {
                let head = if at == 0 { begin::<L>(end, place, row) } else { head_of(place) };
                let start = head + at;
                let stop = if row - at <= STRETCH { row } else { row.min(start + STRETCH) };
                store_lines::<L>(place.moved(start as isize, start as isize), stop.saturating_sub(start) / LINE, head);
            }
            place = place.moved(stride_from, stride_to);
        }
        at += STRETCH;
    }
}

/// Takes the rows of a run in each of the boxes, which lie side by side; `ends` has one for each row.
///
/// # Safety
/// As for [`take`].
#[inline(always)]
unsafe fn across<L: Lines>(ends: &mut [End], run: Run, jobs: &[Job]) {
    for job in jobs {
        let mut place = job.place.moved(run.from, run.to);
        for end in &mut *ends {
            // SAFETY: the caller's; `head` and the whole lines are within the row.
            unsafe {
                let head = begin::<L>(end, place, run.row);
                store_lines::<L>(place.moved(head as isize, head as isize), (run.row - head) / LINE, head);
            }
            place = place.moved(run.stride_from, run.stride_to);
        }
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
unsafe fn begin<L: Lines>(end: &mut End, place: Place, row: usize) -> usize {
    let (from, to) = (place.source(0), place.destination(0));
    let (head, tail) = (head_of(place), to.addr() % LINE);
    prefetch(from.wrapping_add(FETCHED_AHEAD), 1);
    // SAFETY: `head` bytes are within the row; the end that came last is that of a row, which is no shorter than a line.
    unsafe {
        if to == end.place.destination(0) && tail > 0 {
            L::join(end.place.source(0), tail, from, to.wrapping_sub(tail));
        } else {
            end.pay();
            copy_part(from, to, head);
        }
    }
    *end = End { place: place.moved(row as isize, row as isize), owed: (row - head) % LINE };
    head
}

/// Stores `count` whole lines; the row, or the stretch of it, begins `head` bytes before.
///
/// # Safety
/// As for [`take`]: `place` is within a row, at the beginning of a line of the destination.
#[inline(always)]
unsafe fn store_lines<L: Lines>(place: Place, count: usize, head: usize) {
    let (mut from, mut to) = (place.source(0), place.destination(0));
    // By steps of a line from the row's own beginning: `begin` fetches the first one. By steps from that of the lines
    // stored, of short rows side by side one line in two might be left out.
    let fetched = FETCHED_AHEAD + LINE - head;
    for _ in 0..count {
        prefetch(from.wrapping_add(fetched), 1);
        // SAFETY: the caller's.
        unsafe { L::store(from, to) };
        (from, to) = (from.wrapping_add(LINE), to.wrapping_add(LINE));
    }
}

/// [`take`] for rows that follow one another in the destination and are so short, and of so many bytes, that each begins
/// in a line as the one before: with as few instructions as can be, since the processor waits for several rows at once
/// only if it sees that far. 512 shards of 1 GiB took 70 ms instead of 75, and 3 % less where the number of lines of a row
/// is known to the compiler.
///
/// # Safety
/// As for [`take`]; a row must have `LINES` lines.
#[inline(always)]
unsafe fn take_short<L: Lines, const LINES: usize>(end: &mut End, run: Run, place: Place) {
    // SAFETY: the caller's.
    unsafe { take_lines::<L>(end, run, place, LINES) }
}

/// [`take_short`], of rows of so many lines.
///
/// # Safety
/// As for [`take_short`].
#[inline(always)]
unsafe fn take_lines<L: Lines>(end: &mut End, run: Run, mut place: Place, lines: usize) {
    let Run { stride_from, stride_to, count, .. } = run;
    let row = lines * LINE;
    if count == 0 {
        return;
    }
    // SAFETY: the caller's; `head`, the lines and the tail are the row, and the tail of the one before, which ends where
    // this one begins, is no longer than a line.
    unsafe {
        let head = begin::<L>(end, place, row);
        store_lines::<L>(place.moved(head as isize, head as isize), (row - head) / LINE, head);
        let tail = (row - head) % LINE;
        let head = LINE - tail;
        for _ in 1..count {
            let before = place.source(row as isize);
            place = place.moved(stride_from, stride_to);
            if tail > 0 {
                prefetch(place.source(0).wrapping_add(FETCHED_AHEAD), 1);
                L::join(before, tail, place.source(0), place.destination(-(tail as isize)));
                store_lines::<L>(place.moved(head as isize, head as isize), lines - 1, head);
            } else {
                store_lines::<L>(place, lines, LINE);
            }
        }
    }
    end.place = place.moved(row as isize, row as isize);
}

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
unsafe fn take_512(ends: &mut [End], run: Run, jobs: &[Job]) {
    // SAFETY: the caller's.
    unsafe { take::<Avx512>(ends, run, jobs) }
}

/// # Safety
/// As for [`take`].
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn across_512(ends: &mut [End], run: Run, jobs: &[Job]) {
    // SAFETY: the caller's.
    unsafe { across::<Avx512>(ends, run, jobs) }
}

/// # Safety
/// As for [`take`].
#[target_feature(enable = "avx")]
unsafe fn take_256(ends: &mut [End], run: Run, jobs: &[Job]) {
    // SAFETY: the caller's.
    unsafe { take::<Avx>(ends, run, jobs) }
}

/// # Safety
/// As for [`take`].
#[target_feature(enable = "avx")]
unsafe fn across_256(ends: &mut [End], run: Run, jobs: &[Job]) {
    // SAFETY: the caller's.
    unsafe { across::<Avx>(ends, run, jobs) }
}

/// # Safety
/// As for [`take`].
unsafe fn take_128(ends: &mut [End], run: Run, jobs: &[Job]) {
    // SAFETY: the caller's.
    unsafe { take::<Sse2>(ends, run, jobs) }
}

/// # Safety
/// As for [`take`].
unsafe fn across_128(ends: &mut [End], run: Run, jobs: &[Job]) {
    // SAFETY: the caller's.
    unsafe { across::<Sse2>(ends, run, jobs) }
}

/// Copies less than a line: at most 64 bytes.
///
/// # Safety
/// As for [`ptr::copy_nonoverlapping`].
#[inline(always)]
unsafe fn copy_part(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's; no item goes past the end.
    unsafe {
        match bytes {
            16.. => copy_short(from, to, bytes),
            8..16 => copy_ends::<8>(from, to, bytes),
            4..8 => copy_ends::<4>(from, to, bytes),
            2..4 => copy_ends::<2>(from, to, bytes),
            1 => copy_item::<1>(from, to),
            0 => {}
        }
    }
}

/// Copies the first and the last `N` of at most `2 * N` bytes.
///
/// # Safety
/// As for [`ptr::copy_nonoverlapping`]; `bytes` must be at least `N`.
#[inline(always)]
unsafe fn copy_ends<const N: usize>(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's.
    unsafe {
        copy_item::<N>(from, to);
        copy_item::<N>(from.wrapping_add(bytes - N), to.wrapping_add(bytes - N));
    }
}

#[cfg(test)]
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
                // Two destinations side by side.
                let mut got = [vec![0; length], vec![0; length]];
                let mut streams = Streams { width, ..Streams::new(2) };
                let jobs: Vec<Job> = (got.iter_mut().zip(0..))
                    .map(|(got, stream)| Job {
                        place: Place::new(&source[shifts[0]..], &mut got[shifts[1]..]),
                        form: 0,
                        arrays: (0, stream),
                        stream,
                    })
                    .collect();
                for &part in &order {
                    let rows = ends[part]..ends[part + 1];
                    if !rows.is_empty() {
                        // SAFETY: the rows lie in the vectors, which nobody looks at meanwhile.
                        unsafe { streams.copy_rows(&form, &rows, &jobs) };
                    }
                }
                // SAFETY: as above.
                unsafe { streams.finish() };
                prop_assert!(got == [want.clone(), want.clone()], "{width:?}");
            }
        }
    }
}
