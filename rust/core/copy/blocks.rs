//! Which boxes are copied side by side, and in which order: blocks of rows, in turns.
//!
//! A box of one array is copied to a box of another, whatever their dtype and strides, as *rows*: runs of bytes that are
//! contiguous in both. The order of the rows decides the speed. Cut 16,384 columns among 512 devices and a row is 128
//! bytes; copied device by device, every row opens another page of the source, and the memory delivers a fifth of what
//! it could. So the copies that read (or write) one wide array go side by side, a block of at most 32 rows of each in
//! turn: then both arrays are walked nearly in order.
//!
//! ```text
//! for each block of 32 rows of the wide array: for each narrow array: copy the block's rows
//! ```

use std::{cmp::Reverse, ops::Range};

use crate::{
    copy::{
        choices,
        contest::{Contest, Way},
        form::Form,
        kernel::{Place, copy_rows, prefetch},
        overlap::Disjoint,
        stream::{Rows, Stream},
        tuning::{EXPECTED_AHEAD, LONGEST_ROW},
    },
    error::{Error, Result},
};

/// Where a box lies along one dim.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Side {
    /// Its start in the source.
    pub(super) from: i64,
    /// Its start in the destination.
    pub(super) to: i64,
    pub(super) extent: i64,
}

impl Side {
    fn lies_within(self, start: i64, size: i64) -> bool {
        start >= 0 && self.extent >= 0 && start <= size && self.extent <= size - start
    }
}

/// One box to be copied.
#[derive(Debug, Clone, Copy)]
struct Job {
    place: Place,
    form: u32,
    /// Which source and destination, for the order.
    arrays: (u32, u32),
}

/// Boxes to be copied between regions, collected and put in order.
#[derive(Debug)]
pub(super) struct Copies<'a> {
    regions: Disjoint<'a>,
    forms: Vec<Form>,
    /// The item size, extents and strides that gave the newest form: neighbouring boxes mostly have the same.
    newest: (usize, Vec<(i64, isize, isize)>),
    jobs: Vec<Job>,
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
        let parts = choices::parts_of_group(self.bytes / self.turns.max(1));
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
        Ok(Self { regions, forms: Vec::new(), newest: (0, Vec::new()), jobs, wide_sources: 0 })
    }

    /// Adds a box of source `source`, to go to destination `destination`; `sides` says where it lies in them, dim by dim.
    /// The boxes added for one destination must not share an element.
    pub(super) fn push(&mut self, source: usize, destination: usize, sides: &[Side]) -> Result<()> {
        let (a, b) = (&self.regions.sources()[source], &self.regions.destinations()[destination]);
        if a.itemsize() != b.itemsize() {
            let (left, right) = ("an item of the source", "an item of the destination");
            return Err(Error::Length { left, left_len: a.itemsize(), right, right_len: b.itemsize() });
        }
        if a.dims().len() != sides.len() || b.dims().len() != sides.len() {
            return Err(outside(source));
        }
        let (mut from, mut to) = (0_isize, 0_isize);
        let mut is_empty = a.itemsize() == 0;
        let mut is_new = a.itemsize() != self.newest.0 || self.newest.1.len() != sides.len();
        for (dim, side) in sides.iter().enumerate() {
            let ((size_from, stride_from), (size_to, stride_to)) = (a.dims()[dim], b.dims()[dim]);
            if !side.lies_within(side.from, size_from) {
                return Err(outside(source));
            }
            if !side.lies_within(side.to, size_to) {
                return Err(outside(destination));
            }
            // Wrapping: strides of opposite signs may leave the array and come back; the sum is an item's offset.
            from = from.wrapping_add((side.from as isize).wrapping_mul(stride_from));
            to = to.wrapping_add((side.to as isize).wrapping_mul(stride_to));
            is_empty |= side.extent == 0;
            is_new = is_new || self.newest.1[dim] != (side.extent, stride_from, stride_to);
        }
        if is_empty {
            return Ok(());
        }
        if is_new {
            let dims = sides.iter().zip(a.dims()).zip(b.dims()).map(|((side, a), b)| (side.extent, a.1, b.1));
            self.newest = (a.itemsize(), dims.collect());
            self.forms.push(Form::new(self.newest.1.clone(), a.itemsize() as i64));
        }
        let number = self.forms.len() - 1;
        self.wide_sources += usize::from(self.forms[number].wide_source);
        let place = Place::of(a, b).moved(from, to);
        self.jobs.push(Job { place, form: number as u32, arrays: (source as u32, destination as u32) });
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
        let mut sorted = self.jobs.clone();
        for job in &self.jobs {
            let end = &mut groups[key(job)].jobs.end;
            sorted[*end] = *job;
            *end += 1;
        }
        self.jobs = sorted;
        for group in groups.iter().filter(|group| group.least_turns < group.turns) {
            self.jobs[group.jobs.clone()].sort_by_key(|job| Reverse(self.forms[job.form as usize].blocks()));
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
                self.jobs.push(Job { place: job.place.moved(offset, offset), form, ..job });
            }
        }
    }

    /// Copies the blocks of the given turns of each group's copies, and gives their bytes; `contest` says how.
    pub(super) fn copy<'g>(&self, groups: impl Iterator<Item = (&'g Group, Range<i64>)>, contest: &Contest) -> i64 {
        let mut bytes = 0;
        let mut groups = groups.peekable();
        while let Some((group, turns)) = groups.next() {
            let next = groups.peek().and_then(|(group, turns)| self.tiles(group, turns.clone()).next());
            bytes += contest.round(|way| match (way, Stream::new()) {
                (Way::Streaming, Some(mut stream)) => self.stream(group, turns, &mut stream),
                _ => self.copy_tiles(self.tiles(group, turns), next),
            });
        }
        bytes
    }

    /// Copies tiles with ordinary stores, and fetches ahead what each needs while the one before is copied; `next` comes
    /// after them.
    fn copy_tiles<'s>(&'s self, tiles: impl Iterator<Item = (i64, &'s [Job])>, next: Option<(i64, &'s [Job])>) -> i64 {
        let mut bytes = 0;
        let mut tiles = tiles.peekable();
        while let Some((turn, tile)) = tiles.next() {
            let next = tiles.peek().or(next.as_ref());
            for (i, job) in tile.iter().enumerate() {
                let form = &self.forms[job.form as usize];
                let rows = form.rows_of(turn);
                if let Some(&(turn, next)) = next {
                    self.prefetch_part(next, turn, i, tile.len());
                }
                // SAFETY: these are rows of the box that `push` checked (point 1); no other thread
                // has them, for each turn of each group is handed out once, and nothing else overlaps them (point 2).
                unsafe { copy_rows(form, job.place, rows.clone()) };
                bytes += (rows.end - rows.start) * form.row;
            }
        }
        bytes
    }

    /// Copies the given turns of a group with streaming stores.
    ///
    /// If the destination is the wide array, row by row through all sources, which together make whole lines of it; else
    /// array by array, a few rows at a time.
    fn stream(&self, group: &Group, turns: Range<i64>, stream: &mut Stream) -> i64 {
        let mut bytes = 0;
        let jobs = &self.jobs[group.jobs.clone()];
        let form_of = |job: &Job| &self.forms[job.form as usize];
        for turn in turns.clone() {
            let jobs = &jobs[..jobs.partition_point(|job| form_of(job).blocks() > turn)];
            let by_row = jobs.iter().all(|job| !form_of(job).wide_source && !form_of(job).is_stretch());
            let step = if by_row { 1 } else { choices::rows_streamed(form_of(&jobs[0]).row) };
            let most = jobs.iter().map(|job| form_of(job).rows_of(turn)).map(|rows| rows.end - rows.start).max();
            for at in (0..most.unwrap_or(0)).step_by(step as usize) {
                // Of a form, the rows that come now, of all that come in these turns.
                let rows_of = |number: u32| {
                    let form = &self.forms[number as usize];
                    let rows = form.rows_of(turn);
                    let all = form.rows_of(turns.start).start..form.rows_of(turns.end - 1).end;
                    (number, Rows::new(form, rows.start + at..(rows.start + at + step).min(rows.end), &all))
                };
                let mut now = rows_of(jobs[0].form);
                for (i, job) in jobs.iter().enumerate() {
                    if job.form != now.0 {
                        now = rows_of(job.form);
                    }
                    match jobs.get(i + EXPECTED_AHEAD) {
                        Some(next) if next.form == now.0 => now.1.expect(next.place),
                        Some(next) => rows_of(next.form).1.expect(next.place),
                        None => {}
                    }
                    let rows = &now.1;
                    bytes += rows.bytes();
                    // SAFETY: rows of the box that `push` checked (point 1); no other thread has them, for each turn of
                    // each group is handed out once, and nothing else overlaps them (point 2).
                    unsafe {
                        match rows.have_lines() {
                            _ if rows.rows.is_empty() => {}
                            true => stream.copy_rows(rows, job.place),
                            false => copy_rows(form_of(job), job.place, rows.rows.clone()),
                        }
                    }
                }
            }
        }
        // SAFETY: what is under way was valid when it was taken, and still is.
        unsafe { stream.finish() };
        bytes
    }

    /// A group's copies in each of the turns, as many side by side as make a tile.
    fn tiles<'s>(&'s self, group: &Group, turns: Range<i64>) -> impl Iterator<Item = (i64, &'s [Job])> + use<'s, 'a> {
        let jobs = &self.jobs[group.jobs.clone()];
        let width = choices::side_by_side(self.forms[jobs[0].form as usize].row);
        turns.flat_map(move |turn| {
            let left = jobs.partition_point(|job| self.forms[job.form as usize].blocks() > turn);
            jobs[..left].chunks(width).map(move |tile| (turn, tile))
        })
    }

    /// Fetches part `part` of `parts` of what a tile needs of the wide array in a turn, row by row: so memory is read in
    /// its own order, and there is time while the tile before is copied.
    fn prefetch_part(&self, tile: &[Job], turn: i64, part: usize, parts: usize) {
        let number = tile[0].form;
        let form = &self.forms[number as usize];
        let Some(stride) = form.prefetched else { return };
        let rows = form.rows_of(turn);
        let count = rows.end - rows.start;
        let (start, stop) = (count * part as i64 / parts as i64, count * (part as i64 + 1) / parts as i64);
        if stop <= start {
            return;
        }
        let jobs = tile.iter().take_while(|job| job.form == number);
        if form.wide_source {
            form.each_run(rows.start + start, stop - start, |from, _, length| {
                let rows = (0..length as isize).map(|at| from + at * stride);
                rows.for_each(|row| jobs.clone().for_each(|job| prefetch(job.place.source(row), form.row)));
            });
        } else {
            form.each_run(rows.start + start, stop - start, |_, to, length| {
                let rows = (0..length as isize).map(|at| to + at * stride);
                rows.for_each(|row| jobs.clone().for_each(|job| prefetch(job.place.destination(row), form.row)));
            });
        }
    }
}

/// A plan's boxes always lie in the arrays that it is run on.
fn outside(position: usize) -> Error {
    Error::OutOfRange { what: "box of array", position: Some(position), value: -1, limit: 0 }
}

#[cfg(test)]
mod tests;
