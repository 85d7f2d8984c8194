//! Ordinary or streaming stores: the first rounds of the work are done in both ways, the rest in the faster one.

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Instant,
};

use crate::copy::tuning::{ROUNDS, STREAMED_FROM};

/// How bytes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Through the cache.
    Ordinary,
    /// Past the cache, where the processor can.
    Streaming,
}

#[derive(Debug)]
pub(super) struct Contest {
    fixed: Option<Way>,
    started: AtomicUsize,
    /// The least time of a round in each way, in picoseconds a byte.
    least: [AtomicU64; 2],
}

impl Contest {
    pub(super) fn new(fixed: Option<Way>, bytes: i64) -> Self {
        let fixed = fixed.or((bytes < STREAMED_FROM).then_some(Way::Ordinary));
        Self { fixed, started: AtomicUsize::new(0), least: [AtomicU64::new(u64::MAX), AtomicU64::new(u64::MAX)] }
    }

    /// Does one round of work, which gives its bytes.
    pub(super) fn round(&self, work: impl FnOnce(Way) -> i64) -> i64 {
        if let Some(way) = self.fixed {
            return work(way);
        }
        let round = self.started.fetch_add(1, Ordering::Relaxed);
        if round >= ROUNDS {
            let [ordinary, streaming] = [0, 1].map(|way| self.least[way].load(Ordering::Relaxed));
            return work(if streaming < ordinary { Way::Streaming } else { Way::Ordinary });
        }
        let way = [Way::Ordinary, Way::Streaming][round % 2];
        let start = Instant::now();
        let bytes = work(way);
        let rate = start.elapsed().as_nanos() as u64 * 1000 / bytes.max(1) as u64;
        if std::env::var_os("CONTEST").is_some() {
            eprintln!("{round} {way:?} {bytes} {rate}");
        }
        self.least[way as usize].fetch_min(rate, Ordering::Relaxed);
        bytes
    }
}
