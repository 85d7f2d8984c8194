//! Lower bounds of the cost of a sequence, by the number of shards along each dim alone.
//!
//! Forget which device is which, and which factors cut a dim; keep how many shards each dim has, and over how many
//! devices the values are partial sums. Every collective changes these numbers, at a cost that depends on nothing else
//! if all links are as fast as the fastest. So the least cost over these numbers is at most that over layouts, and there
//! are far fewer of them: 680 for 14 axes of size 2 and three dims.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

use super::{
    change::Change,
    explore::{Cost, Scale},
};
use crate::{
    collective::{cost::Tensor, kinds::State, views::prime_factors},
    error::Result,
    tiling::Poll,
};

/// Moves that are looked at before the rest is given up.
const MOVES: usize = 400_000;

/// The numbers of shards, then that of the addends, then 1 if a permute has been made or none is to be.
type Counts = Vec<i64>;

/// Lower bounds of the costs of sequences.
pub(super) struct Bound {
    to_goal: Table,
    from_start: Table,
}

#[derive(Default)]
struct Table {
    settled: HashMap<Counts, Cost>,
    /// The least that all others cost.
    beyond: Cost,
}

impl Table {
    fn at(&self, counts: &Counts) -> Cost {
        self.settled.get(counts).copied().unwrap_or(self.beyond)
    }
}

impl Bound {
    pub(super) fn new(change: &Change, poll: Poll<'_>) -> Result<Self> {
        let goal = counts(&change.tensor, &change.goal, 1);
        Ok(Self { to_goal: Graph::new(change).table(goal, false, poll)?, from_start: Table::default() })
    }

    /// Adds the bounds from the start on, without which [`Bound::permuted_before`] is 0.
    pub(super) fn add_from_start(&mut self, change: &Change, poll: Poll<'_>) -> Result<()> {
        let start = counts(&change.tensor, &change.start, 0);
        self.from_start = Graph::new(change).table(start, true, poll)?;
        Ok(())
    }

    /// The least cost from a state to the goal without a permute.
    pub(super) fn named(&self, tensor: &Tensor, state: &State) -> Cost {
        self.to_goal.at(&counts(tensor, state, 1))
    }

    /// The least cost from a state to the goal with one permute.
    pub(super) fn permuted(&self, tensor: &Tensor, state: &State) -> Cost {
        self.to_goal.at(&counts(tensor, state, 0))
    }

    /// The least cost from the start to a state with one permute.
    pub(super) fn permuted_before(&self, tensor: &Tensor, state: &State) -> Cost {
        self.from_start.at(&counts(tensor, state, 1))
    }

    /// The least cost from a state to the goal.
    pub(super) fn least(&self, tensor: &Tensor, state: &State) -> Cost {
        self.named(tensor, state).min(self.permuted(tensor, state))
    }
}

fn counts(tensor: &Tensor, state: &State, permuted: i64) -> Counts {
    let mut counts = tensor.shards(state);
    counts.extend([tensor.product(&state.unreduced), permuted]);
    counts
}

struct Graph<'a> {
    tensor: &'a Tensor,
    scale: Scale,
    devices: i64,
    /// The partial sums of the start.
    addends: i64,
    /// Different primes, and all divisors above 1, each with the messages that it takes at least.
    primes: Vec<i64>,
    divisors: Vec<(i64, f64)>,
    seconds_per_byte: f64,
    latency: f64,
}

impl<'a> Graph<'a> {
    fn new(change: &'a Change) -> Self {
        let tensor = &change.tensor;
        let mut primes: Vec<i64> = tensor.sizes.iter().flat_map(|&size| prime_factors(size)).collect();
        let mut divisors = vec![(1, 0.0)];
        for &prime in &primes {
            let more: Vec<(i64, f64)> = divisors.iter().map(|&(d, n)| (d * prime, n + (prime - 1) as f64)).collect();
            divisors.extend(more);
            divisors.sort_unstable_by_key(|&(d, _)| d);
            divisors.dedup_by_key(|&mut (d, _)| d);
        }
        divisors.remove(0);
        primes.sort_unstable();
        primes.dedup();
        Self {
            tensor,
            scale: change.scale,
            devices: tensor.sizes.iter().product(),
            addends: tensor.product(&change.start.unreduced),
            primes,
            divisors,
            seconds_per_byte: tensor
                .links
                .bandwidth
                .iter()
                .map(|bandwidth| 1.0 / bandwidth)
                .fold(f64::INFINITY, f64::min),
            latency: tensor.links.latency.iter().copied().fold(f64::INFINITY, f64::min),
        }
    }

    /// Dijkstra's search, forwards from the start or backwards from the goal.
    fn table(&self, origin: Counts, forwards: bool, poll: Poll<'_>) -> Result<Table> {
        let mut settled = HashMap::new();
        let mut best = HashMap::from([(origin.clone(), Cost::default())]);
        let mut queue = BinaryHeap::from([Reverse((Cost::default(), origin))]);
        let mut moves = 0;
        while let Some(Reverse((cost, counts))) = queue.pop() {
            if settled.contains_key(&counts) {
                continue;
            }
            if moves > MOVES {
                return Ok(Table { settled, beyond: cost });
            }
            if settled.len() % 256 == 0 {
                poll()?;
            }
            self.each_move(&counts, forwards, |next, seconds, steps| {
                moves += 1;
                let total = self.scale.sum(cost, seconds, steps);
                if best.get(&next).is_none_or(|&known| total < known) {
                    best.insert(next.clone(), total);
                    queue.push(Reverse((total, next)));
                }
            });
            settled.insert(counts, cost);
        }
        Ok(Table { settled, beyond: Cost::MAX })
    }

    /// The neighbours, with the seconds and the steps of the collective between the two.
    fn each_move(&self, at: &Counts, forwards: bool, mut visit: impl FnMut(Counts, f64, usize)) {
        let dims = self.tensor.shape.len();
        let (addends, permuted) = (at[dims], at[dims + 1]);
        let free = self.devices / (at[..dims].iter().product::<i64>() * addends);
        let shard: f64 = self.tensor.shape.iter().zip(at).map(|(&n, &k)| n as f64 / k as f64).product();
        let bytes = shard * self.tensor.itemsize as f64;
        let shard = bytes * self.seconds_per_byte;
        let divides = |dim: usize, k: i64| self.tensor.shape[dim] % k == 0;
        let with = |changes: &[(usize, i64)]| {
            let mut counts = at.clone();
            changes.iter().for_each(|&(place, count)| counts[place] = count);
            counts
        };
        for &p in &self.primes {
            let (ratio, messages) = (1.0 - 1.0 / p as f64, (p - 1) as f64 * self.latency);
            for (dim, &count) in at[..dims].iter().enumerate() {
                let (more, less) = (count.saturating_mul(p), count / p);
                if free % p == 0 && divides(dim, more) {
                    // Forwards a slice; backwards a gather, of shards p times smaller.
                    let seconds = if forwards { 0.0 } else { ratio * shard + messages };
                    visit(with(&[(dim, more)]), seconds, 0);
                }
                if count % p == 0 {
                    let seconds = if forwards { (p - 1) as f64 * shard + messages } else { 0.0 };
                    visit(with(&[(dim, less)]), seconds, 0);
                }
                // Reduce-scatter.
                if forwards && addends % p == 0 && divides(dim, more) {
                    visit(with(&[(dim, more), (dims, addends / p)]), ratio * shard + messages, 0);
                }
                if !forwards && count % p == 0 && self.addends % addends.saturating_mul(p) == 0 {
                    let seconds = (p - 1) as f64 * shard + messages;
                    visit(with(&[(dim, less), (dims, addends * p)]), seconds, 0);
                }
            }
        }
        for &(d, hops) in &self.divisors {
            let seconds = (1.0 - 1.0 / d as f64) * shard + hops * self.latency;
            for (from, to) in (0..dims).flat_map(|from| (0..dims).map(move |to| (from, to))) {
                if from != to && at[from] % d == 0 && divides(to, at[to].saturating_mul(d)) {
                    visit(with(&[(from, at[from] / d), (to, at[to] * d)]), seconds, 1);
                }
            }
            let reduced = if forwards { addends / d } else { addends.saturating_mul(d) };
            let reduces = if forwards { addends % d == 0 } else { free % d == 0 && self.addends % reduced == 0 };
            if reduces {
                // As in the costs themselves, a part of a byte does not count.
                let bytes = (2.0 * bytes * (d - 1) as f64 / d as f64).floor();
                let seconds = bytes * self.seconds_per_byte + 2.0 * hops * self.latency;
                visit(with(&[(dims, reduced)]), seconds, 1);
            }
        }
        if addends == 1 && permuted == i64::from(!forwards) {
            visit(with(&[(dims + 1, 1 - permuted)]), shard + self.latency, 1);
        }
    }
}
