//! The numbers that were measured, not derived, in one place.
//!
//! Two machines: the *older* one, a Xeon at 2.5 GHz with 2 cores, and the *newer* one, a Xeon with AVX-512, 2 MiB of
//! second-level cache a core and 480 MiB of third. Where nothing else is said, a number was set on the older one and is as
//! good on the newer. On a third, an EPYC with AVX-512, 1 MiB and 32 MiB of cache, only `FEW_ROWS` was set: what the
//! others give there is on the page of the benchmarks. To measure again, change a number, `make build`, and run
//!
//! ```text
//! python benches/copies.py                  # rows to columns and back, in both ways, by processor time
//! python benches/peers/bench_reshard.py     # the same by the clock, as on the page; wants a quiet machine
//! ```

/// The longest row that is copied at once, so that long ones are shared among threads.
pub(super) const LONGEST_ROW: i64 = 1 << 16;
/// How many short rows of one copy are done before the next has its turn: with 512 shards, 16 and 64 were slower.
pub(super) const ROWS_PER_BLOCK: i64 = 32;
/// The bytes of a block that make it large enough, whatever its number of rows.
pub(super) const BYTES_PER_BLOCK: i64 = 1 << 14;
/// From how many bytes on a row is long: memory is read in its own order, even if the next row is far away.
pub(super) const LONG_ROW: i64 = 1 << 11;
/// The bytes of a block of long rows: new memory is cleared by the kernel a large page at a time, and is best filled
/// while it is still in the cache.
pub(super) const LONG_BLOCK: i64 = 1 << 21;
/// From how many bytes between rows on the processor does not see by itself which comes next: a page.
pub(super) const PREFETCHED_FROM: usize = 1 << 12;
/// Up to how many bytes the rows are so short that it cannot catch up while one is copied.
pub(super) const LONGEST_PREFETCHED: i64 = 512;
/// Up to how many bytes of a row the place of the next one is fetched while it is copied, so that no store waits for its
/// line: on the newer machine 1 MiB in rows of 512 bytes took 33 µs instead of 40, in rows of 8 KiB 33 instead of 32.
pub(super) const FETCHED_ROW: usize = 1 << 11;
/// How many bytes of a row of the wide array are fetched together: enough to read memory in its own order.
pub(super) const TILE_BYTES: i64 = 1 << 11;
/// The bytes of all copies of a group in one turn, from which on they are shared among workers.
pub(super) const LARGEST_TURN: i64 = 1 << 22;

/// The least and the most bytes that a worker copies at a time: long enough to be worth taking, short enough for all to
/// end together. Two workers at neighbouring rows write to the same pages, so pieces are rather large.
pub(super) const PIECE_BYTES: (i64, i64) = (1 << 18, 1 << 22);
/// Into how many pieces the work is cut, if they are neither too small nor too large.
pub(super) const PIECES: i64 = 16;
/// Up to how many bytes the mean transfer is so short that finding the boxes takes time beside copying them.
pub(super) const SHORT_TRANSFER: i64 = 1 << 14;
/// The least work of a worker that finds its own transfers: short transfers, destination devices. With fewer devices it
/// would see too little of each row of a wide source.
pub(super) const PART: (usize, usize) = (1 << 16, 128);
/// Up to how many rows a short box has few, and is found where it is copied, whichever array is wide. On the EPYC, among 512
/// and 1,024 devices, boxes of one row took a third of the time, of 2 to 8 rows of a wide destination from a third to as
/// long, of 16 up to 1.3 times as long, and of 32 twice: `python benches/copies.py --devices ""`.
pub(super) const FEW_ROWS: i64 = 8;
/// How many destinations are copied side by side, turn by turn. On the newer machine, of rows of 128 bytes, 64 and 128 took
/// 10 and 5 % longer; with 512 a worker's lines no longer stay in its caches, and it took 2 to 8 % longer.
pub(super) const STRIP_HOLDERS: usize = 256;
/// About how many bytes of such destinations a worker copies at a time: the ends of all their stretches are stored the
/// ordinary way, but the workers are to end together. With 512 shards of 1 GiB, 32 MiB took 2 % longer.
pub(super) const STRIP_BYTES: i64 = 1 << 27;
/// How many such parts there must be for each thread.
pub(super) const PARTS_PER_THREAD: usize = 2;
/// From how many bytes on a second thread is started. To start and join one takes 50 µs on the newer machine, in which one
/// thread copies half a MiB: `python benches/copies.py --devices ""`.
pub(super) const PARALLEL_BYTES: i64 = 1 << 22;

/// From how many bytes on streaming stores are tried: what is less may be wanted in the cache by those who read it next.
pub(super) const STREAMED_FROM: i64 = 1 << 26;
/// How many rounds are tried, half of them in each way: of 0.25 to 4 MiB each, so at most some milliseconds.
pub(super) const ROUNDS: usize = 8;
/// How many times as long one way must have taken in the first half of the rounds for the other half to be left out.
pub(super) const CLEAR: u64 = 2;
/// How many rows are streamed together, a stretch of [`STRETCH`] bytes of each in turn. On the newer machine, of all
/// pairs from 4 × 64 to 32 × 8192, none was faster for 8 and for 64 shards; 8 rows as they come took 30 % longer.
pub(super) const STREAMED_ROWS: i64 = 8;
/// Of short rows as many as make so many bytes: 32 rows of 128 bytes that lie 64 KiB apart evict one another from the first
/// cache before they are copied, and took 3 to 12 % longer than 8; 16 took as long, or 4 % longer where the arrays of both
/// sides begin at different places of their lines.
pub(super) const STREAMED_BYTES: i64 = 1 << 10;
/// Up to how many bytes the rows of a wide destination are so short that some rows of each source are streamed in turn, not
/// row by row: on the newer machine columns to rows of 1 GiB took half the time with rows of 128 bytes, 0.8 of it with 256,
/// as long with 1,024.
pub(super) const LONGEST_ACROSS: i64 = 1 << 9;
/// See [`STREAMED_ROWS`].
#[cfg(target_arch = "x86_64")]
pub(super) const STRETCH: usize = 1 << 9;
/// How far ahead in its row the source of a streaming store is fetched: 0 took 3 % longer, 1,024 and more up to 30 % with
/// 512 shards.
#[cfg(target_arch = "x86_64")]
pub(super) const FETCHED_AHEAD: usize = 1 << 9;
/// How many boxes ahead what is known of a box is fetched, where lines of many destinations are stored in turn: rows of 512
/// shards took 2 % less, those of 8 to 1,024 as long.
#[cfg(target_arch = "x86_64")]
pub(super) const JOBS_AHEAD: usize = 8;
