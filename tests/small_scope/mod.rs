//! What the exhaustive tests share: everything small, listed, and dealt out to threads and processes.

use std::{
    env,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

pub const NAMES: [&str; 3] = ["a", "b", "c"];

/// Every list of `len` numbers of `from..=to`.
pub fn lists(len: usize, from: i64, to: i64) -> Vec<Vec<i64>> {
    (0..len).fold(vec![vec![]], |lists, _| {
        let longer = |list: &Vec<i64>| {
            let list = list.clone();
            (from..=to).map(move |n| [list.clone(), vec![n]].concat())
        };
        lists.iter().flat_map(longer).collect()
    })
}

/// Every way to give each of `axes` a place in one of `rank` specs, or none.
pub fn layouts(axes: usize, rank: usize) -> Vec<Vec<Vec<usize>>> {
    (0..axes).fold(vec![vec![vec![]; rank]], |layouts, axis| {
        let mut more = layouts.clone();
        for layout in layouts {
            for dim in 0..rank {
                for place in 0..=layout[dim].len() {
                    let mut with = layout.clone();
                    with[dim].insert(place, axis);
                    more.push(with);
                }
            }
        }
        more
    })
}

/// Every `of`th case, from the `which`th on.
#[derive(Clone, Copy)]
pub struct Part {
    pub which: usize,
    pub of: usize,
}

impl Part {
    /// All, or what SHARDWISE_PART says, such as "3/100": so a run can be cut into pieces that are done one by one.
    pub fn from_environment() -> Self {
        let Ok(text) = env::var("SHARDWISE_PART") else { return Self { which: 0, of: 1 } };
        let (which, of) = text.split_once('/').expect("SHARDWISE_PART must be like 3/100");
        let part = Self { which: which.parse().expect("a number"), of: of.parse().expect("a number") };
        assert!(part.which < part.of, "SHARDWISE_PART is {text}; the first number must be below the second");
        part
    }

    pub fn has(self, turn: usize) -> bool {
        turn % self.of == self.which
    }

    /// A part is a task for one core; all are for all.
    fn threads(self) -> usize {
        if self.of > 1 { 1 } else { thread::available_parallelism().map_or(1, |n| n.get()) }
    }
}

/// Adds up what `check` gives for each of the items, which are dealt out from the last to the first: the largest come
/// last, and the threads are to end together.
pub fn sum_of<T: Sync>(items: &[T], part: Part, check: impl Fn(&T) -> usize + Sync) -> usize {
    let (next, count) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..part.threads() {
            scope.spawn(|| {
                while let Some(item) = items.iter().nth_back(next.fetch_add(1, Ordering::Relaxed)) {
                    count.fetch_add(check(item), Ordering::Relaxed);
                }
            });
        }
    });
    count.into_inner()
}
