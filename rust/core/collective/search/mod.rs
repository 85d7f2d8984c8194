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
//! On up to [`explore::FEW_FACTORS`] factors all layouts are told apart, and the answer is the cheapest of all sequences with at
//! most one permute, unless more than three factors at once would have to be exchanged and put in a new order.

mod bound;
mod change;
mod explore;
mod moves;
mod named;
mod permuted;

#[cfg(test)]
mod tests;

pub use self::change::Sequence;

use self::{bound::Bound, change::Change, explore::Cost};
use super::{
    Obstacle,
    cost::Links,
    kinds::{Collective, Kind},
    views::Views,
};
use crate::{error::Result, partition::Partition, tiling::Poll};

/// The most prime factors into which axes are cut.
const PRIME_FACTORS: usize = 16;

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
    let (mut found, bound) = cheapest(&whole, None, poll)?;
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
        let (better, _) = cheapest(&finer, Some(cost), poll)?;
        // Parts of axes only where they save something: whole ones are easier to read.
        if finer.cost(&better).seconds < cost.seconds * (1.0 - 1e-9) {
            cost = finer.cost(&better);
            (found, found_in) = (better, finer);
        }
    }
    Ok(Ok(found_in.finished(found, source, destination)))
}

/// The obstacle to a sequence of collectives between two partitions on meshes with common sub-axes, if there is one.
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

/// The cheapest sequence found, and what one costs at least; only what is below `limit` is looked for.
fn cheapest(change: &Change, limit: Option<Cost>, poll: Poll<'_>) -> Result<(Vec<Collective>, Cost)> {
    let mut best = change.by_way_of_replication();
    if change.start == change.goal {
        return Ok((Vec::new(), Cost::default()));
    }
    // A slice moves nothing; an all-gather, if only bytes count, no more than what a device lacks.
    let links = &change.tensor.links;
    let even = links.latency.iter().all(|latency| *latency == 0.0)
        && links.bandwidth.iter().all(|bandwidth| *bandwidth == links.bandwidth[0]);
    if let [step] = &best[..]
        && (step.kind == Kind::Slice || step.kind == Kind::AllGather && even)
    {
        let cost = change.cost(&best);
        return Ok((best, cost));
    }
    let mut bound = Bound::new(change, poll)?;
    let least = bound.least(&change.tensor, &change.start);
    let mut most = change.cost(&best).min(limit.unwrap_or(Cost::MAX));
    // What costs less than any sequence with a permute needs no search for these.
    let permuted = bound.permuted(&change.tensor, &change.start);
    if let Some(found) = named::cheapest(change, &bound, most.min(permuted), poll)? {
        return Ok((found, least));
    }
    if most <= permuted {
        return Ok((best, least));
    }
    bound.add_from_start(change, poll)?;
    for search in [permuted::cheapest, named::cheapest] {
        if let Some(found) = search(change, &bound, most, poll)? {
            most = change.cost(&found);
            best = found;
        }
    }
    Ok((best, least))
}
