//! What the copies choose by the sizes at hand; the limits are in `tuning`.

use crate::{
    copy::tuning::{
        BYTES_PER_BLOCK, FEW_ROWS, LARGEST_TURN, LONG_BLOCK, LONG_ROW, LONGEST_ACROSS, LONGEST_PREFETCHED,
        PARALLEL_BYTES, PART, PARTS_PER_THREAD, PIECE_BYTES, PIECES, PREFETCHED_FROM, ROWS_PER_BLOCK, SHORT_TRANSFER,
        STREAMED_BYTES, STREAMED_ROWS, STRIP_BYTES, STRIP_HOLDERS, TILE_BYTES,
    },
    parallel, radix,
};

/// How many rows of `row` bytes are copied before the next copy has its turn: long ones until a large page is filled,
/// short ones until the wide array is left for too long.
pub(super) fn rows_per_block(row: i64) -> i64 {
    if row >= LONG_ROW {
        return (LONG_BLOCK / row).max(1);
    }
    let row = row.max(1);
    (BYTES_PER_BLOCK / row).min(ROWS_PER_BLOCK.max(256 / row)).max(1)
}

/// Whether rows so far apart are further apart in the source, so that its order is the one to keep to.
pub(super) fn has_wide_source(stride_from: isize, stride_to: isize) -> bool {
    stride_from.unsigned_abs() > stride_to.unsigned_abs()
}

/// Whether rows of `row` bytes, `stride` apart in the wide array, are worth being fetched into the cache before they are
/// copied: if they are short and far apart.
pub(super) fn fetches_ahead(row: i64, stride: isize) -> bool {
    stride.unsigned_abs() >= PREFETCHED_FROM && row <= LONGEST_PREFETCHED
}

/// Whether so many rows of each box are so few that to list the boxes takes longer than to copy them in another order.
pub(super) fn are_few(rows: i64) -> bool {
    rows <= FEW_ROWS
}

/// How many copies with rows of `row` bytes are fetched together.
pub(super) fn side_by_side(row: i64) -> usize {
    (TILE_BYTES / row).max(1) as usize
}

/// How many rows of `row` bytes of one copy are streamed before the next has its turn.
pub(super) fn rows_streamed(row: i64) -> i64 {
    (STREAMED_BYTES / row.max(1)).max(STREAMED_ROWS)
}

/// Whether rows of `row` bytes of a wide destination are streamed some rows of each box in turn, not row by row.
pub(super) fn streams_across(row: i64) -> bool {
    row <= LONGEST_ACROSS
}

/// In how many parts a group is shared among workers that has so many bytes in a turn.
pub(super) fn parts_of_group(bytes: i64) -> i64 {
    radix::ceil_div(bytes, LARGEST_TURN).max(1)
}

/// In how many parts a plan is copied, each by one worker, which finds the boxes of its devices itself: if they are many
/// and short. Else 1: the boxes are found first, and all workers share them.
pub(super) fn parts_of_plan(bytes: i64, transfers: usize, devices: usize) -> usize {
    let parts = (transfers / PART.0).min(devices / PART.1);
    let are_short = bytes / (transfers as i64).max(1) < SHORT_TRANSFER;
    // The number of threads takes longer to find than a small copy.
    let is_worth_it = are_short && parts > 1 && parts >= PARTS_PER_THREAD * parallel::threads();
    if is_worth_it { parts } else { 1 }
}

/// About how many bytes of `bytes` a worker copies at a time.
pub(super) fn piece(bytes: i64) -> i64 {
    (bytes / PIECES).clamp(PIECE_BYTES.0, PIECE_BYTES.1)
}

/// For [`parallel::for_each`], how many elements so many bytes are worth: as many as make it start threads, or none.
pub(super) fn elements(bytes: i64) -> usize {
    if bytes < PARALLEL_BYTES { 0 } else { parallel::PARALLEL_FROM }
}

/// In how many ranges the holders of a plan of so many bytes are copied turn by turn, and in how many parts the turns of
/// each range, so that all workers end together.
pub(super) fn strips(bytes: i64, holders: usize) -> (usize, usize) {
    let ranges = holders.div_ceil(STRIP_HOLDERS).max(1);
    let strips = (bytes / STRIP_BYTES).max((PARTS_PER_THREAD * parallel::threads()) as i64) as usize;
    (ranges, strips.div_ceil(ranges))
}
