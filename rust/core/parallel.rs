//! Work on both cores: pieces taken from an iterator by scoped threads.
//!
//! Threads are started per call and joined before it returns. That costs some tens of microseconds, which only large
//! inputs pay, and buys what a standing pool (rayon's) would lose: the child of a process that forks after its first call
//! still works, and a panicking worker leaves nothing behind. Python programs fork all the time, also while other threads
//! are in the midst of a call: so nothing is made under a lock, or a `OnceLock`, that another thread would wait for.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use crate::error::{Error, Result};

/// A function that long calls ask now and then, to be told to stop.
pub type Poll<'a> = &'a mut dyn FnMut() -> Result<()>;

/// The number of elements from which on a second thread is worth starting.
pub const PARALLEL_FROM: usize = 1 << 17;

/// The number of elements that a worker does at a time: what fits in its cache, and a few hundred microseconds of work,
/// so that an interrupt is seen soon.
pub const PIECE: usize = 1 << 16;

/// The most neighbouring pieces that a worker takes at a time. The memory of a new array is made page by page when it
/// is first written to, and a page can be of 2 MiB: two workers that write to the same one wait for each other.
const BATCH: usize = 16;

/// The addresses that a thread takes: 2 MiB of stack, and what the allocator of glibc sets aside for each thread, 64 MiB
/// of which it first takes twice as much, to have them aligned. Few of them become memory.
const THREAD_BYTES: usize = 160 << 20;

/// The least pieces for each thread into which work is cut, so that all threads end together.
pub const PIECES_PER_THREAD: usize = 4;

/// The number of threads for large inputs: one for each core.
#[must_use]
pub fn threads() -> usize {
    thread::available_parallelism().map_or(1, |n| n.get())
}

/// Runs `work` on every piece, on as many threads as there are cores if `elements` is large enough.
///
/// The calling thread takes its share, and calls `poll` before each of its pieces; an error from `poll` or `work` stops
/// all of them at their next piece. With several failures, whichever came first is returned.
///
/// # Errors
/// What `poll` or `work` returns; [`Error::WorkerPanicked`] if `work` panicked while several threads were at it.
pub fn for_each<T, P, W>(elements: usize, mut pieces: P, poll: Poll<'_>, work: W) -> Result<()>
where
    T: Send,
    P: Iterator<Item = T> + Send,
    W: Fn(T) -> Result<()> + Sync,
{
    let threads = if elements < PARALLEL_FROM { 1 } else { threads() };
    if threads == 1 || !has_room_for(threads - 1) {
        return pieces.try_for_each(|piece| {
            poll()?;
            work(piece)
        });
    }
    // Here, because the other workers may leave no piece to the caller.
    poll()?;
    // No more at a time than lets all workers end together.
    let batch = (pieces.size_hint().0 / (PIECES_PER_THREAD * threads)).clamp(1, BATCH);
    let pieces = Mutex::new(pieces);
    let stop = AtomicBool::new(false);
    let failure = Mutex::new(None);
    let fail = |error: Error| {
        stop.store(true, Ordering::Relaxed);
        lock(&failure).get_or_insert(error);
    };
    let worker = |poll: Poll<'_>| {
        loop {
            let batch: Vec<T> = lock(&pieces).by_ref().take(batch).collect();
            if batch.is_empty() {
                return;
            }
            for piece in batch {
                if let Err(error) = poll() {
                    fail(error);
                }
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                match catch_unwind(AssertUnwindSafe(|| work(piece))) {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => fail(error),
                    Err(payload) => fail(Error::WorkerPanicked(panic_message(payload.as_ref()))),
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // A thread that cannot be started is one helper less; the caller does the work all the same.
            let _ = thread::Builder::new().spawn_scoped(scope, || worker(&mut never));
        }
        worker(poll);
    });
    failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).map_or(Ok(()), Err)
}

/// True if there is memory for so many more threads: their stacks, and what the system keeps of
/// each.
///
/// A thread that is started with less aborts the process: what is its own (thread-local) is allocated when it is first
/// used, by the C library, which has no other way to say that it cannot.
#[must_use]
pub fn has_room_for(threads: usize) -> bool {
    let mut room = Vec::<u8>::new();
    let asked = room.try_reserve_exact(threads.saturating_mul(THREAD_BYTES));
    // Seen by the optimiser, which would leave out an allocation that nobody uses.
    std::hint::black_box(&mut room);
    asked.is_ok()
}

/// A poll that never stops.
///
/// # Errors
/// None.
pub fn never() -> Result<()> {
    Ok(())
}

/// The text of a panic's payload.
#[must_use]
pub fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}

/// The lock's content, also after a panic elsewhere: what is behind these locks is valid at every moment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_done_once() {
        for elements in [0, PARALLEL_FROM] {
            let mut out = vec![0_u8; 1000];
            for_each(elements, out.chunks_mut(7), &mut never, |piece| {
                piece.iter_mut().for_each(|x| *x += 1);
                Ok(())
            })
            .unwrap();
            assert!(out.iter().all(|&x| x == 1));
        }
    }

    #[test]
    fn a_panic_is_an_error_and_the_next_call_works() {
        let boom = for_each(PARALLEL_FROM, 0..100, &mut never, |i| if i == 50 { panic!("piece {i}") } else { Ok(()) });
        assert_eq!(boom, Err(Error::WorkerPanicked("piece 50".into())));
        assert_eq!(for_each(PARALLEL_FROM, 0..100, &mut never, |_| Ok(())), Ok(()));
    }

    #[test]
    fn a_poll_stops_the_work() {
        let mut polls = 0;
        let mut poll = || {
            polls += 1;
            if polls == 3 { Err(Error::Interrupted) } else { Ok(()) }
        };
        let endless = for_each(PARALLEL_FROM, std::iter::repeat(()), &mut poll, |()| Ok(()));
        assert_eq!(endless, Err(Error::Interrupted));
    }
}
