//! The collectives, and what each makes of a layout.
//!
//! | collective | what becomes of the axes |
//! |---|---|
//! | slice | they replicate, then cut a dim as its minor axes |
//! | all-gather | the minor axes of a dim, then replicate |
//! | all-to-all | the minor axes of a dim, then those of another |
//! | reduce-scatter | unreduced, then the minor axes of a dim |
//! | all-reduce | unreduced, then replicate |
//! | collective-permute | axes change places; every shard moves whole |
//!
//! Several axes at once are taken off a dim, and put on another, in any order: the devices that differ in them are one
//! group, and which member of a group has which part is a matter of the order in which each packs what it sends.

/// Kinds of collectives.
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
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Slice, Self::AllGather, Self::AllToAll, Self::ReduceScatter, Self::AllReduce, Self::Permute];

    /// The name that people use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Slice => "slice",
            Self::AllGather => "all-gather",
            Self::AllToAll => "all-to-all",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllReduce => "all-reduce",
            Self::Permute => "collective-permute",
        }
    }
}

/// The layout of a tensor: the positions of the factors that cut each dim, major first, and of those over which its
/// values are partial sums.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// One spec per dim.
    pub specs: Vec<Vec<usize>>,
    /// The factors over which it is unreduced, in ascending order.
    pub unreduced: Vec<usize>,
}

/// The part that a factor has in a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The factor cuts a dim, at a place in its spec.
    Cuts(usize, usize),
    Unreduced,
    Replicates,
}

impl State {
    pub(super) fn role(&self, factor: usize) -> Role {
        for (dim, spec) in self.specs.iter().enumerate() {
            if let Some(place) = spec.iter().position(|&a| a == factor) {
                return Role::Cuts(dim, place);
            }
        }
        if self.unreduced.contains(&factor) { Role::Unreduced } else { Role::Replicates }
    }

    /// For each of `count` factors what it does.
    pub(super) fn roles(&self, count: usize) -> Vec<Role> {
        let mut roles = vec![Role::Replicates; count];
        for (dim, spec) in self.specs.iter().enumerate() {
            for (place, &factor) in spec.iter().enumerate() {
                roles[factor] = Role::Cuts(dim, place);
            }
        }
        for &factor in &self.unreduced {
            roles[factor] = Role::Unreduced;
        }
        roles
    }
}

/// One collective.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collective {
    /// The kind of collective.
    pub kind: Kind,
    /// Along which factors, major first: as they cut the dim `to_dim`, or else as they did `from_dim`.
    pub axes: Vec<usize>,
    /// The dim that is put together, if one is.
    pub from_dim: Option<usize>,
    /// The dim that is cut, if one is.
    pub to_dim: Option<usize>,
    /// The state after it.
    pub after: State,
}

/// The factors `axes` begin to cut `dim`, in this order.
pub(super) fn slice(state: &State, axes: &[usize], dim: usize) -> Collective {
    let mut after = state.clone();
    after.specs[dim].extend(axes);
    Collective { kind: Kind::Slice, axes: axes.to_vec(), from_dim: None, to_dim: Some(dim), after }
}

/// The last `count` factors of a dim cease to cut it.
pub(super) fn all_gather(state: &State, dim: usize, count: usize) -> Collective {
    let mut after = state.clone();
    let axes = taken(&mut after, dim, count);
    Collective { kind: Kind::AllGather, axes, from_dim: Some(dim), to_dim: None, after }
}

/// The last factors of a dim cut another one, where they stand in the order `onto`.
pub(super) fn all_to_all(state: &State, from: usize, to: usize, onto: &[usize]) -> Collective {
    let mut after = state.clone();
    taken(&mut after, from, onto.len());
    after.specs[to].extend(onto);
    Collective { kind: Kind::AllToAll, axes: onto.to_vec(), from_dim: Some(from), to_dim: Some(to), after }
}

/// The sums over `axes` are made.
pub(super) fn all_reduce(state: &State, axes: &[usize]) -> Collective {
    let mut after = state.clone();
    after.unreduced.retain(|axis| !axes.contains(axis));
    Collective { kind: Kind::AllReduce, axes: axes.to_vec(), from_dim: None, to_dim: None, after }
}

/// The sums over `axes` are made, and each of their devices keeps a part along `dim`.
pub(super) fn reduce_scatter(state: &State, axes: &[usize], dim: usize) -> Collective {
    let mut after = state.clone();
    after.unreduced.retain(|axis| !axes.contains(axis));
    after.specs[dim].extend(axes);
    Collective { kind: Kind::ReduceScatter, axes: axes.to_vec(), from_dim: None, to_dim: Some(dim), after }
}

/// Every shard goes where `after` wants it; the states have equally many shards along every dim.
pub(super) fn permute(state: &State, after: State, count: usize) -> Collective {
    let (old, new) = (state.roles(count), after.roles(count));
    let axes = (0..count).filter(|&factor| old[factor] != new[factor]).collect();
    Collective { kind: Kind::Permute, axes, from_dim: None, to_dim: None, after }
}

fn taken(state: &mut State, dim: usize, count: usize) -> Vec<usize> {
    let spec = &mut state.specs[dim];
    spec.split_off(spec.len() - count)
}
