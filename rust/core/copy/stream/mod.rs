//! Copies with stores that pass the cache by (x86-64's streaming or non-temporal stores).
//!
//! An ordinary store to a line that is not in the cache reads the line first, to keep the bytes around what is stored:
//! for a large copy, a third of all traffic. A streaming store of a *whole* line needs no such reading; one of a part of
//! a line is worse than an ordinary one. So [`Streams`] stores whole lines, wherever rows begin and end: where one row
//! follows another in the destination, the line that has the end of the one and the beginning of the other is put
//! together from both in a register. Only the parts of lines at the ends of a stretch are stored the ordinary way. No line
//! is stored both ways, for the line that a stretch ends in is never whole.
//!
//! Rows are taken a few at a time, a short stretch of each in turn, and what comes next in each is fetched meanwhile: one
//! row after the other, memory would be read in one place only and be waited for at every page.
//!
//! Whether that is faster depends on the machine, on whether the destination is in a cache and on whether its pages are
//! there: see `contest`. Rows shorter than a line are copied the ordinary way, and on other processors all are.

#[cfg(target_arch = "x86_64")]
mod lines;

#[cfg(target_arch = "x86_64")]
pub(super) use lines::Streams;

/// The bytes of a line of the cache, at an address that is a multiple of it.
pub(super) const LINE: usize = 64;

/// Where there are no such stores, rows are copied the ordinary way, and none is ever under way.
#[cfg(not(target_arch = "x86_64"))]
pub(super) struct Streams;

#[cfg(not(target_arch = "x86_64"))]
impl Streams {
    pub(super) fn new(_destinations: usize) -> Self {
        Self
    }

    /// # Safety
    /// As for [`copy_rows`](super::kernel::copy_rows), of each job.
    pub(super) unsafe fn copy_rows(
        &mut self,
        form: &super::form::Form,
        rows: &std::ops::Range<i64>,
        jobs: &[super::kernel::Job],
    ) {
        // SAFETY: the caller's.
        jobs.iter().for_each(|job| unsafe { super::kernel::copy_rows(form, job.place, rows.clone()) });
    }

    /// # Safety
    /// As for [`Self::copy_rows`].
    pub(super) unsafe fn copy_across(
        &mut self,
        form: &super::form::Form,
        rows: &std::ops::Range<i64>,
        jobs: &[super::kernel::Job],
    ) {
        // SAFETY: the caller's.
        unsafe { self.copy_rows(form, rows, jobs) };
    }

    /// # Safety
    /// None is needed.
    pub(super) unsafe fn finish(&mut self) {}
}
