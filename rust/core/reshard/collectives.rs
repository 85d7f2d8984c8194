//! A change of layout on one mesh as a short sequence of collectives, the cheapest that a bounded search finds.
//!
//! A layout is a state: which mesh axes cut each dim, in which order, and over which the values are partial sums. Every
//! collective is a move to another state:
//!
//! | collective | what becomes of the axis `a` of size `n` | bytes that a device receives, from shards of `s` bytes |
//! |---|---|---|
//! | slice | replicates, then cuts a dim as its minor axis | 0 |
//! | all-gather | minor axis of a dim, then replicates | `(n - 1)·s` |
//! | all-to-all | minor axis of a dim, then of another | `(n - 1)·s / n` |
//! | reduce-scatter | unreduced, then minor axis of a dim | `(n - 1)·s / n` |
//! | all-reduce | unreduced, then replicates | `2·(n - 1)·s / n` (in a ring) |
//! | collective permute | axes change places; every shard moves whole | `s` |
//!
//! The search is Dijkstra's over these states, ordered by the cost that a [`Links`] model gives, then by the number of
//! steps. It is bounded by a number of states; where it runs out, the sequence that always works is taken: reduce,
//! gather everything, slice. All of this supposes that dims divide at every state; if they do not, shards of one state
//! are not unions of those of the next, and no sequence is given.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, HashMap},
};

use crate::{layout::Layout, partition::Partition};

/// States after which the search gives up and takes the sequence that always works.
const STATES: usize = 20_000;

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Each device keeps a part of what it has.
    Slice,
    /// The devices along the axes put their shards together.
    AllGather,
    /// The devices along the axes exchange: one dim is put together, another is cut.
    AllToAll,
    /// The partial sums along the axes are added, and each device keeps a part.
    ReduceScatter,
    /// The partial sums along the axes are added, and each device keeps all.
    AllReduce,
    /// Every shard goes whole to another device.
    Permute,
}

impl Kind {
    /// The name that people use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Slice => "slice",
            Self::AllGather => "all-gather",
            Self::AllToAll => "all-to-all",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllReduce => "all-reduce",
            Self::Permute => "collective permute",
        }
    }
}

/// What each axis's links can do.
#[derive(Debug, Clone, PartialEq)]
pub struct Links {
    /// Bytes per second that a device receives along each mesh axis.
    pub bandwidth: Vec<f64>,
    /// Seconds per message along each mesh axis.
    pub latency: Vec<f64>,
}

/// The state of a tensor on a mesh: the positions of the mesh axes that cut each dim, major first, and of those over
/// which its values are partial sums.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct State {
    /// One spec per dim.
    pub specs: Vec<Vec<usize>>,
    /// In order.
    pub unreduced: Vec<usize>,
}

/// One collective.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// What it does.
    pub kind: Kind,
    /// Along which mesh axes, major first.
    pub axes: Vec<usize>,
    /// The dim that is put together, if one is.
    pub from_dim: Option<usize>,
    /// The dim that is cut, if one is.
    pub to_dim: Option<usize>,
    /// The bytes that each device receives.
    pub bytes: i64,
    /// Seconds, by the model.
    pub seconds: f64,
    /// The state after it.
    pub after: State,
}

/// The sequence of collectives from one partition to another of the same mesh and shape, for elements of `itemsize`
/// bytes; `None` if a dim does not divide evenly, or an axis of `destination` is unreduced where it is not in `source`.
///
/// ```
/// use shardwise_core::{layout::Layout, mesh::Mesh, partition::Partition, uneven::Uneven};
/// use shardwise_core::reshard::collectives::{Kind, Links, sequence};
/// use std::sync::Arc;
/// let mesh = Arc::new(Mesh::new(&["x"], &[4])?);
/// let cut = |specs: [&[&str]; 2]| {
///     Partition::new(Arc::new(Layout::new(mesh.clone(), &specs, &[])?), &[8, 8], Uneven::Even)
/// };
/// let links = Links { bandwidth: vec![1e9], latency: vec![1e-6] };
/// let steps = sequence(&cut([&["x"], &[]])?, &cut([&[], &["x"]])?, 4, &links).unwrap();
/// assert_eq!((steps.len(), steps[0].kind, steps[0].bytes), (1, Kind::AllToAll, 48));
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
#[must_use]
pub fn sequence(source: &Partition, destination: &Partition, itemsize: i64, links: &Links) -> Option<Vec<Step>> {
    let divides =
        |partition: &Partition| partition.shape().iter().zip(partition.layout().num_shards()).all(|(n, k)| n % k == 0);
    if source.mesh() != destination.mesh() || !divides(source) || !divides(destination) {
        return None;
    }
    let search = Search { shape: source.shape(), sizes: source.mesh().sizes(), itemsize, links };
    let (start, goal) = (search.state(source.layout()), search.state(destination.layout()));
    if goal.unreduced != [0; 0] {
        return None;
    }
    let moves = search.cheapest(&start, &goal).unwrap_or_else(|| search.by_way_of_replication(&start, &goal));
    Some(search.priced(start, moves))
}

/// A move before it is priced.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Move {
    kind: Kind,
    axes: Vec<usize>,
    from_dim: Option<usize>,
    to_dim: Option<usize>,
    after: State,
}

/// Cost and number of steps: what the search puts in order.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cost(f64, usize);

impl Eq for Cost {}

impl PartialOrd for Cost {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Cost {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

/// For every state seen, what it costs to get there, and by which move from which state.
type Best = HashMap<State, (Cost, Option<(State, Move)>)>;

struct Search<'a> {
    shape: &'a [i64],
    sizes: &'a [i64],
    itemsize: i64,
    links: &'a Links,
}

impl Search<'_> {
    /// The layout without the axes of size 1, which cut nothing.
    fn state(&self, layout: &Layout) -> State {
        let real = |axes: &[usize]| axes.iter().copied().filter(|&axis| self.sizes[axis] > 1).collect();
        State {
            specs: layout.specs().iter().map(|spec| real(spec)).collect(),
            unreduced: real(&layout.unreduced_axes()),
        }
    }

    fn cheapest(&self, start: &State, goal: &State) -> Option<Vec<Move>> {
        let mut best = Best::new();
        let mut queue = BinaryHeap::new();
        best.insert(start.clone(), (Cost(0.0, 0), None));
        queue.push(Reverse((Cost(0.0, 0), start.clone())));
        let mut visited = 0;
        while let Some(Reverse((cost, state))) = queue.pop() {
            if best.get(&state).is_none_or(|(least, _)| cost > *least) {
                continue;
            }
            if state == *goal {
                return Some(path(&best, state));
            }
            visited += 1;
            if visited > STATES {
                return None;
            }
            for step in self.moves(&state, goal) {
                let total = Cost(cost.0 + self.seconds(&state, &step), cost.1 + 1);
                if best.get(&step.after).is_none_or(|(least, _)| total < *least) {
                    queue.push(Reverse((total, step.after.clone())));
                    best.insert(step.after.clone(), (total, Some((state.clone(), step))));
                }
            }
        }
        None
    }

    /// The sequence that always works: reduce all, gather all, slice.
    fn by_way_of_replication(&self, start: &State, goal: &State) -> Vec<Move> {
        let mut moves = Vec::new();
        let mut state = start.clone();
        if !state.unreduced.is_empty() {
            moves.push(all_reduce(&state, &state.unreduced));
            state = moves[moves.len() - 1].after.clone();
        }
        while let Some(dim) = state.specs.iter().position(|spec| !spec.is_empty()) {
            moves.extend(gather(&state, dim));
            state = moves[moves.len() - 1].after.clone();
        }
        for (dim, spec) in goal.specs.iter().enumerate() {
            for &axis in spec {
                moves.push(slice(&state, axis, dim));
                state = moves[moves.len() - 1].after.clone();
            }
        }
        moves
    }

    /// Every move that leads to a state whose dims divide.
    fn moves(&self, state: &State, goal: &State) -> Vec<Move> {
        let rank = self.shape.len();
        let mut moves: Vec<Move> = Vec::new();
        if state.unreduced.len() > 1 {
            moves.push(all_reduce(state, &state.unreduced));
        }
        for &axis in &state.unreduced {
            moves.push(all_reduce(state, &[axis]));
            moves.extend((0..rank).map(|dim| reduce_scatter(state, axis, dim)));
        }
        for axis in self.free(state) {
            moves.extend((0..rank).map(|dim| slice(state, axis, dim)));
        }
        for dim in 0..rank {
            moves.extend(gather(state, dim));
            moves.extend((0..rank).filter(|&to| to != dim).filter_map(|to| all_to_all(state, dim, to)));
        }
        moves.extend(self.permutes(state, goal));
        moves.retain(|step| self.divides(&step.after));
        moves
    }

    /// Permutes: two axes of a dim change places, an axis gives way to a free one of its size, two axes of one size
    /// change dims; or straight to the goal, if it has as many shards along every dim.
    fn permutes(&self, state: &State, goal: &State) -> Vec<Move> {
        let mut states = Vec::new();
        if state.unreduced.is_empty() && self.shards(state) == self.shards(goal) {
            states.push(goal.clone());
        }
        let places: Vec<(usize, usize)> =
            (0..state.specs.len()).flat_map(|dim| (0..state.specs[dim].len()).map(move |i| (dim, i))).collect();
        for (n, &(dim, i)) in places.iter().enumerate() {
            let axis = state.specs[dim][i];
            for &(other_dim, j) in &places[n + 1..] {
                let other = state.specs[other_dim][j];
                if dim == other_dim || self.sizes[axis] == self.sizes[other] {
                    let mut after = state.clone();
                    after.specs[dim][i] = other;
                    after.specs[other_dim][j] = axis;
                    states.push(after);
                }
            }
            for free in self.free(state).into_iter().filter(|&free| self.sizes[free] == self.sizes[axis]) {
                let mut after = state.clone();
                after.specs[dim][i] = free;
                states.push(after);
            }
        }
        states.retain(|after| after != state);
        let step = |after: State| {
            let moved = |axis: &usize| role(state, *axis) != role(&after, *axis);
            let axes = (0..self.sizes.len()).filter(moved).collect();
            Move { kind: Kind::Permute, axes, from_dim: None, to_dim: None, after }
        };
        states.into_iter().map(step).collect()
    }

    /// The axes that replicate, except those of size 1.
    fn free(&self, state: &State) -> Vec<usize> {
        (0..self.sizes.len()).filter(|&axis| self.sizes[axis] > 1 && role(state, axis) == Role::Free).collect()
    }

    fn shards(&self, state: &State) -> Vec<i64> {
        state.specs.iter().map(|spec| spec.iter().map(|&axis| self.sizes[axis]).product()).collect()
    }

    fn divides(&self, state: &State) -> bool {
        self.shape.iter().zip(self.shards(state)).all(|(n, k)| n % k == 0)
    }

    /// The bytes of a shard; saturating, for the cost only needs to be large.
    fn shard_bytes(&self, state: &State) -> i64 {
        let dims = self.shape.iter().zip(self.shards(state)).map(|(n, k)| n / k);
        dims.fold(self.itemsize, i64::saturating_mul)
    }

    /// The bytes that a device receives.
    fn bytes(&self, before: &State, step: &Move) -> i64 {
        let shard = self.shard_bytes(before);
        let n: i64 = step.axes.iter().map(|&axis| self.sizes[axis]).product();
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

    /// Messages one after another along each axis, and the bytes over the slowest link.
    fn seconds(&self, before: &State, step: &Move) -> f64 {
        if step.kind == Kind::Slice {
            return 0.0;
        }
        let rounds = |axis: usize| match step.kind {
            Kind::Permute => 1.0,
            Kind::AllReduce => 2.0 * (self.sizes[axis] - 1) as f64,
            _ => (self.sizes[axis] - 1) as f64,
        };
        let waits: f64 = step.axes.iter().map(|&axis| rounds(axis) * self.links.latency[axis]).sum();
        let slowest = step.axes.iter().map(|&axis| self.links.bandwidth[axis]).fold(f64::INFINITY, f64::min);
        waits + self.bytes(before, step) as f64 / slowest
    }

    /// The steps with their prices, neighbours of one kind made one where that costs no more.
    fn priced(&self, start: State, moves: Vec<Move>) -> Vec<Step> {
        let mut steps: Vec<Step> = Vec::with_capacity(moves.len());
        // The state before the last step, and the one after it.
        let (mut earlier, mut before) = (start.clone(), start);
        for next in moves {
            let step = self.price(&before, next);
            let merged = steps.last().filter(|last| mergeable(last, &step)).map(|last| {
                // Gathering takes the minor axis first; in the step's axes the major one stands first.
                let (major, minor) = if step.kind == Kind::AllGather { (&step, last) } else { (last, &step) };
                let axes = [&major.axes[..], &minor.axes[..]].concat();
                let Step { kind, from_dim, to_dim, after, .. } = step.clone();
                (self.price(&earlier, Move { kind, axes, from_dim, to_dim, after }), last.seconds + step.seconds)
            });
            before = step.after.clone();
            match (merged, steps.last_mut()) {
                // As good as equal is equal: the sums are rounded.
                (Some((both, apart)), Some(last)) if both.seconds <= apart * (1.0 + 1e-9) => *last = both,
                (_, last) => {
                    if let Some(last) = last {
                        earlier = last.after.clone();
                    }
                    steps.push(step);
                }
            }
        }
        steps
    }

    fn price(&self, before: &State, step: Move) -> Step {
        let (bytes, seconds) = (self.bytes(before, &step), self.seconds(before, &step));
        let Move { kind, axes, from_dim, to_dim, after } = step;
        Step { kind, axes, from_dim, to_dim, bytes, seconds, after }
    }
}

fn mergeable(a: &Step, b: &Step) -> bool {
    let kinds = [Kind::Slice, Kind::AllGather, Kind::ReduceScatter];
    a.kind == b.kind && kinds.contains(&a.kind) && (a.from_dim, a.to_dim) == (b.from_dim, b.to_dim)
}

/// The moves that led to `state`.
fn path(best: &Best, mut state: State) -> Vec<Move> {
    let mut moves = Vec::new();
    while let Some((_, Some((before, step)))) = best.get(&state) {
        moves.push(step.clone());
        state = before.clone();
    }
    moves.reverse();
    moves
}

#[derive(Debug, PartialEq, Eq)]
enum Role {
    Cuts(usize, usize),
    Unreduced,
    Free,
}

fn role(state: &State, axis: usize) -> Role {
    for (dim, spec) in state.specs.iter().enumerate() {
        if let Some(i) = spec.iter().position(|&a| a == axis) {
            return Role::Cuts(dim, i);
        }
    }
    if state.unreduced.contains(&axis) { Role::Unreduced } else { Role::Free }
}

fn slice(state: &State, axis: usize, dim: usize) -> Move {
    let mut after = state.clone();
    after.specs[dim].push(axis);
    Move { kind: Kind::Slice, axes: vec![axis], from_dim: None, to_dim: Some(dim), after }
}

fn gather(state: &State, dim: usize) -> Option<Move> {
    let mut after = state.clone();
    let axis = after.specs[dim].pop()?;
    Some(Move { kind: Kind::AllGather, axes: vec![axis], from_dim: Some(dim), to_dim: None, after })
}

fn all_to_all(state: &State, from: usize, to: usize) -> Option<Move> {
    let mut after = state.clone();
    let axis = after.specs[from].pop()?;
    after.specs[to].push(axis);
    Some(Move { kind: Kind::AllToAll, axes: vec![axis], from_dim: Some(from), to_dim: Some(to), after })
}

fn all_reduce(state: &State, axes: &[usize]) -> Move {
    let mut after = state.clone();
    after.unreduced.retain(|axis| !axes.contains(axis));
    Move { kind: Kind::AllReduce, axes: axes.to_vec(), from_dim: None, to_dim: None, after }
}

fn reduce_scatter(state: &State, axis: usize, dim: usize) -> Move {
    let mut after = state.clone();
    after.unreduced.retain(|&a| a != axis);
    after.specs[dim].push(axis);
    Move { kind: Kind::ReduceScatter, axes: vec![axis], from_dim: None, to_dim: Some(dim), after }
}

#[cfg(test)]
mod tests;
