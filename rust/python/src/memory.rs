//! A reserve of memory for when there is none left.
//!
//! A collection of Rust that grows aborts the process where there is no memory, and there is no other way to ask it. What
//! is large is therefore asked for first (`try_reserve`, [`room`]), which can be refused. But a process that has used up
//! its memory has no room for anything small either: the text of the `MemoryError`, the few numbers of a shape. These
//! come from a reserve that is set aside when the module is loaded, and go back into it.
//!
//! The last part of the reserve is kept until an allocation was refused: what is refused can be reported.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::UnsafeCell,
    ptr::{copy_nonoverlapping, null_mut, write_bytes},
    sync::atomic::{AtomicU64, Ordering},
};

use pyo3::{exceptions::PyMemoryError, prelude::*};

/// The bytes of the reserve: pages that nothing touches take no memory, only addresses.
const RESERVE: usize = 4 << 20;

/// The bytes of it that are kept for reporting.
const KEPT: usize = 1 << 20;

/// The largest allocation that the reserve serves; what is larger has to be asked for.
const LARGEST: usize = 64 << 10;

/// The allocator of the module: the system's, and the reserve where it gives nothing.
struct WithReserve;

#[global_allocator]
static ALLOCATOR: WithReserve = WithReserve;

static MEMORY: Memory = Memory(UnsafeCell::new([0; RESERVE]));

/// The state of the reserve in one word, so that it needs no lock (a process may fork at any moment): how many bytes are
/// taken, how many allocations live in them, and whether one was refused.
static STATE: AtomicU64 = AtomicU64::new(0);

#[repr(align(4096))]
struct Memory(UnsafeCell<[u8; RESERVE]>);

// SAFETY: the bytes are reached through the allocations made of them alone, which do not overlap: `STATE` hands out each
// byte once until all of them have come back.
unsafe impl Sync for Memory {}

struct State {
    taken: usize,
    live: u32,
    refused: bool,
}

impl State {
    fn of(word: u64) -> Self {
        Self { taken: (word >> 32) as usize, live: word as u32 >> 1, refused: word & 1 == 1 }
    }

    fn word(&self) -> u64 {
        (self.taken as u64) << 32 | u64::from(self.live << 1) | u64::from(self.refused)
    }
}

/// Memory of the reserve; null if it has none.
fn take(layout: Layout) -> *mut u8 {
    if layout.size() > LARGEST || layout.align() > 4096 {
        return null_mut();
    }
    let mut word = STATE.load(Ordering::Acquire);
    loop {
        let state = State::of(word);
        let start = state.taken.next_multiple_of(layout.align());
        let end = start + layout.size();
        let fits = end <= if state.refused { RESERVE } else { RESERVE - KEPT };
        if !fits && state.refused {
            return null_mut();
        }
        let next = match fits {
            true => State { taken: end, live: state.live + 1, ..state },
            // From now on the kept part serves, to report this one.
            false => State { refused: true, ..state },
        };
        match STATE.compare_exchange_weak(word, next.word(), Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: `start` is within the reserve.
            Ok(_) if fits => return unsafe { MEMORY.0.get().cast::<u8>().add(start) },
            Ok(_) => return null_mut(),
            Err(now) => word = now,
        }
    }
}

/// True if the memory is of the reserve; if so, one allocation less lives in it.
fn give_back(memory: *mut u8) -> bool {
    if !is_of_reserve(memory) {
        return false;
    }
    let next = |word| {
        let state = State::of(word);
        // With the last of them all of it is free again.
        Some(if state.live == 1 { 0 } else { State { live: state.live - 1, ..state }.word() })
    };
    let _ = STATE.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    true
}

fn is_of_reserve(memory: *mut u8) -> bool {
    let start = MEMORY.0.get() as usize;
    (start..start + RESERVE).contains(&(memory as usize))
}

// SAFETY: what the system gives goes back to the system, with the layout that it was given for; what the reserve gives is
// aligned, of the asked size, in nobody else's hands (`take`), and goes back to the reserve. Nothing here unwinds.
unsafe impl GlobalAlloc for WithReserve {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those of the system's allocator.
        let memory = unsafe { System.alloc(layout) };
        if memory.is_null() { take(layout) } else { memory }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let memory = unsafe { System.alloc_zeroed(layout) };
        if !memory.is_null() {
            return memory;
        }
        let memory = take(layout);
        if !memory.is_null() {
            // SAFETY: as many bytes were taken; they may hold what was there before.
            unsafe { write_bytes(memory, 0, layout.size()) };
        }
        memory
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        if !give_back(memory) {
            // SAFETY: it is not of the reserve, so it is the system's.
            unsafe { System.dealloc(memory, layout) }
        }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !is_of_reserve(memory) {
            // SAFETY: it is the system's; the caller's promises are those of the system's allocator.
            let moved = unsafe { System.realloc(memory, layout, size) };
            if !moved.is_null() {
                return moved;
            }
        }
        // SAFETY: the caller promises that `size`, rounded up to the alignment, does not overflow.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: `wanted` is not of size zero, by the caller's promise.
        let moved = unsafe { self.alloc(wanted) };
        if !moved.is_null() {
            // SAFETY: two allocations of at least as many bytes, of which the new one is nobody else's.
            unsafe {
                copy_nonoverlapping(memory, moved, layout.size().min(size));
                self.dealloc(memory, layout);
            }
        }
        moved
    }
}

/// Asks for `bytes`, and gives them back: for work that takes about as much in pieces which it cannot ask for.
///
/// # Errors
/// `MemoryError` if they are not there.
pub(crate) fn room(what: &str, bytes: usize) -> PyResult<()> {
    let mut probe = Vec::<u8>::new();
    probe
        .try_reserve_exact(bytes)
        .map_err(|_| PyMemoryError::new_err(format!("{what}: no room for the {bytes} bytes that it may take")))?;
    // Seen by the optimiser, which would leave out an allocation that nobody uses.
    std::hint::black_box(&mut probe);
    Ok(())
}
