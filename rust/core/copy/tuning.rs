//! The numbers that were measured, not derived.

/// The longest row that is copied at once, so that long ones are shared among threads.
pub(super) const LONGEST_ROW: i64 = 1 << 16;
/// How many short rows of one copy are done before the next has its turn.
pub(super) const ROWS_PER_BLOCK: i64 = 32;
/// The bytes of a block that make it large enough, whatever its number of rows.
pub(super) const BYTES_PER_BLOCK: i64 = 1 << 14;
/// From how many bytes on a row is long: memory is read in its own order, even if the next row is far away.
pub(super) const LONG_ROW: i64 = 1 << 11;
/// The bytes of a block of long rows: new memory is cleared by the kernel a large page at a time, and is best filled
/// while it is still in the cache.
pub(super) const LONG_BLOCK: i64 = 1 << 21;
/// From how many bytes between rows on the processor does not see by itself which comes next.
pub(super) const PREFETCHED_FROM: usize = 1 << 12;
/// Up to how many bytes the rows are so short that it cannot catch up while one is copied.
pub(super) const LONGEST_PREFETCHED: i64 = 512;

/// How many bytes of a row of the wide array are fetched together: enough to read memory in its own order.
pub(super) const TILE_BYTES: i64 = 1 << 11;
/// The bytes of all copies of a group in one turn, from which on they are shared among workers.
pub(super) const LARGEST_TURN: i64 = 1 << 22;

pub(super) const STREAM_STAGE: usize = 1 << 13;
pub(super) const STREAMED_IN_PLACE: usize = 1 << 9;
pub(super) const STREAMED_FROM: i64 = 1 << 26;
pub(super) const ROUNDS: usize = 16;
pub(super) const STRETCH: usize = 1 << 9;
pub(super) const FETCHED_AHEAD: usize = 1 << 9;
pub(super) const STREAMED_ROWS: i64 = 8;
