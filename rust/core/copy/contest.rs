//! Ordinary or streaming stores: the first rounds of the work are done in both ways, the others in the faster one.
//!
//! No property of a processor says which it is. On a Xeon of 2.5 GHz streaming stores lost at any size; on a newer one
//! with a third-level cache of 480 MiB they take 0.6 times as long for 1 GiB, unless the destination is in that cache, or
//! its pages are new and have just been cleared in the cache. A measurement made beforehand, on other memory, would not
//! know of the last two. So it is made on the work itself, in each run that is large: it costs the difference between the
//! two ways for half of the rounds, or for a quarter where it is clear, and what it finds is true of this destination.
//!
//! Of the rounds of each way the fastest counts: what disturbs one, another process or a page that had to be made, only
//! ever slows it down.

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Instant,
};

use crate::copy::tuning::{CLEAR, ROUNDS, STREAMED_FROM};

/// How bytes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Through the cache.
    Ordinary,
    /// Past the cache, where the processor can.
    Streaming,
}

/// Which way is taken, and what is known of both.
#[derive(Debug)]
pub(super) struct Contest {
    fixed: Option<Way>,
    /// How many rounds have begun.
    rounds: AtomicUsize,
    /// The least time of a round in each way, in picoseconds a byte.
    least: [AtomicU64; 2],
}

impl Contest {
    /// For work of so many bytes; `fixed` decides beforehand.
    pub(super) fn new(fixed: Option<Way>, bytes: i64) -> Self {
        let fixed = fixed.or((bytes < STREAMED_FROM).then_some(Way::Ordinary));
        Self { fixed, rounds: AtomicUsize::new(0), least: [AtomicU64::new(u64::MAX), AtomicU64::new(u64::MAX)] }
    }

    /// Does one round of work, which gives its bytes.
    pub(super) fn round(&self, work: impl FnOnce(Way) -> i64) -> i64 {
        if let Some(way) = self.fixed {
            return work(way);
        }
        let round = self.rounds.fetch_add(1, Ordering::Relaxed);
        if round >= ROUNDS || (round >= ROUNDS / 2 && self.is_clear()) {
            return work(self.winner());
        }
        let way = [Way::Ordinary, Way::Streaming][round % 2];
        let start = Instant::now();
        let bytes = work(way);
        let picoseconds = start.elapsed().as_nanos().saturating_mul(1000) / bytes.max(1).unsigned_abs() as u128;
        self.least[way as usize].fetch_min(u64::try_from(picoseconds).unwrap_or(u64::MAX), Ordering::Relaxed);
        bytes
    }

    /// Whether both ways have been seen, and one was so much faster that the other rounds can be left out.
    fn is_clear(&self) -> bool {
        let [ordinary, streaming] = self.seen();
        let (least, most) = (ordinary.min(streaming), ordinary.max(streaming));
        most != u64::MAX && most >= least.saturating_mul(CLEAR)
    }

    fn seen(&self) -> [u64; 2] {
        [Way::Ordinary, Way::Streaming].map(|way| self.least[way as usize].load(Ordering::Relaxed))
    }

    /// The way that was faster so far; the ordinary one until both have been seen.
    fn winner(&self) -> Way {
        let [ordinary, streaming] = self.seen();
        if ordinary != u64::MAX && streaming < ordinary { Way::Streaming } else { Way::Ordinary }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{cell::RefCell, thread::sleep, time::Duration};

    /// The ways of so many rounds, of which those in one way take their time.
    fn ways(contest: &Contest, rounds: usize, slow: Way) -> Vec<Way> {
        let seen = RefCell::new(Vec::new());
        for _ in 0..rounds {
            let done = contest.round(|way| {
                seen.borrow_mut().push(way);
                if way == slow && seen.borrow().len() <= ROUNDS {
                    sleep(Duration::from_millis(2));
                }
                1 << 10
            });
            assert_eq!(done, 1 << 10);
        }
        seen.into_inner()
    }

    #[test]
    fn both_ways_are_tried_and_the_faster_one_stays() {
        for (slow, fast) in [(Way::Ordinary, Way::Streaming), (Way::Streaming, Way::Ordinary)] {
            let seen = ways(&Contest::new(None, STREAMED_FROM), ROUNDS + 5, slow);
            assert_eq!(seen[..ROUNDS / 2].iter().filter(|&&way| way == slow).count(), ROUNDS / 4);
            assert!(seen[ROUNDS / 2..].iter().all(|&way| way == fast));
        }
    }

    #[test]
    fn where_it_is_not_clear_all_rounds_are_tried() {
        for (times, is_tried) in
            [([100, 100 * CLEAR - 1], true), ([100 * CLEAR - 1, 100], true), ([100, 100 * CLEAR], false)]
        {
            let contest = Contest::new(None, STREAMED_FROM);
            contest.rounds.store(ROUNDS / 2, Ordering::Relaxed);
            contest.least.iter().zip(times).for_each(|(least, time)| least.store(time, Ordering::Relaxed));
            assert_eq!(contest.is_clear(), !is_tried, "{times:?}");
            contest.round(|way| {
                // The next one in turn is an ordinary one, whatever was faster.
                assert!(!is_tried || way == Way::Ordinary);
                1
            });
        }
    }

    #[test]
    fn small_work_and_a_way_that_is_fixed_are_not_tried() {
        assert_eq!(ways(&Contest::new(None, STREAMED_FROM - 1), 3, Way::Streaming), [Way::Ordinary; 3]);
        assert_eq!(ways(&Contest::new(Some(Way::Streaming), 1), 3, Way::Ordinary), [Way::Streaming; 3]);
        assert_eq!(ways(&Contest::new(Some(Way::Ordinary), STREAMED_FROM), 3, Way::Streaming), [Way::Ordinary; 3]);
    }

    #[test]
    fn until_both_are_known_stores_are_ordinary() {
        let contest = Contest::new(None, STREAMED_FROM);
        contest.least[Way::Streaming as usize].store(1, Ordering::Relaxed);
        assert_eq!(contest.winner(), Way::Ordinary);
        contest.least[Way::Ordinary as usize].store(2, Ordering::Relaxed);
        assert_eq!(contest.winner(), Way::Streaming);
    }
}
