//! Faults on demand: the n-th operation on files fails, or is cut short.
//!
//! Every operation of this crate on a file asks [`step`] first. Nothing is armed unless a test arms it, and then the
//! question costs one relaxed load, so it is always compiled in: what is tested is what runs. The state is the
//! process's, so tests that arm it take turns.

use std::{
    io,
    sync::atomic::{AtomicI32, AtomicI64, AtomicU8, Ordering},
};

/// The fault at the chosen operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// An operation fails with this error number of the operating system, once.
    Fail(i32),
    /// Each read and each write from an operation on does half of what was asked, or a little more.
    Short,
}

const OFF: u8 = 0;
const FAIL: u8 = 1;
const SHORT: u8 = 2;

static MODE: AtomicU8 = AtomicU8::new(OFF);
static DONE: AtomicI64 = AtomicI64::new(0);
static TARGET: AtomicI64 = AtomicI64::new(0);
static NUMBER: AtomicI32 = AtomicI32::new(0);

/// Arms a fault at operation `at`, counted from 0 from now on.
pub fn arm(at: i64, fault: Fault) {
    let (mode, number) = match fault {
        Fault::Fail(number) => (FAIL, number),
        Fault::Short => (SHORT, 0),
    };
    MODE.store(OFF, Ordering::SeqCst);
    DONE.store(0, Ordering::SeqCst);
    TARGET.store(at, Ordering::SeqCst);
    NUMBER.store(number, Ordering::SeqCst);
    MODE.store(mode, Ordering::SeqCst);
}

/// Disarms, and gives the number of operations since [`arm`].
pub fn disarm() -> i64 {
    MODE.store(OFF, Ordering::SeqCst);
    DONE.load(Ordering::SeqCst)
}

/// The way in which an operation is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Whole,
    Short,
}

impl Step {
    /// The number of bytes to read or write of `length`.
    pub(crate) fn part(self, length: usize) -> usize {
        if self == Self::Whole { length } else { length.div_ceil(2) }
    }
}

/// Counts an operation that moves bytes.
#[inline]
pub(crate) fn step() -> io::Result<Step> {
    if MODE.load(Ordering::Relaxed) == OFF { Ok(Step::Whole) } else { armed() }
}

/// Counts an operation that does all or nothing.
#[inline]
pub(crate) fn whole() -> io::Result<()> {
    step().map(drop)
}

#[cold]
fn armed() -> io::Result<Step> {
    let (at, target) = (DONE.fetch_add(1, Ordering::SeqCst), TARGET.load(Ordering::SeqCst));
    match MODE.load(Ordering::SeqCst) {
        FAIL if at == target => Err(io::Error::from_raw_os_error(NUMBER.load(Ordering::SeqCst))),
        SHORT if at >= target => Ok(Step::Short),
        _ => Ok(Step::Whole),
    }
}
