//! The parts that the searches have in common: costs in order, and states visited from the cheapest
//! on.

use std::{
    cmp::Ordering,
    collections::{BinaryHeap, HashMap},
    hash::Hash,
};

use super::super::kinds::Collective;

/// The most factors with which all states are told apart by the factors' names.
pub(super) const FEW_FACTORS: usize = 5;

/// States that a search over layouts visits before it gives up.
pub(super) const STATES: usize = 5_000;

/// Seconds and the number of steps: what the searches put in order.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cost {
    pub(super) seconds: f64,
    /// The seconds, rounded, so that two sums of the same parts are equal in whichever order they were added.
    ticks: f64,
    pub(super) steps: usize,
}

impl Cost {
    pub(super) const MAX: Self = Self { seconds: f64::INFINITY, ticks: f64::INFINITY, steps: usize::MAX };
}

impl PartialEq for Cost {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Cost {}

impl PartialOrd for Cost {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Cost {
    fn cmp(&self, other: &Self) -> Ordering {
        self.ticks.total_cmp(&other.ticks).then(self.steps.cmp(&other.steps))
    }
}

/// The unit to which the seconds of one search are rounded.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale(f64);

impl Default for Scale {
    fn default() -> Self {
        Self(1.0)
    }
}

impl Scale {
    /// A ten thousand millionth of a sequence that takes as many seconds.
    pub(super) fn of(seconds: f64) -> Self {
        let tick = seconds * 1e-10;
        if tick.is_normal() { Self(tick) } else { Self::default() }
    }

    pub(super) fn cost(self, seconds: f64, steps: usize) -> Cost {
        Cost { seconds, ticks: (seconds / self.0).round(), steps }
    }

    pub(super) fn sum(self, cost: Cost, seconds: f64, steps: usize) -> Cost {
        self.cost(cost.seconds + seconds, cost.steps.saturating_add(steps))
    }
}

/// A state, what it costs to get there, and from where.
#[derive(Debug, Clone)]
pub(super) struct Node<S> {
    pub(super) state: S,
    pub(super) cost: Cost,
    from: Option<(usize, Collective)>,
}

/// The states seen, of which those with equal keys count as one, and those still to be visited.
pub(super) struct Explorer<S, K> {
    pub(super) nodes: Vec<Node<S>>,
    best: HashMap<K, usize>,
    queue: BinaryHeap<Entry>,
}

impl<S, K: Eq + Hash> Explorer<S, K> {
    pub(super) fn new(start: S, key: K) -> Self {
        let mut new = Self { nodes: Vec::new(), best: HashMap::new(), queue: BinaryHeap::new() };
        new.offer(start, key, Cost::default(), Cost::default(), None);
        new
    }

    /// A way to a state, with its cost so far and in all at least; taken if it is the cheapest so far.
    pub(super) fn offer(&mut self, state: S, key: K, cost: Cost, at_least: Cost, from: Option<(usize, Collective)>) {
        let number = self.nodes.len();
        match self.best.entry(key) {
            std::collections::hash_map::Entry::Occupied(mut known) => {
                if cost >= self.nodes[*known.get()].cost {
                    return;
                }
                known.insert(number);
            }
            std::collections::hash_map::Entry::Vacant(new) => {
                new.insert(number);
            }
        }
        self.nodes.push(Node { state, cost, from });
        self.queue.push(Entry { at_least, cost, number });
    }

    /// The state that promises most, with what it costs at least; `key` gives the key of a state.
    pub(super) fn next(&mut self, key: impl Fn(&S) -> K) -> Option<(usize, Cost)> {
        while let Some(Entry { at_least, number, .. }) = self.queue.pop() {
            // One that a cheaper way has been found to since is not visited again.
            if self.best.get(&key(&self.nodes[number].state)) == Some(&number) {
                return Some((number, at_least));
            }
        }
        None
    }

    /// The steps that led to a node, the last one first.
    pub(super) fn steps_back(&self, mut number: usize) -> Vec<Collective> {
        let mut steps = Vec::new();
        while let Some((before, step)) = &self.nodes[number].from {
            steps.push(step.clone());
            number = *before;
        }
        steps
    }
}

/// An entry of the queue: the least cost first, of those the one that has come farthest, of those the newest.
struct Entry {
    at_least: Cost,
    cost: Cost,
    number: usize,
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        other.at_least.cmp(&self.at_least).then(self.cost.cmp(&other.cost)).then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}
