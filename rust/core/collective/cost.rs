//! The cost of a collective, by a model of the links.
//!
//! | collective | bytes that a device receives, along factors of product `n`, from shards of `s` bytes | messages |
//! |---|---|---|
//! | slice | 0 | 0 |
//! | all-gather | `(n - 1)·s` | `n - 1` for each factor of `n` |
//! | all-to-all, reduce-scatter | `(n - 1)·s / n` | the same |
//! | all-reduce | `2·(n - 1)·s / n` (in a ring) | twice as many |
//! | collective-permute | `s` | 1 for each mesh axis |
//!
//! The seconds are those of the messages, one after another, and of the bytes over the slowest link. The neighbours
//! along the sub-axis `(m)k` of an axis of size `n = m·k·r` stand `r` apart, so a message between them takes `r`
//! latencies: a whole axis costs the same at once and in parts.

use super::{
    kinds::{Collective, Kind, State},
    views::Views,
};

/// Bandwidth and latency of the links along each factor.
#[derive(Debug, Clone, PartialEq)]
pub struct Links {
    /// Bytes per second that a device receives.
    pub bandwidth: Vec<f64>,
    /// Seconds per message from one device to the next along the mesh axis.
    pub latency: Vec<f64>,
}

impl Links {
    /// The links of the parts of factors.
    #[must_use]
    pub fn parted(&self, whole: &Views, parts: &Views) -> Self {
        let counts: Vec<usize> = whole.factors().iter().map(|factor| parts.within(factor.sub_axis).len()).collect();
        let each = |of: &[f64]| {
            let pairs = of.iter().zip(&counts);
            pairs.flat_map(|(&value, &count)| std::iter::repeat_n(value, count)).collect()
        };
        Self { bandwidth: each(&self.bandwidth), latency: each(&self.latency) }
    }
}

/// A collective with its price.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The collective that is done.
    pub collective: Collective,
    /// The bytes that each device receives.
    pub bytes: i64,
    /// Seconds, by the model.
    pub seconds: f64,
}

/// All that a price depends on besides the layouts.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// The elements along each dim.
    pub shape: Vec<i64>,
    /// The bytes of an element.
    pub itemsize: i64,
    /// The sizes of the factors.
    pub sizes: Vec<i64>,
    /// For each factor, how many devices of its mesh axis a message to the next device along it passes.
    pub hops: Vec<i64>,
    /// The links.
    pub links: Links,
    /// For each factor, the mesh axis that it is of.
    pub axes: Vec<usize>,
}

impl Tensor {
    /// A tensor of `shape`, with elements of `itemsize` bytes, on meshes with common sub-axes and these links.
    #[must_use]
    pub fn new(views: &Views, shape: &[i64], itemsize: i64, links: Links) -> Self {
        Self {
            shape: shape.to_vec(),
            itemsize,
            sizes: views.sizes(),
            hops: (0..views.factors().len()).map(|factor| views.hops(factor)).collect(),
            links,
            axes: views.factors().iter().map(|factor| factor.sub_axis.axis).collect(),
        }
    }

    /// The number of shards along each dim.
    #[must_use]
    pub fn shards(&self, state: &State) -> Vec<i64> {
        state.specs.iter().map(|spec| self.product(spec)).collect()
    }

    /// The number of devices along factors.
    #[must_use]
    pub fn product(&self, factors: &[usize]) -> i64 {
        factors.iter().map(|&factor| self.sizes[factor]).product()
    }

    /// True if every dim divides.
    #[must_use]
    pub fn divides(&self, state: &State) -> bool {
        self.shape.iter().zip(&state.specs).all(|(n, spec)| n % self.product(spec) == 0)
    }

    /// The bytes of a shard; saturating, since for the search it is enough that they are many.
    #[must_use]
    pub fn shard_bytes(&self, state: &State) -> i64 {
        let dims = self.shape.iter().zip(&state.specs).map(|(n, spec)| n / self.product(spec));
        dims.fold(self.itemsize, i64::saturating_mul)
    }

    /// The bytes that a device receives.
    #[must_use]
    pub fn bytes(&self, before: &State, step: &Collective) -> i64 {
        let (shard, n) = (self.shard_bytes(before), self.product(&step.axes));
        match step.kind {
            Kind::Slice => 0,
            Kind::AllGather => shard.saturating_mul(n - 1),
            Kind::AllToAll | Kind::ReduceScatter => shard - shard / n,
            Kind::AllReduce => {
                // In a ring the shard is passed round in n pieces, twice; the last may be short.
                (i128::from(shard) * 2 * i128::from(n - 1) / i128::from(n)).try_into().unwrap_or(i64::MAX)
            }
            Kind::Permute => shard,
        }
    }

    /// The seconds that a step takes.
    #[must_use]
    pub fn seconds(&self, before: &State, step: &Collective) -> f64 {
        let waits = match step.kind {
            Kind::Slice => return 0.0,
            Kind::Permute => self.waits(&step.axes, |_| 1.0),
            Kind::AllReduce => self.waits(&step.axes, |around| 2.0 * around),
            _ => self.waits(&step.axes, |around| around),
        };
        let slowest = step.axes.iter().map(|&factor| self.links.bandwidth[factor]).fold(f64::INFINITY, f64::min);
        waits + self.bytes(before, step) as f64 / slowest
    }

    /// The seconds of messages one after another along factors; of each mesh axis `messages` are sent, given how many
    /// take one from each device to all others.
    ///
    /// They are counted before they are timed, so that a whole axis takes exactly as long at once and in parts.
    fn waits(&self, factors: &[usize], messages: impl Fn(f64) -> f64) -> f64 {
        let is_of = |factor: usize| move |&other: &usize| self.axes[other] == self.axes[factor];
        let firsts = factors.iter().enumerate().filter(|&(i, &factor)| !factors[..i].iter().any(is_of(factor)));
        let axis = |(i, &factor): (usize, &usize)| {
            let of_axis = factors[i..].iter().copied().filter(is_of(factor));
            let around: i64 = of_axis.map(|part| (self.sizes[part] - 1) * self.hops[part]).sum();
            messages(around as f64) * self.links.latency[factor]
        };
        firsts.map(axis).sum()
    }

    /// The collective with its price.
    #[must_use]
    pub fn priced(&self, before: &State, collective: Collective) -> Step {
        let (bytes, seconds) = (self.bytes(before, &collective), self.seconds(before, &collective));
        Step { collective, bytes, seconds }
    }
}
