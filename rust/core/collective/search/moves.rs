//! The collectives that lead from a state, and those that lead to it.

use super::super::{
    cost::Tensor,
    kinds::{Collective, Role, State, all_gather, all_reduce, all_to_all, reduce_scatter, slice},
};

/// The moves over a tensor, of which those along factors of one class are made with the first of them only.
pub(super) struct Moves<'a> {
    tensor: &'a Tensor,
    classes: Vec<usize>,
}

impl<'a> Moves<'a> {
    /// The factors that `alike` holds for, and whose sizes and links are equal, are of one class.
    pub(super) fn new(tensor: &'a Tensor, alike: impl Fn(usize) -> bool) -> Self {
        let Tensor { sizes, links, .. } = tensor;
        let equal = |a: usize, b: usize| {
            sizes[a] == sizes[b]
                && links.bandwidth[a].to_bits() == links.bandwidth[b].to_bits()
                && links.latency[a].to_bits() == links.latency[b].to_bits()
        };
        let class = |a: usize| (0..a).find(|&b| alike(a) && alike(b) && equal(a, b)).unwrap_or(a);
        Self { tensor, classes: (0..sizes.len()).map(class).collect() }
    }

    /// The state with classes instead of factors: equal for states that are as good as each other.
    pub(super) fn key(&self, state: &State) -> State {
        let classes = |factors: &Vec<usize>| factors.iter().map(|&factor| self.classes[factor]).collect::<Vec<_>>();
        let mut unreduced = classes(&state.unreduced);
        unreduced.sort_unstable();
        State { specs: state.specs.iter().map(classes).collect(), unreduced }
    }

    /// Every collective but a permute that leads from a state to one whose dims divide. Those that bring a dim closer to
    /// `goal` are there with several factors at once.
    pub(super) fn from(&self, state: &State, goal: Option<&State>) -> Vec<Collective> {
        let dims = 0..state.specs.len();
        let mut moves = Vec::new();
        self.reductions(state, &mut moves);
        for factor in self.different(&self.free(state)) {
            moves.extend(dims.clone().map(|dim| slice(state, &[factor], dim)));
        }
        for dim in dims.clone() {
            let spec = &state.specs[dim];
            for count in 1..=spec.len() {
                moves.push(all_gather(state, dim, count));
                let minor = &spec[spec.len() - count..];
                for to in dims.clone().filter(|&to| to != dim) {
                    moves.push(all_to_all(state, dim, to, minor));
                    let orders = goal.map(|goal| orders(minor, &goal.specs[to])).unwrap_or_default();
                    moves.extend(orders.into_iter().map(|order| all_to_all(state, dim, to, &order)));
                }
            }
        }
        if let Some(goal) = goal {
            towards(state, goal, self.tensor.sizes.len(), &mut moves);
        }
        moves.retain(|step| self.tensor.divides(&step.after));
        moves
    }

    fn reductions(&self, state: &State, moves: &mut Vec<Collective>) {
        let unreduced = &state.unreduced;
        if unreduced.len() > 1 {
            moves.push(all_reduce(state, unreduced));
        }
        for factor in self.different(unreduced) {
            moves.push(all_reduce(state, &[factor]));
            moves.extend((0..state.specs.len()).map(|dim| reduce_scatter(state, &[factor], dim)));
            // All that are parts of one mesh axis.
            let axis = |factor: usize| self.tensor.axes[factor];
            let part: Vec<usize> = unreduced.iter().copied().filter(|&other| axis(other) == axis(factor)).collect();
            if part[0] == factor && 1 < part.len() && part.len() < unreduced.len() {
                moves.push(all_reduce(state, &part));
            }
        }
    }

    /// Every collective but a permute and a reduction that leads from a state whose dims divide to this one, with the
    /// state from which it leads.
    pub(super) fn to(&self, state: &State) -> Vec<(State, Collective)> {
        let dims = 0..state.specs.len();
        let mut moves = Vec::new();
        for factor in self.different(&self.free(state)) {
            for dim in dims.clone() {
                let before = slice(state, &[factor], dim).after;
                let step = all_gather(&before, dim, 1);
                moves.push((before, step));
            }
        }
        for dim in dims.clone() {
            for count in 1..=state.specs[dim].len() {
                let minor = &state.specs[dim][state.specs[dim].len() - count..];
                let before = all_gather(state, dim, count).after;
                let step = slice(&before, minor, dim);
                moves.push((before, step));
                for from in dims.clone().filter(|&from| from != dim) {
                    let before = all_to_all(state, dim, from, minor).after;
                    let step = all_to_all(&before, from, dim, minor);
                    moves.push((before, step));
                }
            }
        }
        moves.retain(|(before, _)| self.tensor.divides(before));
        moves
    }

    fn free(&self, state: &State) -> Vec<usize> {
        let roles = state.roles(self.tensor.sizes.len());
        (0..roles.len()).filter(|&factor| roles[factor] == Role::Replicates).collect()
    }

    /// One factor of each class.
    fn different(&self, factors: &[usize]) -> Vec<usize> {
        let class = |i: usize| self.classes[factors[i]];
        (0..factors.len()).filter(|&i| !(0..i).any(|j| class(i) == class(j))).map(|i| factors[i]).collect()
    }
}

/// Other orders in which factors may come to a dim: of up to three all, of more that of `spec`, then the others.
fn orders(factors: &[usize], spec: &[usize]) -> Vec<Vec<usize>> {
    let mut orders = match *factors {
        [a, b] => vec![vec![b, a]],
        [a, b, c] => vec![vec![a, c, b], vec![b, a, c], vec![b, c, a], vec![c, a, b], vec![c, b, a]],
        _ => {
            let wanted = spec.iter().copied().filter(|factor| factors.contains(factor));
            let others = factors.iter().copied().filter(|factor| !spec.contains(factor));
            vec![wanted.chain(others).collect()]
        }
    };
    orders.retain(|order| order != factors);
    orders
}

/// Moves to the goal where a dim is cut as the goal begins to cut it: all factors that come next
/// and are free, or to be reduced, at once.
fn towards(state: &State, goal: &State, count: usize, moves: &mut Vec<Collective>) {
    let roles = state.roles(count);
    for (dim, (spec, wanted)) in state.specs.iter().zip(&goal.specs).enumerate() {
        let Some(rest) = wanted.strip_prefix(&spec[..]) else { continue };
        let run = |role: Role| rest.iter().take_while(|&&factor| roles[factor] == role).count();
        if run(Role::Replicates) > 1 {
            moves.push(slice(state, &rest[..run(Role::Replicates)], dim));
        }
        if run(Role::Unreduced) > 1 {
            moves.push(reduce_scatter(state, &rest[..run(Role::Unreduced)], dim));
        }
    }
}
