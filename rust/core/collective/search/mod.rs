//! The cheapest sequence of collectives from one partition to another that a bounded search finds.
//!
//! The order is by seconds, then by the number of steps. Three searches, each bounded in the states that it visits, give
//! the next one less to do:
//!
//! 1. [`bound`]: without names. Only how many shards each dim has is looked at, as if any device could stand for any
//!    other: what a sequence costs at least, from wherever it begins.
//! 2. [`permuted`]: with one collective-permute. Up to it, and after it, only the sizes of the factors matter and not
//!    which is which, so that few states are different; it is made where the shards are smallest.
//! 3. [`named`]: without a permute, A* over the states with the first search as its bound, and cut off at what the
//!    second has found.
//!
//! If that leaves more than the bound, the factors are cut into prime ones and the searches made once more: a part of an
//! axis may do what the axis cannot. What is found is compared with the sequence that always works: reduce, gather
//! everything, slice.
//!
//! On up to [`FEW_FACTORS`] factors all layouts are told apart, and the answer is the cheapest of all sequences with at
//! most one permute, unless more than three factors at once would have to be exchanged and put in a new order.

mod bound;
mod explore;
mod moves;
mod named;
mod permuted;

#[cfg(test)]
mod tests;

use self::{
    bound::Bound,
    explore::{Cost, Scale},
};
use super::{
    Obstacle,
    cost::{Links, Step, Tensor},
    kinds::{Collective, Kind, State, all_gather, all_reduce, slice},
    views::Views,
};
use crate::{error::Result, parallel::Poll, partition::Partition};

/// Up to how many factors all states are told apart by their names.
const FEW_FACTORS: usize = 5;

/// States that a search over layouts visits before it gives up.
const STATES: usize = 5_000;

/// Up to how many prime factors axes are cut into them.
const PRIME_FACTORS: usize = 16;

/// Dims that are looked at; others only if one of the layouts cuts them.
const DIMS: usize = 6;

/// A sequence of collectives, and the sub-axes that they are along.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    /// The common sub-axes of the meshes, cut as finely as the steps need.
    pub views: Views,
    /// The steps.
    pub steps: Vec<Step>,
}

/// The sequence of collectives from one partition to another of the same shape, on meshes with the common sub-axes
/// `views`, for elements of `itemsize` bytes and links for each of the sub-axes; or why there is none.
///
/// ```
/// use shardwise_core::{layout::Layout, mesh::Mesh, parallel, partition::Partition, uneven::Uneven};
/// use shardwise_core::collective::{cost::Links, kinds::Kind, search::sequence, views::Views};
/// use std::sync::Arc;
/// let mesh = Arc::new(Mesh::new(&["x"], &[4])?);
/// let cut = |specs: [&[&str]; 2]| {
///     Partition::new(Arc::new(Layout::new(mesh.clone(), &specs, &[])?), &[8, 8], Uneven::Even)
/// };
/// let (rows, columns) = (cut([&["x"], &[]])?, cut([&[], &["x"]])?);
/// let views = Views::new((&*mesh).into(), (&*mesh).into(), None).unwrap();
/// let links = Links { bandwidth: vec![1e9], latency: vec![1e-6] };
/// let steps = sequence(&views, &rows, &columns, 4, &links, &mut parallel::never)?.unwrap().steps;
/// assert_eq!((steps.len(), steps[0].collective.kind, steps[0].bytes), (1, Kind::AllToAll, 48));
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
///
/// # Errors
/// What `poll` returns; it is called every few thousand states.
pub fn sequence(
    views: &Views,
    source: &Partition,
    destination: &Partition,
    itemsize: i64,
    links: &Links,
    poll: Poll<'_>,
) -> Result<std::result::Result<Sequence, Obstacle>> {
    if let Some(obstacle) = obstacle(source, destination) {
        return Ok(Err(obstacle));
    }
    let whole = Change::new(views, source, destination, itemsize, links.clone());
    let (mut found, bound) = whole.cheapest(None, poll)?;
    let mut found_in = whole;
    let mut cost = found_in.cost(&found);
    // In axes of mixed factors it matters which of them are minor.
    for larger_major in [true, false] {
        let primes = views.primes(larger_major);
        let parts = primes.factors().len();
        let same = !larger_major && primes == views.primes(true);
        let spare = bound.seconds < cost.seconds * (1.0 - 1e-9);
        if !spare || same || parts == views.factors().len() || parts > PRIME_FACTORS {
            continue;
        }
        let finer = Change::new(&primes, source, destination, itemsize, links.parted(views, &primes));
        let (better, _) = finer.cheapest(Some(cost), poll)?;
        // Parts of axes only where they save something: whole ones are easier to read.
        if finer.cost(&better).seconds < cost.seconds * (1.0 - 1e-9) {
            cost = finer.cost(&better);
            (found, found_in) = (better, finer);
        }
    }
    Ok(Ok(found_in.finished(found, source, destination)))
}

/// Why two partitions on meshes with common sub-axes have no sequence of collectives, if they have none.
#[must_use]
pub fn obstacle(source: &Partition, destination: &Partition) -> Option<Obstacle> {
    for (side, partition) in [("src", source), ("dst", destination)] {
        let shards = partition.layout().num_shards();
        for (dim, (&n, &k)) in partition.shape().iter().zip(shards).enumerate() {
            if n % k != 0 {
                return Some(Obstacle::Indivisible { side, dim, n, k });
            }
        }
    }
    let unreduced = !destination.layout().unreduced_axes().is_empty();
    unreduced.then_some(Obstacle::UnreducedDestination)
}

/// What is searched: from where to where, over the dims that matter.
struct Change {
    views: Views,
    tensor: Tensor,
    /// The dims that are looked at.
    dims: Vec<usize>,
    start: State,
    goal: State,
    scale: Scale,
}

impl Change {
    fn new(views: &Views, source: &Partition, destination: &Partition, itemsize: i64, links: Links) -> Self {
        let (from, unreduced) = views.of_source(source.layout());
        let (to, _) = views.of_destination(destination.layout());
        let shape = source.shape();
        let cut: Vec<bool> = from.iter().zip(&to).map(|(a, b)| !a.is_empty() || !b.is_empty()).collect();
        let mut room = DIMS.saturating_sub(cut.iter().filter(|&&cut| cut).count());
        let mut looked_at = |dim: usize| {
            let spare = !cut[dim] && shape[dim] > 1 && room > 0;
            room -= usize::from(spare);
            cut[dim] || spare
        };
        let dims: Vec<usize> = (0..shape.len()).filter(|&dim| looked_at(dim)).collect();
        let others = (0..shape.len()).filter(|dim| !dims.contains(dim)).map(|dim| shape[dim]);
        let itemsize = others.fold(itemsize, i64::saturating_mul);
        let only = |specs: Vec<Vec<usize>>| dims.iter().map(|&dim| specs[dim].clone()).collect::<Vec<_>>();
        let shape: Vec<i64> = dims.iter().map(|&dim| shape[dim]).collect();
        let tensor = Tensor::new(views, &shape, itemsize, links);
        let (start, goal) = (State { specs: only(from), unreduced }, State { specs: only(to), unreduced: Vec::new() });
        let mut change = Self { views: views.clone(), tensor, dims, start, goal, scale: Scale::default() };
        let always = change.by_way_of_replication();
        change.scale = Scale::of(change.seconds(&always));
        change
    }

    /// The cheapest sequence found, and what one costs at least; only what is below `limit` is looked for.
    fn cheapest(&self, limit: Option<Cost>, poll: Poll<'_>) -> Result<(Vec<Collective>, Cost)> {
        let mut best = self.by_way_of_replication();
        if self.start == self.goal {
            return Ok((Vec::new(), Cost::default()));
        }
        let bound = Bound::new(self, poll)?;
        let least = bound.least(&self.tensor, &self.start);
        let mut most = self.cost(&best).min(limit.unwrap_or(Cost::MAX));
        for search in [permuted::cheapest, named::cheapest] {
            if let Some(found) = search(self, &bound, most, poll)? {
                most = self.cost(&found);
                best = found;
            }
        }
        Ok((best, least))
    }

    fn seconds(&self, steps: &[Collective]) -> f64 {
        let before = std::iter::once(&self.start).chain(steps.iter().map(|step| &step.after));
        before.zip(steps).map(|(before, step)| self.tensor.seconds(before, step)).sum()
    }

    fn cost(&self, steps: &[Collective]) -> Cost {
        self.scale.cost(self.seconds(steps), steps.len())
    }

    /// The sequence that always works: reduce all, gather all, slice.
    fn by_way_of_replication(&self) -> Vec<Collective> {
        let (mut steps, mut state) = (Vec::new(), self.start.clone());
        let mut add = |step: Collective, state: &mut State| {
            *state = step.after.clone();
            steps.push(step);
        };
        if !state.unreduced.is_empty() {
            add(all_reduce(&state, &state.unreduced), &mut state);
        }
        for dim in 0..state.specs.len() {
            let count = state.specs[dim].len();
            if count > 0 {
                add(all_gather(&state, dim, count), &mut state);
            }
        }
        for (dim, spec) in self.goal.specs.iter().enumerate().filter(|(_, spec)| !spec.is_empty()) {
            add(slice(&state, spec, dim), &mut state);
        }
        steps
    }

    /// The steps with their prices, neighbours of one kind made one where that costs no more.
    fn priced(&self, collectives: Vec<Collective>) -> Vec<Step> {
        let mut steps: Vec<Step> = Vec::with_capacity(collectives.len());
        // The state before the last step, and the one after it.
        let (mut earlier, mut before) = (self.start.clone(), self.start.clone());
        for next in collectives {
            let step = self.tensor.priced(&before, next);
            let merged = steps.last().filter(|last| mergeable(&last.collective, &step.collective)).map(|last| {
                let (one, other) = (&last.collective, &step.collective);
                // Gathering takes the minor axis first; in the step's axes the major one stands first.
                let (major, minor) = if other.kind == Kind::AllGather { (other, one) } else { (one, other) };
                let axes = [&major.axes[..], &minor.axes[..]].concat();
                let both = self.tensor.priced(&earlier, Collective { axes, ..other.clone() });
                (both, last.seconds + step.seconds)
            });
            before = step.collective.after.clone();
            match (merged, steps.last_mut()) {
                // As good as equal is equal: the sums are rounded.
                (Some((both, apart)), Some(last)) if both.seconds <= apart * (1.0 + 1e-9) => *last = both,
                (_, last) => {
                    if let Some(last) = last {
                        earlier = last.collective.after.clone();
                    }
                    steps.push(step);
                }
            }
        }
        steps
    }

    /// The answer, over all dims.
    fn finished(&self, collectives: Vec<Collective>, source: &Partition, destination: &Partition) -> Sequence {
        let rank = source.shape().len();
        debug_assert_eq!(rank, destination.shape().len());
        let mut steps = self.priced(collectives);
        for Step { collective, .. } in &mut steps {
            let mut specs = vec![Vec::new(); rank];
            for (&dim, spec) in self.dims.iter().zip(std::mem::take(&mut collective.after.specs)) {
                specs[dim] = spec;
            }
            collective.after.specs = specs;
            for dim in [&mut collective.from_dim, &mut collective.to_dim] {
                *dim = dim.map(|dim| self.dims[dim]);
            }
        }
        Sequence { views: self.views.clone(), steps }
    }
}

fn mergeable(a: &Collective, b: &Collective) -> bool {
    let kinds = [Kind::Slice, Kind::AllGather, Kind::ReduceScatter];
    a.kind == b.kind && kinds.contains(&a.kind) && (a.from_dim, a.to_dim) == (b.from_dim, b.to_dim)
}
